"""Low-rank matrices."""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from gblr.matrices.base import StructuredMatrix, check_dims


@dataclass(frozen=True, eq=False, repr=False)
class LowRankMatrix(StructuredMatrix):
    """W = u^T v. Costs rank (out + in).

    >>> u, v = torch.randn(2, 6), torch.randn(2, 4)
    >>> LowRankMatrix(u, v)
    LowRankMatrix(6 x 4, relative_cost=0.833)
    """

    u: Float[Tensor, "rank out"]
    v: Float[Tensor, "rank in"]

    def __post_init__(self) -> None:
        check_dims("u", self.u, "rank out_features")
        check_dims("v", self.v, "rank in_features")
        if self.u.shape[0] != self.v.shape[0]:
            raise ValueError(f"`u` and `v` must have the same rank; got {self.u.shape[0]} and {self.v.shape[0]}.")

    @property
    def shape(self) -> tuple[int, int]:
        return self.u.shape[1], self.v.shape[1]

    @property
    def rank(self) -> int:
        return self.u.shape[0]

    @property
    def num_mults(self) -> int:
        return self.u.numel() + self.v.numel()

    @property
    def num_params(self) -> int:
        return self.num_mults

    @property
    def T(self) -> "LowRankMatrix":
        return LowRankMatrix(self.v, self.u)

    def scale_rows(self, factor: Float[Tensor, " out"]) -> "LowRankMatrix":
        return LowRankMatrix(self.u * factor, self.v)

    def to_dense(self) -> Float[Tensor, "out in"]:
        return self.u.T @ self.v

    def _matmul(self, x: Float[Tensor, "*b in"]) -> Float[Tensor, "*b out"]:
        return (x @ self.v.T) @ self.u

"""BLAST matrices (Lee et al. 2024): tiles that share their left and right factors along rows and columns."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from gblr.matrices.base import StructuredMatrix, check_dims


@dataclass(frozen=True, eq=False, repr=False)
class BlastMatrix(StructuredMatrix):
    """Tile (i, j) of W is u_i diag(s_ij) v_j^T. Costs rank (out + in + tile rows * tile columns).

    `u` is (tile_rows, out / tile_rows, rank), `v` is (tile_cols, in / tile_cols, rank), `s` is (tile_rows, tile_cols,
    rank).

    >>> BlastMatrix(u=torch.randn(2, 6, 3), v=torch.randn(2, 4, 3), s=torch.randn(2, 2, 3))
    BlastMatrix(12 x 8, relative_cost=0.750)
    """

    u: Float[Tensor, "tile_rows tile_out rank"]
    v: Float[Tensor, "tile_cols tile_in rank"]
    s: Float[Tensor, "tile_rows tile_cols rank"]

    def __post_init__(self) -> None:
        check_dims("u", self.u, "tile_rows tile_out rank")
        check_dims("v", self.v, "tile_cols tile_in rank")
        expected = (self.u.shape[0], self.v.shape[0], self.u.shape[2])
        if tuple(self.s.shape) != expected or self.v.shape[2] != self.u.shape[2]:
            raise ValueError(
                f"`s` must be (tile_rows, tile_cols, rank) = {expected} for these factors; "
                f"got {tuple(self.s.shape)}, with `v` {tuple(self.v.shape)}."
            )

    @property
    def shape(self) -> tuple[int, int]:
        return self.u.shape[0] * self.u.shape[1], self.v.shape[0] * self.v.shape[1]

    @property
    def rank(self) -> int:
        return self.s.shape[2]

    @property
    def num_mults(self) -> int:
        return self.u.numel() + self.v.numel() + self.s.numel()

    @property
    def num_params(self) -> int:
        return self.num_mults

    @property
    def T(self) -> "BlastMatrix":
        return BlastMatrix(self.v, self.u, self.s.transpose(0, 1))

    def scale_rows(self, factor: Float[Tensor, " out"]) -> "BlastMatrix":
        return replace(self, u=self.u * factor.view(self.u.shape[:2])[:, :, None])

    def to_dense(self) -> Float[Tensor, "out in"]:
        scaled = self.u[:, :, None] * self.s[:, None]  # (i, o, j, r): all u with all s at first, which are few
        return torch.einsum("iojr,jnr->iojn", scaled, self.v).reshape(self.shape)

    def _matmul(self, x: Float[Tensor, "*b in"]) -> Float[Tensor, "*b out"]:
        z = torch.einsum("jnr,...jn->...jr", self.v, x.unflatten(-1, self.v.shape[:2]))
        z = torch.einsum("ijr,...jr->...ir", self.s, z)
        return torch.einsum("ior,...ir->...io", self.u, z).flatten(-2)

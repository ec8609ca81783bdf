"""Monarch matrices (Dao et al. 2022): block-diagonal times permutation times block-diagonal."""

import functools
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gblr.matrices.base import StructuredMatrix, check_dims
from gblr.ops.checks import is_plain_eager


@dataclass(frozen=True, eq=False, repr=False)
class MonarchMatrix(StructuredMatrix):
    """W = L P R with L and R block-diagonal, `num_blocks` blocks each, and P a fixed permutation that mixes the blocks.

    `left` is (num_blocks, out / num_blocks, inner / num_blocks), `right` is (num_blocks, inner / num_blocks, in /
    num_blocks), so rectangular matrices need no padding; Monarch's usual inner size is min(out, in). Costs inner (out
    + in) / num_blocks. The output permutation of the Monarch paper is left out: then tile (i, j) of W, out/num_blocks
    x in/num_blocks, is a plain low-rank matrix, its rank inner / num_blocks^2 (rounded up or down where that is no
    whole number).

    >>> MonarchMatrix(left=torch.randn(2, 6, 4), right=torch.randn(2, 4, 4))
    MonarchMatrix(12 x 8, relative_cost=0.833)
    """

    left: Float[Tensor, "num_blocks out_block inner_block"]
    right: Float[Tensor, "num_blocks inner_block in_block"]

    def __post_init__(self) -> None:
        check_dims("left", self.left, "num_blocks out_block inner_block")
        check_dims("right", self.right, "num_blocks inner_block in_block")
        if self.left.shape[0] != self.right.shape[0] or self.left.shape[2] != self.right.shape[1]:
            raise ValueError(
                "`left` (num_blocks, out_block, inner_block) and `right` (num_blocks, inner_block, "
                "in_block) must agree; "
                f"got {tuple(self.left.shape)} and {tuple(self.right.shape)}."
            )

    @property
    def num_blocks(self) -> int:
        return self.left.shape[0]

    @property
    def shape(self) -> tuple[int, int]:
        return self.num_blocks * self.left.shape[1], self.num_blocks * self.right.shape[2]

    @property
    def num_mults(self) -> int:
        return self.left.numel() + self.right.numel()

    @property
    def num_params(self) -> int:
        return self.num_mults

    @property
    def T(self) -> "MonarchMatrix":
        return MonarchMatrix(self.right.mT, self.left.mT)

    def scale_rows(self, factor: Float[Tensor, " out"]) -> "MonarchMatrix":
        return MonarchMatrix(self.left * factor.view(self.left.shape[:2])[:, :, None], self.right)

    def to_dense(self) -> Float[Tensor, "out in"]:
        return _block_diagonal(self.left) @ _block_diagonal(self.right)[self._permutation()]

    def _matmul(self, x: Float[Tensor, "*b in"]) -> Float[Tensor, "*b out"]:
        num_blocks, inner_block, in_block = self.right.shape
        z = torch.einsum("bqp,...bp->...bq", self.right, x.unflatten(-1, (num_blocks, in_block)))
        z = z.flatten(-2).index_select(-1, self._permutation()).unflatten(-1, (num_blocks, inner_block))
        return torch.einsum("bsq,...bq->...bs", self.left, z).flatten(-2)

    def _permutation(self) -> Int[Tensor, " inner"]:
        sizes = self.num_blocks, self.left.shape[2]
        make = _kept_permutation if is_plain_eager() else monarch_permutation
        return make(*sizes, self.left.device)


def monarch_permutation(num_blocks: int, inner_block: int, device: torch.device | None = None) -> Int[Tensor, " inner"]:
    """P as an index: P z = z[index]. Symmetric, so indexing twice gives z back.

    Right block j gives left block i a number of its outputs that depends on (i + j) alone: equal shares, the remainder
    spread over the blocks in a circle. As that is symmetric in i and j, the permutation is its own inverse. Made on the
    device, by operations that a compiled graph may hold: nothing is copied from the host.
    """
    num_blocks, inner_block = int(num_blocks), int(inner_block)  # torch.jit.trace has tensors for sizes
    place = torch.arange(num_blocks * inner_block, device=device)
    share, extra = divmod(inner_block, num_blocks)
    if not extra:
        return place.view(num_blocks, num_blocks, share).transpose(0, 1).flatten()
    block = torch.arange(num_blocks, device=device)
    sizes = share + ((block[:, None] + block) % num_blocks < extra).long()  # of (j, i)
    last = sizes.cumsum(1)[:, None]  # output q of right block j goes to the first i whose outputs do not end before it
    goes_to = (place.view(num_blocks, inner_block, 1) >= last + block[:, None, None] * inner_block).sum(-1)
    return goes_to.flatten().argsort(stable=True)


@functools.lru_cache(64)
def _kept_permutation(num_blocks: int, inner_block: int, device: torch.device) -> Int[Tensor, " inner"]:
    """Made once: it takes longer than the products of a small matrix."""
    with torch.inference_mode(False):
        return monarch_permutation(num_blocks, inner_block, device)


def _block_diagonal(blocks: Float[Tensor, "num rows cols"]) -> Float[Tensor, "num*rows num*cols"]:
    """`torch.block_diag(*blocks)` by one operation, whatever their number."""
    num, rows, cols = blocks.shape
    apart = torch.eye(num, device=blocks.device, dtype=blocks.dtype)[:, None, :, None]
    return (blocks[:, :, None] * apart).reshape(num * rows, num * cols)

"""The generalized block-low-rank matrix (paper Eq. 3) and the formats that it contains (Theorem 1)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from gblr.matrices.base import StructuredMatrix, check_dims
from gblr.matrices.structure import Structure
from gblr.ops.checks import can_read_values
from gblr.ops.masks import boxcar_mask


@dataclass(frozen=True, eq=False, repr=False)
class GBLRMatrix(StructuredMatrix):
    """W = sum_k (row_mask_k * u_k)^T (col_mask_k * v_k): blocks of rank `block_rank` at any place, of any size,
    overlapping.

    `u` is (num_blocks, block_rank, out_features), `v` is (num_blocks, block_rank, in_features); what lies outside a
    block's masks has no effect. Costs block_rank (row_width + col_width) for every block whose widths are both above
    0 (Eq. 4).

    >>> one = torch.tensor
    >>> block = Structure(row_width=one([2]), row_location=one([3]), col_width=one([1]), col_location=one([0]))
    >>> GBLRMatrix(block, u=torch.ones(1, 1, 4), v=torch.full((1, 1, 3), 5.0)).to_dense()
    tensor([[5., 0., 0.],
            [0., 0., 0.],
            [0., 0., 0.],
            [5., 0., 0.]])
    """

    structure: Structure
    u: Float[Tensor, "num_blocks block_rank out"]
    v: Float[Tensor, "num_blocks block_rank in"]

    def __post_init__(self) -> None:
        check_dims("u", self.u, "num_blocks block_rank out_features")
        check_dims("v", self.v, "num_blocks block_rank in_features")
        if self.u.shape[:2] != self.v.shape[:2] or self.u.shape[0] != self.structure.num_blocks:
            raise ValueError(
                "`structure`, `u` and `v` must agree on (num_blocks, block_rank); got "
                f"{self.structure.num_blocks} blocks, `u` {tuple(self.u.shape)} and `v` {tuple(self.v.shape)}."
            )
        sides = (("row_width", self.structure.row_width, self.u), ("col_width", self.structure.col_width, self.v))
        for name, width, content in sides:
            if can_read_values(width) and bool((width.long() > content.shape[2]).any()):
                raise ValueError(f"`{name}` must be at most the axis, {content.shape[2]}; got {width.max():g}.")

    @classmethod
    def from_low_rank(cls, u: Float[Tensor, "rank out"], v: Float[Tensor, "rank in"]) -> "GBLRMatrix":
        """u^T v as `rank` blocks of full width (Theorem 1)."""
        check_dims("u", u, "rank out_features")
        check_dims("v", v, "rank in_features")
        start = torch.zeros(u.shape[0], dtype=torch.long, device=u.device)
        structure = Structure(torch.full_like(start, u.shape[1]), start, torch.full_like(start, v.shape[1]), start)
        return cls(structure, u[:, None], v[:, None])

    @classmethod
    def from_block_sparse(
        cls, blocks: Sequence[Tensor], row_starts: Sequence[int], col_starts: Sequence[int], shape: tuple[int, int]
    ) -> "GBLRMatrix":
        """A sum of dense blocks at the given corners: each becomes min(rows, columns) blocks of rank 1 (Theorem 1).

        Blocks may differ in size, overlap (they add up), and run cyclically over the end of an axis.
        """
        if not len(blocks) == len(row_starts) == len(col_starts):
            raise ValueError(
                "`blocks`, `row_starts` and `col_starts` must be equally long; "
                f"got {len(blocks)}, {len(row_starts)} and {len(col_starts)}."
            )
        if not blocks:
            raise ValueError("`blocks` must not be empty: the dtype and device of the matrix come from it.")
        factors, rows = [], []
        for block, row_start, col_start in zip(blocks, row_starts, col_starts, strict=True):
            check_dims("blocks[i]", block, "rows columns")
            height, width = block.shape
            if height > shape[0] or width > shape[1]:
                raise ValueError(f"a block of shape {(height, width)} does not fit into a matrix of shape {shape}.")
            identity = torch.eye(min(block.shape), dtype=block.dtype, device=block.device)
            u, v = (identity, block) if height <= width else (block.T, identity)  # (rank, height), (rank, width)
            factors.append((_spread(u, row_start, shape[0]), _spread(v, col_start, shape[1])))
            rows += [(height, row_start % shape[0], width, col_start % shape[1])] * len(identity)
        u, v = (torch.cat(side)[:, None] for side in zip(*factors, strict=True))
        columns = torch.tensor(rows, device=u.device).reshape(-1, 4).unbind(1)
        return cls(Structure(*columns), u, v)

    @classmethod
    def from_block_low_rank(cls, u: Float[Tensor, "p q rank s_out"], v: Float[Tensor, "p q rank s_in"]) -> "GBLRMatrix":
        """p x q equal tiles, tile (i, j) being u[i, j]^T v[i, j]: one block of `block_rank` = rank each (Theorem 1)."""
        check_dims("u", u, "p q rank s_out")
        check_dims("v", v, "p q rank s_in")
        if u.shape[:3] != v.shape[:3]:
            raise ValueError(f"`u` and `v` must agree on (p, q, rank); got {tuple(u.shape)} and {tuple(v.shape)}.")
        (p, q, _, s_out), s_in = u.shape, v.shape[3]
        i, j = torch.meshgrid(torch.arange(p, device=u.device), torch.arange(q, device=u.device), indexing="ij")
        row_start, col_start = (i * s_out).flatten(), (j * s_in).flatten()
        structure = Structure(torch.full_like(row_start, s_out), row_start, torch.full_like(row_start, s_in), col_start)
        u, v = u.flatten(0, 1), v.flatten(0, 1)  # (tiles, rank, s)
        # repeating a tile along the whole axis puts it under its own mask, wherever that is
        return cls(structure, u.repeat(1, 1, p), v.repeat(1, 1, q))

    @property
    def shape(self) -> tuple[int, int]:
        return self.u.shape[2], self.v.shape[2]

    @property
    def num_blocks(self) -> int:
        return self.u.shape[0]

    @property
    def block_rank(self) -> int:
        return self.u.shape[1]

    @property
    def num_mults(self) -> int:
        s = self.structure
        return self.block_rank * int(((s.row_width.long() + s.col_width.long()) * s.live).sum())

    @property
    def num_params(self) -> int:
        return self.num_mults

    @property
    def T(self) -> "GBLRMatrix":
        return GBLRMatrix(self.structure.T, self.v, self.u)

    def masked_factors(self) -> tuple[Float[Tensor, "ranks out"], Float[Tensor, "ranks in"]]:
        """`u` and `v` with zeros outside the blocks, as the two factors of W = u^T v; ranks = num_blocks *
        block_rank.
        """
        s, (out_features, in_features) = self.structure, self.shape
        rows = boxcar_mask(s.row_width, s.row_location, out_features) > 0
        cols = boxcar_mask(s.col_width, s.col_location, in_features) > 0
        u, v = (torch.where((mask & s.live[:, None])[:, None], t, 0) for mask, t in ((rows, self.u), (cols, self.v)))
        return u.flatten(0, 1), v.flatten(0, 1)  # not products: what lies outside may be anything, NaN too

    def scale_rows(self, factor: Float[Tensor, " out"]) -> "GBLRMatrix":
        return GBLRMatrix(self.structure, self.u * factor, self.v)

    def to_dense(self) -> Float[Tensor, "out in"]:
        u, v = self.masked_factors()
        return u.T @ v

    def _matmul(self, x: Float[Tensor, "*b in"]) -> Float[Tensor, "*b out"]:
        u, v = self.masked_factors()
        return (x @ v.T) @ u


def _spread(content: Float[Tensor, "rank size"], start: int, length: int) -> Float[Tensor, "rank length"]:
    """Puts `content` at `start` (cyclic) of an axis of `length`, zeros elsewhere."""
    padded = torch.nn.functional.pad(content, (0, length - content.shape[1]))
    return padded.roll(start, dims=1)

"""Pixelfly matrices (Chen et al. 2022): block-sparse on a flat block butterfly, plus low rank."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gblr.matrices.base import StructuredMatrix, check_dims
from gblr.ops.checks import can_read_values


@dataclass(frozen=True, eq=False, repr=False)
class PixelflyMatrix(StructuredMatrix):
    """W = B + u^T v, where B has dense tiles `blocks[i]` at tile row `block_row[i]` and tile column `block_col[i]`.

    `grid` is the number of tile rows and tile columns. `butterfly_support` makes the places that Pixelfly prescribes.
    Costs num_tiles * tile_rows * tile_columns + rank (out + in).

    >>> rows, cols = butterfly_support(grid=(4, 4), max_stride=4)
    >>> blocks = torch.randn(len(rows), 8, 8)
    >>> PixelflyMatrix(blocks, rows, cols, torch.randn(2, 32), torch.randn(2, 32), grid=(4, 4))
    PixelflyMatrix(32 x 32, relative_cost=0.875)
    """

    blocks: Float[Tensor, "num_tiles tile_out tile_in"]
    block_row: Int[Tensor, " num_tiles"]
    block_col: Int[Tensor, " num_tiles"]
    u: Float[Tensor, "rank out"]
    v: Float[Tensor, "rank in"]
    grid: tuple[int, int]

    def __post_init__(self) -> None:
        check_dims("blocks", self.blocks, "num_tiles tile_rows tile_columns")
        if not self.block_row.shape == self.block_col.shape == self.blocks.shape[:1]:
            raise ValueError(
                "`block_row` and `block_col` must name a place for each of the "
                f"{len(self.blocks)} tiles; got shapes {tuple(self.block_row.shape)} and {tuple(self.block_col.shape)}."
            )
        for name, place, size in (
            ("block_row", self.block_row, self.grid[0]),
            ("block_col", self.block_col, self.grid[1]),
        ):
            if place.numel() and can_read_values(place) and not 0 <= int(place.min()) <= int(place.max()) < size:
                raise ValueError(
                    f"`{name}` must lie in [0, {size - 1}] on this grid; got {place.min()} to {place.max()}."
                )
        expected = (self.grid[0] * self.blocks.shape[1], self.grid[1] * self.blocks.shape[2])
        if (*self.u.shape[1:], *self.v.shape[1:]) != expected or self.u.shape[0] != self.v.shape[0]:
            raise ValueError(
                f"`u` must be (rank, {expected[0]}) and `v` (rank, {expected[1]}) for this grid of tiles; "
                f"got {tuple(self.u.shape)} and {tuple(self.v.shape)}."
            )

    @property
    def shape(self) -> tuple[int, int]:
        return self.u.shape[1], self.v.shape[1]

    @property
    def num_mults(self) -> int:
        return self.blocks.numel() + self.u.numel() + self.v.numel()

    @property
    def num_params(self) -> int:
        return self.num_mults

    @property
    def T(self) -> "PixelflyMatrix":
        rows, cols = self.grid
        return PixelflyMatrix(self.blocks.mT, self.block_col, self.block_row, self.v, self.u, (cols, rows))

    def scale_rows(self, factor: Float[Tensor, " out"]) -> "PixelflyMatrix":
        of_tiles = factor.view(self.grid[0], -1)[self.block_row]  # (tiles, tile_out)
        return replace(self, blocks=self.blocks * of_tiles[:, :, None], u=self.u * factor)

    def to_dense(self) -> Float[Tensor, "out in"]:
        _, tile_out, tile_in = self.blocks.shape
        tiles = self.blocks.new_zeros(*self.grid, tile_out, tile_in)
        tiles = tiles.index_put((self.block_row, self.block_col), self.blocks, accumulate=True)
        return tiles.transpose(1, 2).reshape(self.shape) + self.u.T @ self.v

    def _matmul(self, x: Float[Tensor, "*b in"]) -> Float[Tensor, "*b out"]:
        rows, cols = self.grid
        tiles = x.unflatten(-1, (cols, -1)).index_select(-2, self.block_col)  # (*b, num_tiles, tile_in)
        products = torch.einsum("toi,...ti->...to", self.blocks, tiles)
        zeros = products.new_zeros(*x.shape[:-1], rows, self.blocks.shape[1])  # in autocast's dtype where there is one
        sparse = zeros.index_add(-2, self.block_row, products)
        return sparse.flatten(-2) + (x @ self.v.T) @ self.u


def butterfly_support(grid: tuple[int, int], max_stride: int) -> tuple[Int[Tensor, " tiles"], Int[Tensor, " tiles"]]:
    """Tile rows and columns of the flat block butterfly: (i, j) with i = j, or i xor j a power of two below
    `max_stride`.

    On a rectangular grid the pattern of the shorter side is stretched along the longer one.

    >>> butterfly_support(grid=(2, 4), max_stride=2)
    (tensor([0, 0, 0, 0, 1, 1, 1, 1]), tensor([0, 1, 2, 3, 0, 1, 2, 3]))
    """
    if max_stride < 1:
        raise ValueError(f"`max_stride` must be at least 1 (1 keeps the diagonal alone); got {max_stride}.")
    side = min(grid)
    i, j = torch.meshgrid(*(torch.arange(size) * side // size for size in grid), indexing="ij")
    stride = i ^ j
    is_power_of_two = (stride & (stride - 1)) == 0  # 0 included: the diagonal
    rows, cols = (is_power_of_two & (stride < max_stride)).nonzero(as_tuple=True)
    return rows, cols

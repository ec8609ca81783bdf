"""A GBLR matrix as inference keeps it: contents cropped to their blocks, one after the other."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gblr.matrices.base import StructuredMatrix
from gblr.matrices.gblr import GBLRMatrix
from gblr.matrices.structure import Structure
from gblr.ops.checks import can_read_values


@dataclass(frozen=True, eq=False, repr=False)
class PackedGBLR(StructuredMatrix):
    """What `harden_` makes: nothing is stored outside the blocks, so its size is its cost.

    `u` holds for each block its block_rank rows of row_width numbers, flat and in the order of the blocks; `v`
    likewise.

    >>> one = torch.tensor
    >>> structure = Structure(one([2]), one([3]), one([1]), one([0]))
    >>> packed = PackedGBLR.from_gblr(GBLRMatrix(structure, u=torch.ones(1, 1, 4), v=torch.full((1, 1, 3), 5.0)))
    >>> packed.u, packed.v
    (tensor([1., 1.]), tensor([5.]))
    """

    structure: Structure
    u: Float[Tensor, " row_total"]
    v: Float[Tensor, " col_total"]
    block_rank: int
    size: tuple[int, int]

    def __post_init__(self) -> None:
        s = self.structure
        for name, content, width in (("u", self.u, s.row_width), ("v", self.v, s.col_width)):
            if not can_read_values(width):
                continue
            expected = self.block_rank * int(width.long().sum())  # in bfloat16 the sum itself would be rounded
            if content.numel() != expected:
                raise ValueError(
                    f"`{name}` must hold block_rank * (sum of widths) = {expected} numbers; got {content.numel()}."
                )

    @classmethod
    def from_gblr(cls, matrix: GBLRMatrix) -> "PackedGBLR":
        """Crops every block and drops the dead ones."""
        s, live = matrix.structure, matrix.structure.live
        structure = Structure(s.row_width[live], s.row_location[live], s.col_width[live], s.col_location[live])
        u = _crop(matrix.u[live], structure.row_width, structure.row_location)
        v = _crop(matrix.v[live], structure.col_width, structure.col_location)
        return cls(structure, u, v, matrix.block_rank, matrix.shape)

    def scale_rows(self, factor: Float[Tensor, " out"]) -> "PackedGBLR":
        return PackedGBLR.from_gblr(self.to_gblr().scale_rows(factor))

    def to_gblr(self) -> GBLRMatrix:
        u, v = self.factors()
        blocks = (self.structure.num_blocks, self.block_rank)
        return GBLRMatrix(self.structure, u.unflatten(0, blocks), v.unflatten(0, blocks))

    @property
    def shape(self) -> tuple[int, int]:
        return self.size

    @property
    def num_lines(self) -> int:
        """Rows of the factors: num_blocks * block_rank."""
        return self.structure.num_blocks * self.block_rank

    @property
    def num_mults(self) -> int:
        return self.u.numel() + self.v.numel()

    @property
    def num_params(self) -> int:
        return self.num_mults

    @property
    def T(self) -> "PackedGBLR":
        return PackedGBLR(self.structure.T, self.v, self.u, self.block_rank, (self.size[1], self.size[0]))

    def factors(self) -> tuple[Float[Tensor, "ranks out"], Float[Tensor, "ranks in"]]:
        """The two factors of W = u^T v with zeros outside the blocks."""
        s = self.structure
        return (
            _spread(self.u, s.row_width, s.row_location, self.block_rank, self.size[0]),
            _spread(self.v, s.col_width, s.col_location, self.block_rank, self.size[1]),
        )

    def to_dense(self) -> Float[Tensor, "out in"]:
        u, v = self.factors()
        return u.T @ v

    def _matmul(self, x: Float[Tensor, "*b in"]) -> Float[Tensor, "*b out"]:
        u, v = self.factors()
        return (x @ v.T) @ u


def _flat_index(width: Tensor, location: Tensor, block_rank: int, length: int, total: int) -> Int[Tensor, " total"]:
    """Places of the `total` cropped numbers in a flat (num_blocks, block_rank, length) tensor, in packed order.

    No shape depends on a value, so that it works under `torch.compile` and on the meta device.
    """
    width, location = (t.long()[:, None].expand(-1, block_rank).flatten() for t in (width, location))  # per row
    row = torch.arange(len(width), device=width.device).repeat_interleave(width, output_size=total)
    first = width.cumsum(0) - width  # where each row begins in packed order
    column = (location[row] + torch.arange(total, device=width.device) - first[row]) % length
    return row * length + column


def _crop(content: Float[Tensor, "k r length"], width: Tensor, location: Tensor) -> Float[Tensor, " total"]:
    _, block_rank, length = content.shape
    return content.flatten()[_flat_index(width, location, block_rank, length, block_rank * int(width.long().sum()))]


def _spread(content: Tensor, width: Tensor, location: Tensor, block_rank: int, length: int) -> Tensor:
    index = _flat_index(width, location, block_rank, length, content.numel())
    flat = content.new_zeros(len(width) * block_rank * length)
    return flat.scatter(0, index, content).view(-1, length)

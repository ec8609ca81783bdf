"""A batch of GBLR matrices of one shape while they are being fitted."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gblr.fitting.intervals import interval_mask
from gblr.matrices.gblr import GBLRMatrix
from gblr.matrices.structure import Structure


@dataclass
class Blocks:
    """b matrices of k blocks each; contents are zero outside their intervals."""

    u: Float[Tensor, "b k r out"]
    v: Float[Tensor, "b k r in"]
    row_start: Int[Tensor, "b k"]
    row_size: Int[Tensor, "b k"]
    col_start: Int[Tensor, "b k"]
    col_size: Int[Tensor, "b k"]

    @classmethod
    def full(cls, u: Float[Tensor, "b k r out"], v: Float[Tensor, "b k r in"], num_live: Int[Tensor, " b"]) -> "Blocks":
        """The first `num_live` blocks at full width, the others dead."""
        index = torch.arange(u.shape[1], device=u.device).expand(u.shape[:2])
        live = index < num_live[:, None]
        start = torch.zeros_like(index)
        return cls(u, v, start, live * u.shape[-1], start.clone(), live * v.shape[-1]).masked()

    @classmethod
    def stack(cls, single: "Sequence[Blocks]") -> "Blocks":
        """One batch of matrices that have equally many blocks."""
        return cls(**{name: torch.cat([getattr(blocks, name) for blocks in single]) for name in vars(single[0])})

    def __getitem__(self, some: slice) -> "Blocks":
        """Some of the matrices."""
        return Blocks(**{name: value[some] for name, value in vars(self).items()})

    @property
    def block_rank(self) -> int:
        return self.u.shape[2]

    @property
    def live(self) -> Tensor:
        return (self.row_size > 0) & (self.col_size > 0)

    def cost(self) -> Int[Tensor, " b"]:
        return self.block_rank * ((self.row_size + self.col_size) * self.live).sum(1)

    def product(self) -> Float[Tensor, "b out in"]:
        return self.u.flatten(1, 2).mT @ self.v.flatten(1, 2)

    def masked(self) -> "Blocks":
        """Contents set to zero outside the intervals, and in dead blocks."""
        rows = interval_mask(self.row_start, self.row_size, self.u.shape[-1]) & self.live[..., None]
        cols = interval_mask(self.col_start, self.col_size, self.v.shape[-1]) & self.live[..., None]
        return Blocks(self.u * rows[:, :, None], self.v * cols[:, :, None], **self.intervals())

    def intervals(self) -> dict[str, Tensor]:
        names = ("row_start", "row_size", "col_start", "col_size")
        return {name: getattr(self, name) for name in names}

    def where(self, condition: Tensor, other: "Blocks") -> "Blocks":
        """Matrices of self where `condition`, of `other` elsewhere."""
        chosen = {}
        for name, value in vars(self).items():
            chosen[name] = torch.where(condition.view(-1, *[1] * (value.dim() - 1)), value, getattr(other, name))
        return Blocks(**chosen)

    def beside(self, other: "Blocks") -> "Blocks":
        """The blocks of both in each matrix."""
        return Blocks(**{name: torch.cat([value, getattr(other, name)], 1) for name, value in vars(self).items()})

    def padded(self, num_blocks: int) -> "Blocks":
        """With dead blocks added up to that number."""
        missing = num_blocks - self.u.shape[1]
        pad = torch.nn.functional.pad
        grown = {name: pad(value, (0, missing)) for name, value in self.intervals().items()}
        return Blocks(pad(self.u, (0, 0, 0, 0, 0, missing)), pad(self.v, (0, 0, 0, 0, 0, missing)), **grown)

    def clone(self) -> "Blocks":
        return Blocks(**{name: value.clone() for name, value in vars(self).items()})

    def copy_(self, other: "Blocks") -> None:
        """Their values, in the tensors that are here."""
        for name, value in vars(self).items():
            value.copy_(getattr(other, name))

    def to_matrices(self) -> list[GBLRMatrix]:
        """Live blocks alone, one matrix per batch entry."""
        matrices = []
        for i, live in enumerate(self.live):
            structure = Structure(
                self.row_size[i, live], self.row_start[i, live], self.col_size[i, live], self.col_start[i, live]
            )
            matrices.append(GBLRMatrix(structure, self.u[i, live], self.v[i, live]))
        return matrices

"""Many lower triangular matrices, most of whose zeros are not stored."""

from collections.abc import Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor

_STRIP = 96  # rows, on a CPU: with 64, 96 and 128 products are fastest; docs/dev/kernels.md


class Triangles:
    """b x s lower triangular matrices of n x n numbers, in strips of rows that end where their last row does.

    On a GPU one strip has all rows: a product is then one kernel, and zeros cost little beside its launch.

    >>> found = Triangles.empty(1, 1, 200, torch.zeros(0))
    >>> found.put(0, torch.eye(200)[None])
    >>> [tuple(strip.shape[2:]) for strip in found.strips]
    [(96, 96), (96, 192), (8, 200)]
    """

    def __init__(self, strips: list[Float[Tensor, "b s rows columns"]]):
        self.strips = strips

    @classmethod
    def empty(cls, b: int, s: int, n: int, like: Tensor) -> "Triangles":
        height = n if like.is_cuda else _STRIP
        ends = [min(n, begin + height) for begin in range(0, n, height)]
        return cls([like.new_empty(b, s, end - begin, end) for begin, end in zip([0, *ends], ends, strict=False)])

    def put(self, s: int, matrices: Float[Tensor, "b n n"]) -> None:
        """The s-th of every b."""
        for strip, rows in self._rows():
            strip[:, s] = matrices[:, rows, : rows.stop]

    def times(self, x: Float[Tensor, "b s r n"]) -> Float[Tensor, "b s r n"]:
        """Each matrix times each of its r vectors."""
        if x.shape[2] == 1 or x.is_cuda:  # rows times matrices are four times as slow for a single row, on a GPU always
            columns = x.mT.contiguous() if len(self.strips) > 1 else x.mT
            parts = [strip @ columns[:, :, : rows.stop] for strip, rows in self._rows()]
            return (parts[0] if len(parts) == 1 else torch.cat(parts, 2)).mT
        x = x.contiguous()
        return torch.cat([x[..., : rows.stop] @ strip.mT for strip, rows in self._rows()], 3)

    def transposed_times(
        self, x: Float[Tensor, "b r n"], which: Int[Tensor, " b"], width: Int[Tensor, " b"]
    ) -> Float[Tensor, "b r n"]:
        """The transpose of one matrix of every s times its r vectors, which are 0 from `width` on."""
        if x.is_cuda:
            return x @ self.strips[0][torch.arange(len(which), device=x.device), which]
        found = torch.zeros_like(x)
        # one by one: taken together, they would be copied first
        for i, (chosen, end) in enumerate(zip(which.tolist(), width.tolist(), strict=True)):
            for strip, rows in self._rows():
                if rows.start < end:
                    found[i, :, : rows.stop] += x[i, :, rows] @ strip[i, chosen]
        return found

    def _rows(self) -> Iterator[tuple[Tensor, slice]]:
        for strip in self.strips:
            rows, end = strip.shape[2:]
            yield strip, slice(end - rows, end)

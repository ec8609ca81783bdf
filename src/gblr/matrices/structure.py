"""Where the blocks of a GBLR matrix lie (paper: phi), and interpolation between two such layouts (Theorem 2)."""

from dataclasses import dataclass

import torch
from jaxtyping import Real
from torch import Tensor

from gblr.ops.checks import can_read_values


@dataclass(frozen=True, eq=False)
class Structure:
    """Width and location of every block on the row (output) and on the column (input) side, in elements.

    Whole numbers in any real or integer dtype. Locations are cyclic: a block may run over the end of its axis.

    >>> Structure(torch.tensor([2, 4]), torch.tensor([0, 3]), torch.tensor([3, 3]), torch.tensor([5, 1])).average_width
    3.0
    """

    row_width: Real[Tensor, " num_blocks"]
    row_location: Real[Tensor, " num_blocks"]
    col_width: Real[Tensor, " num_blocks"]
    col_location: Real[Tensor, " num_blocks"]

    def __post_init__(self) -> None:
        fields = vars(self)
        shapes = {name: tuple(value.shape) for name, value in fields.items()}
        if self.row_width.dim() != 1 or len(set(shapes.values())) != 1:
            raise ValueError(f"widths and locations must all have the shape (num_blocks,); got {shapes}.")
        for name, value in fields.items():
            if can_read_values(value) and value.is_floating_point() and not bool((value.remainder(1) == 0).all()):
                raise ValueError(f"`{name}` must hold whole numbers (elements of the axis); use `.round()` first.")
            if name.endswith("width") and can_read_values(value) and bool((value < 0).any()):
                raise ValueError(f"`{name}` must be 0 or above; got {value.min():g}.")

    @property
    def num_blocks(self) -> int:
        return self.row_width.shape[0]

    @property
    def average_width(self) -> float:
        """Mean over all 2 num_blocks widths (Definition 1); 0 without blocks."""
        total = self.row_width.double().sum() + self.col_width.double().sum()
        return float(total) / max(1, 2 * self.num_blocks)

    @property
    def live(self) -> Tensor:
        """(num_blocks,) bool: both widths above 0. The other blocks are dead: they add nothing and cost nothing."""
        return (self.row_width > 0) & (self.col_width > 0)

    @property
    def T(self) -> "Structure":
        return Structure(self.col_width, self.col_location, self.row_width, self.row_location)


def interpolate(a: Structure, b: Structure, alpha: float) -> Structure:
    """floor(alpha a + (1 - alpha) b) for widths and locations (Theorem 2); never wider on average than the wider of
    the two.

    Locations are interpolated as plain numbers, not along the circle.

    >>> wide = Structure(*(torch.tensor([value]) for value in (8, 0, 8, 0)))
    >>> narrow = Structure(*(torch.tensor([value]) for value in (3, 5, 2, 6)))
    >>> interpolate(wide, narrow, 0.5).row_width
    tensor([5])
    """
    if not 0 <= alpha <= 1:
        raise ValueError(f"`alpha` must lie in [0, 1]; got {alpha}.")
    if a.num_blocks != b.num_blocks:
        raise ValueError(f"`a` and `b` must have equally many blocks; got {a.num_blocks} and {b.num_blocks}.")

    def between(x: Tensor, y: Tensor) -> Tensor:
        mixed = y.double() + alpha * (x.double() - y.double())
        # 1e-9 undoes rounding that would push an exact integer below itself (0.29 * 100); it cannot add up to an
        # element.
        return torch.floor(mixed + 1e-9).to(torch.promote_types(x.dtype, y.dtype))

    return Structure(*(between(x, y) for x, y in zip(vars(a).values(), vars(b).values(), strict=True)))

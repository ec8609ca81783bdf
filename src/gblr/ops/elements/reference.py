"""Fractions to elements and back in plain torch, on any device. Sides come as (*, 2, blocks): rows, then columns."""

import torch
from torch import Tensor

from gblr.ops.masks import nearest_multiple


def forward(width: Tensor, location: Tensor, rows: int, cols: int, align: int) -> Tensor:
    """(*, 4, blocks): row and column widths, row and column locations."""
    sides = [(i, n) for i, n in enumerate((rows, cols))]
    widths = [nearest_multiple(width[..., i, :].clamp(0, 1) * n, align, n) for i, n in sides]
    around = location - location.floor()  # the axis is a circle
    return torch.stack(widths + [nearest_multiple(around[..., i, :] * n, align, n) for i, n in sides], -2)


def backward(grad: Tensor, width: Tensor, rows: int, cols: int) -> tuple[Tensor, Tensor]:
    """Gradients of width and location, each like them: those of the elements, times the axes; none for a width beyond
    its axis.
    """
    scaled = torch.stack([grad[..., i, :] * n for i, n in enumerate((rows, cols, rows, cols))], -2)
    inside = (width >= 0) & (width <= 1)
    return scaled[..., :2, :] * inside, scaled[..., 2:, :].contiguous()

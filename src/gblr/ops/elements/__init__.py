"""Widths and locations of blocks, from fractions of their axes to whole elements, straight through (paper A.5.1)."""

import torch
from jaxtyping import Float
from torch import Tensor

from gblr.ops.checks import is_transformed
from gblr.ops.elements import library as library
from gblr.ops.masks import round_ste


def elements(
    width: Float[Tensor, "2 k"], location: Float[Tensor, "2 k"], axes: tuple[int, int], align: int
) -> tuple[Float[Tensor, " k"], ...]:
    """(row_width, col_width, row_location, col_location) of blocks whose sides are fractions of `axes`: whole numbers,
    multiples of `align` (`round_ste`), widths cut to their axis, locations taken around it. Gradients pass straight
    through.

    As one operator: operation by operation it would be some 26 kernels for a few numbers, in every layer of every
    step. Compilers fuse those by themselves, and get them; so do the transforms of `torch.func`, which know no gradient
    of an operator.

    >>> rows, cols = torch.tensor([0.26, 1.2]), torch.tensor([0.5, 0.5])
    >>> elements(torch.stack([rows, cols]), torch.zeros(2, 2), axes=(8, 10), align=1)[:2]
    (tensor([2., 8.]), tensor([5., 5.]))
    """
    if torch.compiler.is_compiling() or is_transformed(width, location):
        widths = (round_ste(width[i].clamp(0, 1) * n, align, n) for i, n in enumerate(axes))
        around = location - location.detach().floor()
        return (*widths, *(round_ste(around[i] * n, align, n) for i, n in enumerate(axes)))
    return torch.ops.gblr.elements(width, location, *axes, align).unbind(-2)

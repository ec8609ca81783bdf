"""Where a layer without trained weights begins: how many blocks, and how wide."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from gblr.ops.host import on_host

_NOISE = 1e-9  # of a cost that should be whole, in blocks or in steps of `align`


def default_num_blocks(out_features: int, in_features: int, block_rank: int) -> int:
    return max(1, min(out_features, in_features) // block_rank)


@on_host()
def scratch_widths(
    axes: tuple[int, int], num_blocks: int, block_rank: int, relative_cost: float, align: int
) -> Float[Tensor, "2 k"]:
    """Width fractions of the scratch start, low rank and block-sparse: some full blocks, all others equally short.

    Short widths are multiples of `align` (any real number if that is 0), the first of them one step longer than the
    last, so that the cost is met after rounding. A side that is raised to `align` makes the other one shorter; where
    not even the smallest blocks pay for all, the last are dead. One block lives at any cost.
    """
    if not 0 < relative_cost:
        raise ValueError(f"`relative_cost` must be above 0; got {relative_cost}.")
    mean = min(1.0, relative_cost * axes[0] * axes[1] / (num_blocks * block_rank * sum(axes)))
    num_full = int(num_blocks * mean / 2)
    rest = num_blocks - num_full
    short = (num_blocks * mean - num_full) / max(1, rest)
    width = torch.full((2, num_blocks), short)
    if align and mean < 1:
        size = [min(max(align, int(short * n / align) * align), n) for n in axes]
        for i in range(2):
            room = (short * sum(axes) - size[1 - i]) / align
            size[i] = min(size[i], max(1, int(room + _NOISE)) * align)
        left = short * rest * sum(axes) - rest * sum(size)  # elements that this leaves over, or lacks
        step = sum(min(align, n - w) for n, w in zip(axes, size, strict=True))
        num_longer = int(max(0.0, left)) // max(1, step)
        num_live = rest - max(0, math.ceil(-left / sum(size) - _NOISE))
        index = torch.arange(num_blocks) - num_full
        longer = (index < num_longer) * align
        width = torch.stack([((size[i] + longer) / axes[i]).clamp(max=1.0) for i in range(2)])
        width[0] *= index < max(num_live, 1 - num_full)
    width[:, :num_full] = 1.0
    return width

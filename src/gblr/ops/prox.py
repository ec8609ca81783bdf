"""The proximal operator of the widths' l1 norm (paper Eq. 9)."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from gblr.ops.checks import can_read_values


def soft_shrink(x: Float[Tensor, "*k"], threshold: float | Float[Tensor, "*#k"]) -> Float[Tensor, "*k"]:
    """S_mu of the paper: x - mu above mu, 0 elsewhere. `threshold` is a number, or a tensor that broadcasts to `x`.

    Unlike `torch.nn.functional.softshrink` it is one-sided: widths are never negative.

    >>> soft_shrink(torch.tensor([-1.0, 0.1, 0.5]), 0.25)
    tensor([0.0000, 0.0000, 0.2500])
    """
    if isinstance(threshold, Tensor):
        if threshold.dim() > x.dim() or any(
            t not in (1, size) for t, size in zip(threshold.shape[::-1], x.shape[::-1], strict=False)
        ):
            raise ValueError(
                f"`threshold` must broadcast to the shape of `x`, {tuple(x.shape)}; got {tuple(threshold.shape)}."
            )
        bad = can_read_values(threshold) and not bool((threshold >= 0).all())
    else:
        bad = not threshold >= 0
    if bad:
        raise ValueError(f"`threshold` must be 0 or above, without NaN; got {threshold}.")
    return torch.clamp(x - threshold, min=0)


_GRID = 8  # thresholds tried at once
_ROUNDS = 8  # each narrows the bracket by _GRID: 8^8 = 2^24, the precision of float32


def budget_threshold(
    width: Float[Tensor, "*s"],
    weight: Float[Tensor, "*s"],
    cost: Callable[[Tensor], Tensor],
    budget: Float[Tensor, ""],
) -> Float[Tensor, ""]:
    """The smallest threshold at which `width`, soft-shrunk by threshold * weight, costs at most `budget`.

    `cost` takes a stack of candidates, (g, *s) to (g,), and must not rise when a width falls; steps, as rounding makes
    them, are fine. Nothing waits for the device. Where even widths of 0 cost more, all of them end at 0.
    """
    if not width.is_cuda and can_read_values(width, budget) and bool(cost(width[None])[0] <= budget):
        return width.new_zeros(())  # on the CPU a look is free, and often all that is needed
    view = (-1, *(1,) * width.dim())
    high = (width / torch.where(weight > 0, weight, torch.inf)).amax() * (1 + 1e-6)
    low = torch.zeros_like(high)
    share = torch.arange(1, _GRID + 1, device=width.device, dtype=width.dtype) / _GRID
    for _ in range(_ROUNDS):
        grid = torch.where(share < 1, low + (high - low) * share, high)
        fits = cost((width - grid.view(view) * weight).clamp(min=0)) <= budget
        first = (_GRID - fits.sum()).clamp(max=_GRID - 1)  # the first that fits: all after it do
        low, high = torch.cat([low[None], grid]).index_select(0, torch.stack([first, first + 1])).unbind()
    return torch.where(cost(width[None])[0] <= budget, 0.0, high)

"""The proximal operator of the widths' l1 norm (paper Eq. 9)."""

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

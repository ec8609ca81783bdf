"""Learning rates as a function of the step: nothing to store, nothing to restore."""

import math
from typing import Literal

from torch import Tensor
from torch.optim import Optimizer

RateShape = Literal["cosine", "linear", "constant"]


def rate_at(step: int, total_steps: int, shape: RateShape, warmup: float = 0.0, final: float = 0.0) -> float:
    """Share of the full rate in step 0 .. total_steps - 1: up over the share `warmup`, then down to `final` at the end.

    >>> [round(rate_at(step, 8, "linear", warmup=0.25), 2) for step in range(8)]
    [0.33, 0.67, 1.0, 0.83, 0.67, 0.5, 0.33, 0.17]
    """
    first = round(warmup * total_steps)
    if step < first:
        return (step + 1) / (first + 1)
    way = min(1.0, (step - first) / max(1, total_steps - first))
    if shape == "constant":
        return 1.0
    left = 1 - way if shape == "linear" else (1 + math.cos(math.pi * way)) / 2
    return final + (1 - final) * left


def set_rates(optimizer: Optimizer, share: float) -> None:
    """Every group's learning rate at that share of its full one, `initial_lr`."""
    for group in optimizer.param_groups:
        rate = group["initial_lr"] * share
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)  # where a captured step reads it
        else:
            group["lr"] = rate

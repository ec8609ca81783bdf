"""How sigma and the budget move during training, as functions of the share of the steps that are done.

Both take and return tensors on the learner's device: nothing here waits for a device, and a captured step stays valid.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gblr.fitting.config import check_choice
from gblr.ops.checks import check_sigma

SigmaShape = Literal["geometric", "linear", "constant"]


@dataclass(frozen=True)
class SigmaSchedule:
    """Smoothness of the masks: `first`, for the share `warmup` of the steps, then up to `last`, then none.

    `last` is reached at the share `end` of the steps; the last `sharp` of them run at `math.inf`, where hardening is
    exact. `sharp=0` stays at `last`: the budget then counts the soft edges that hardening keeps. The paper's schedule
    is `SigmaSchedule(1.0, 100.0, shape="linear", warmup=5 / 300, end=1.0, sharp=0.0)`.

    >>> schedule = SigmaSchedule(1.0, 100.0, end=0.8, sharp=0.1)
    >>> [float(schedule.at(torch.tensor(part))) for part in (0.0, 0.4, 0.8, 0.95)]
    [1.0, 10.0, 100.0, inf]
    """

    first: float = 1.0
    last: float = 100.0
    shape: SigmaShape = "geometric"
    warmup: float = 0.0
    end: float = 0.85
    sharp: float = 0.05

    def __post_init__(self) -> None:
        check_sigma(self.first)
        check_sigma(self.last)
        check_choice("shape", self.shape, SigmaShape)
        check_shares(warmup=self.warmup, end=self.end, sharp=self.sharp)
        if self.shape != "constant" and self.first != self.last and math.isinf(self.first + self.last):
            raise ValueError(
                f"no {self.shape} way leads from {self.first} to {self.last}; use finite values and `sharp` for a last "
                "phase at infinity, or `SigmaSchedule.constant(math.inf)`."
            )
        if self.warmup >= self.end:
            raise ValueError(f"`warmup` must end before `end`; got {self.warmup} and {self.end}.")

    @classmethod
    def constant(cls, sigma: float) -> "SigmaSchedule":
        """The same smoothness from the first step to the last; `math.inf` suits the fine-tuning of fitted weights."""
        return cls(sigma, sigma, shape="constant", sharp=0.0)

    @property
    def final(self) -> float:
        """What the last step leaves."""
        return math.inf if self.sharp > 0 else self.last if self.shape != "constant" else self.first

    @property
    def is_constant(self) -> bool:
        return self.final == self.first and (self.shape == "constant" or self.first == self.last)

    def at(self, part: Tensor) -> Tensor:
        """Sigma after that share of the steps, as float32: what a layer stores is what its masks are made from."""
        way = ((part - self.warmup) / (self.end - self.warmup)).clamp(0, 1)
        if self.shape == "constant" or self.first == self.last:
            sigma = torch.full_like(part, self.first)
        elif self.shape == "linear":
            sigma = self.first + (self.last - self.first) * way
        else:
            sigma = self.first * (self.last / self.first) ** way
        if self.sharp > 0:
            sigma = torch.where(part >= 1 - self.sharp, math.inf, sigma)
        return sigma.float()


BudgetShape = Literal["cubic", "linear"]


def fall(first: Tensor, last: Tensor, part: Tensor, start: float, end: float, shape: BudgetShape) -> Tensor:
    """From `first`, at the share `start` of the steps, down to `last` at `end`: cubic falls fast, then gently."""
    left = torch.where(part < end, 1 - ((part - start) / max(end - start, 1e-12)).clamp(0, 1), 0.0)
    return last + (first - last).clamp(min=0) * (left**3 if shape == "cubic" else left)


def check_shares(**shares: float) -> None:
    for name, value in shares.items():
        if not 0 <= value <= 1:
            raise ValueError(f"`{name}` is a share of the training steps in [0, 1]; got {value}.")

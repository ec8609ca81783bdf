"""What the fits of all formats share: reading a budget, grouping a batch, and saying no."""

import math
from collections.abc import Hashable, Sequence
from typing import NoReturn, TypeVar

from torch import Tensor

Plan = TypeVar("Plan", bound=Hashable)


def whole_mults(budget: Tensor) -> list[int]:
    """Whole multiplications that each budget pays for; 1e-6 undoes rounding just below a whole number (0.29 * 100)."""
    return [math.floor(mults + 1e-6) for mults in budget.double().tolist()]


def divisors(number: int) -> list[int]:
    """Ascending.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def groups(plans: Sequence[Plan]) -> dict[Plan, list[int]]:
    """Members of a batch by plan: equal plans are worked on as one batch.

    >>> groups([4, 2, 4])
    {4: [0, 2], 2: [1]}
    """
    found: dict[Plan, list[int]] = {}
    for index, plan in enumerate(plans):
        found.setdefault(plan, []).append(index)
    return found


def refuse(kind: str, shape: tuple[int, int], smallest: int, mults: int, hint: str = "") -> NoReturn:
    """The budget is below the smallest matrix of this kind and shape."""
    dense = shape[0] * shape[1]
    least = math.ceil(smallest / dense * 1e4) / 1e4
    way_out = (
        f"Raise `relative_cost` to at least that{hint}, or leave this layer out (`where`)."
        if smallest <= dense
        else "That is above dense: leave this layer out (`where`), or take another config."
    )
    raise ValueError(
        f"the smallest {kind} matrix of shape {shape[0]} x {shape[1]} has a relative cost of {least:g}; the budget of "
        f"this layer is {mults / dense:.3g}. {way_out}"
    )

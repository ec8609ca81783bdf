"""What a model may cost, and how it gets there."""

from dataclasses import dataclass
from typing import Any, Literal

from gblr.fitting.config import check_choice, check_number
from gblr.training.schedules import BudgetShape, check_shares

Method = Literal["projection", "shrinkage"]
Scope = Literal["layers", "model"]
Weights = Literal["gradient", "price", "equal"]
_END = {"projection": 0.6, "shrinkage": 0.9}


@dataclass(frozen=True)
class Budget:
    """One of `relative_cost`, `num_params` and `seconds`, and the way to meet it.

    `relative_cost` is multiplications over those of the dense originals; `num_params` counts parameters after
    hardening; `seconds` is the time of one call on `device` by a cost model that is measured there. `scope="layers"`
    means the Gaudi layers, `"model"` everything, the dense rest included.

    `weights` says how widths share a cut. AdamW moves all of them equally fast, whatever they are worth; `"gradient"`
    makes up for it: a width is cut in inverse proportion to the size of its gradient, as the proximal operator in
    AdamW's own metric would. `"price"` cuts in proportion to what a width costs, `"equal"` all by the same fraction of
    their axis, as the paper does.

    `method="projection"` lowers the bound from the present cost at the share `start` of the steps to the target at
    `end` (0.6; 0.9 for shrinkage), along `shape`, and keeps the widths below it, exactly and at every step.
    `"shrinkage"` is the paper's: shrink by `max_shrinkage` (lambda_0, in fractions of the axis) times the learning rate
    while above the target, and never past it; what is left above it at `end` is projected, so that the budget is met
    whatever `max_shrinkage` is. The paper's 0.02 to 0.04 are for its 300 epochs; by default it would take a whole axis
    away in 3 % of the steps, if no gradient held.

    Two targets, a target out of its range and options that do not go together are a ValueError.

    >>> Budget(relative_cost=0.3).end
    0.6
    """

    relative_cost: float | None = None
    num_params: int | None = None
    seconds: float | None = None
    device: Any = None
    method: Method = "projection"
    scope: Scope = "layers"
    start: float = 0.0
    end: float | None = None
    shape: BudgetShape = "cubic"
    max_shrinkage: float | None = None
    weights: Weights = "gradient"

    def __post_init__(self) -> None:
        given = {name: getattr(self, name) for name in ("relative_cost", "num_params", "seconds")}
        given = {name: value for name, value in given.items() if value is not None}
        if len(given) != 1:
            raise ValueError(
                f"a budget is one of `relative_cost`, `num_params` and `seconds`; got {sorted(given) or 'none'}."
            )
        ((name, value),) = given.items()
        check_number(**given)
        if not value > 0:
            raise ValueError(f"`{name}` must be above 0; got {value}.")
        if self.relative_cost is not None and self.relative_cost > 1:
            raise ValueError(
                f"`relative_cost` is a fraction of the dense multiplications in (0, 1]; got {value}. "
                "Did you mean a percentage?"
            )
        check_choice("method", self.method, Method)
        check_choice("scope", self.scope, Scope)
        check_choice("shape", self.shape, BudgetShape)
        if self.end is None:
            object.__setattr__(self, "end", _END[self.method])
        check_shares(start=self.start, end=self.last_share)
        if self.start > self.last_share:
            raise ValueError(f"`start` must not be after `end`; got {self.start} and {self.end}.")
        check_choice("weights", self.weights, Weights)
        if self.max_shrinkage is not None and not self.max_shrinkage > 0:
            raise ValueError(f"`max_shrinkage` must be above 0; got {self.max_shrinkage}.")
        if self.device is not None and self.seconds is None:
            raise ValueError("`device` belongs to a budget in `seconds`.")

    @property
    def counts(self) -> str:
        """Which of the three it is given by."""
        names = ("relative_cost", "num_params", "seconds")
        return next(name for name in names if getattr(self, name) is not None)

    @property
    def last_share(self) -> float:
        """`end`, which is never None after construction."""
        assert self.end is not None
        return self.end

    @property
    def needs_inputs(self) -> bool:
        """Whether it can only be counted on example inputs: the rest of the model, or the clock."""
        return self.seconds is not None or (self.scope == "model" and self.relative_cost is not None)

"""Lists of runs that compare methods: the same trials of learning rates for all, then every cost."""

from collections.abc import Sequence
from typing import Any

from gblr.experiments.run import DENSE, Kind, Run

RATES = (5e-4, 1e-3, 2e-3)  # from scratch; tried for every method alike
TRIAL: dict[str, Any] = {"epochs": 15, "warmup_epochs": 2.0, "held_out": 5000, "seed": 100}


def rate_trials(
    model: str, kinds: Sequence[Kind], cost: float = 0.15, rates: Sequence[float] = RATES, **options: Any
) -> dict[str, Run]:
    """A short run of each method with each rate, judged on training images that were held out."""
    return {
        f"trial-{model}-{kind.label}-lr{lr:g}": kind.run(model, _cost(kind, cost), **{**TRIAL, **options, "lr": lr})
        for kind in kinds
        for lr in rates
    }


def comparison(
    model: str, kinds: Sequence[Kind], costs: Sequence[float], seed: int = 0, trials: str = "", **options: Any
) -> dict[str, Run]:
    """Every method at every cost, and dense once if it is among them; rates by the trials of the model `trials`."""
    runs = {}
    for kind in kinds:
        pattern = f"trial-{trials}-{kind.label}-lr*" if trials else ""
        for cost in costs if kind is not DENSE else (1.0,):
            label = kind.label if kind is DENSE else f"{kind.label}-{cost:g}"
            more = {**options, "seed": seed, "trials": pattern}
            runs[f"{model}-{label}-seed{seed}"] = kind.run(model, cost, **more)
    return runs


def _cost(kind: Kind, cost: float) -> float:
    return 1.0 if kind is DENSE else cost

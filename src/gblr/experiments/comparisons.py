"""Lists of runs that compare methods: the same trials of learning rates for all, then every cost."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gblr.experiments.run import DENSE, TWIN, Kind, Run

RATES = (5e-4, 1e-3, 2e-3)  # from scratch; tried for every method alike
HELD_OUT = 5000  # training images that judge trials
TRIAL: dict[str, Any] = {"epochs": 15, "warmup_epochs": 2.0, "held_out": HELD_OUT, "seed": 100}


def rate_trials(
    model: str,
    kinds: Sequence[Kind],
    cost: float = 0.15,
    rates: Sequence[float] = RATES,
    make: Callable[..., Any] = Run,
    trial: Mapping[str, Any] = TRIAL,
    by_cost: bool = False,
    name: str = "",
    **options: Any,
) -> dict[str, Any]:
    """A short run of each method with each rate, judged on training samples that were held out; for runs of all costs,
    or, with `by_cost`, of that one. `name` is what the trials call the model.
    """
    return {
        f"trial-{name or model}-{_label(kind, cost, by_cost)}-lr{lr:g}": kind.run(
            model, _cost(kind, cost), make, **{**trial, **options, "lr": lr}
        )
        for lr in rates  # every method once before any of them again: by then the first has left its fit
        for kind in kinds
    }


def comparison(
    model: str,
    kinds: Sequence[Kind],
    costs: Sequence[float],
    seed: int = 0,
    trials: str = "",
    make: Callable[..., Any] = Run,
    by_cost: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Every method at every cost, and dense once if it is among them; rates by the trials of the model `trials`, at the
    same cost if these are `by_cost`.
    """
    runs = {}
    for kind in kinds:
        for cost in costs if kind.method != "dense" else (1.0,):
            pattern = f"trial-{trials}-{_label(kind, cost, by_cost)}-lr*" if trials else ""
            more = {**options, "seed": seed, "trials": pattern}
            runs[name_of(model, kind, cost, seed)] = kind.run(model, cost, make, **more)
    return runs


def trials_and_comparison(
    model: str,
    kinds: Sequence[Kind],
    costs: Sequence[float],
    seeds: int,
    rates: Sequence[float] = RATES,
    trial_epochs: int = TRIAL["epochs"],
    **options: Any,
) -> dict[str, Any]:
    """Trials of rates, then every method at every cost for each seed; `options` are those of the latter."""
    found = rate_trials(model, kinds, rates=rates, epochs=trial_epochs)
    for seed in range(seeds):
        found |= comparison(model, kinds, costs, seed, trials=model, **options)
    return found


def twin_of(model: str, make: Callable[..., Any] = Run, held_out: int = HELD_OUT, **options: Any) -> dict[str, Any]:
    """A dense network trained without the samples that judge trials, for those of a network that is tuned: it has seen
    all of them, so on these samples the rate that changes the least would look the best.
    """
    return {f"{TWIN}{model}": DENSE.run(model, 1.0, make, held_out=held_out, **options)}


def name_of(model: str, kind: Kind, cost: float, seed: int = 0) -> str:
    return f"{model}-{_label(kind, cost)}-seed{seed}"


def _label(kind: Kind, cost: float, by_cost: bool = True) -> str:
    return f"{kind.label}-{cost:g}" if by_cost and kind.method != "dense" else kind.label


def _cost(kind: Kind, cost: float) -> float:
    return 1.0 if kind.method == "dense" else cost

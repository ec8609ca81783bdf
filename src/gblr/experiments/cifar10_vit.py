"""Fig. 5, vision transformers on CIFAR-10 from scratch: every method at equal cost. Ours: docs/results/vision.md.

    gblr reproduce cifar10-vit --data DIR                          # all runs; the same command resumes
    gblr reproduce cifar10-vit --data DIR --only 'vit384-*seed0'   # some of them
    gblr reproduce cifar10-vit --smoke                             # seconds on a CPU, no data

The headline is the ViT of width 384 (depth 8, 6 heads, MLP ratio 4) at costs 0.08, 0.15 and 0.3 of the converted layers
(q, k, v, fc1, fc2), 3 seeds, 60 epochs; the authors' shape (width 768, 8 heads, MLP ratio 3) has one seed. First every
method tries the same three learning rates, for 15 epochs at cost 0.15, judged on 5000 training images held out.
"""

import sys

from gblr.experiments.run import BASELINES, DENSE, LEARNED, RATES, Kind, Recipe, Run
from gblr.experiments.sweep import main

COSTS = (0.3, 0.15, 0.08)
KINDS = (*LEARNED, *BASELINES)
_TRIAL = {"epochs": 15, "warmup_epochs": 2.0, "held_out": 5000, "seed": 100}


def rate_trials(model: str, cost: float = 0.15, kinds: tuple[Kind, ...] = (DENSE, *KINDS)) -> dict[str, Run]:
    """Three rates for each method, for a quarter of the epochs."""
    return {
        f"trial-{model}-{kind.label}-lr{lr:g}": kind.run(model, _cost(kind, cost), lr=lr, **_TRIAL)
        for kind in kinds
        for lr in RATES
    }


def comparison(model: str, costs: tuple[float, ...], seed: int, trials: str = "", **more: object) -> dict[str, Run]:
    """Dense, and every method at every cost; rates by the trials of the model `trials`."""
    runs = {}
    for kind in (DENSE, *KINDS):
        options = more | ({"trials": f"trial-{trials}-{kind.label}-lr*"} if trials else {})
        for cost in costs if kind is not DENSE else (1.0,):
            label = kind.label if kind is DENSE else f"{kind.label}-{cost:g}"
            runs[f"{model}-{label}-seed{seed}"] = kind.run(model, cost, seed=seed, **options)
    return runs


def _cost(kind: Kind, cost: float) -> float:
    return 1.0 if kind is DENSE else cost


def runs(seeds: int) -> dict[str, Run]:
    found = rate_trials("vit384")
    for seed in range(seeds):
        found |= comparison("vit384", COSTS, seed, trials="vit384")
    return found | comparison("vit768", (0.3, 0.08), 0, trials="vit384")


RECIPE = Recipe("cifar10-vit", "Fig. 5: vision transformers on CIFAR-10 from scratch", "cifar10", runs, __spec__.name)

if __name__ == "__main__":
    sys.exit(main(RECIPE))

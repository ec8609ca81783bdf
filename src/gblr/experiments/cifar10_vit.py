"""Fig. 5, vision transformers on CIFAR-10 from scratch: every method at equal cost. Ours: docs/results/vision.md.

    gblr reproduce cifar10-vit --data DIR                                    # all runs; the same command resumes
    gblr reproduce cifar10-vit --data DIR --only 'trial-*' 'vit384-*seed0'   # some of them
    gblr reproduce cifar10-vit --smoke                                       # seconds on a CPU, no data

The headline is the ViT of width 384 (depth 8, 6 heads, MLP ratio 4) at costs 0.08, 0.15 and 0.3 of the converted layers
(q, k, v, fc1, fc2), 3 seeds, 60 epochs; the authors' shape (width 768, 8 heads, MLP ratio 3) has one seed and 20 epochs
(--epochs for more). First every method tries the same three learning rates, for 15 epochs at cost 0.15, judged on 5000
training images held out. Those of the narrow network serve the wide one too, but for dense, which hardly learned with
the rate that was its best there: it tries two for 6 epochs.
"""

import sys

from gblr.experiments.comparisons import RATES, comparison, rate_trials, trials_and_comparison
from gblr.experiments.run import BASELINES, DENSE, LEARNED, Recipe, Run
from gblr.experiments.vision import main

COSTS = (0.3, 0.15, 0.08)
KINDS = (DENSE, *LEARNED, *BASELINES)


def runs(seeds: int) -> dict[str, Run]:
    found = trials_and_comparison("vit384", KINDS, COSTS, seeds)
    found |= rate_trials("vit768", (DENSE,), rates=RATES[:2], epochs=6)
    found |= comparison("vit768", (DENSE,), (1.0,), trials="vit768", epochs=20)
    found |= comparison("vit768", (*LEARNED, *BASELINES), (0.15, 0.3, 0.08), trials="vit384", epochs=20)
    return dict(sorted(found.items(), key=lambda item: not item[1].held_out))  # trials first, the rest in this order


RECIPE = Recipe(
    "cifar10-vit", "Fig. 5: vision transformers on CIFAR-10 from scratch", "cifar10", runs,
    "gblr.experiments.cifar10_vit",
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(main(RECIPE))

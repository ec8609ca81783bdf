"""Fig. 5, MLP-Mixer on CIFAR-10 from scratch: every method at equal cost. Ours: docs/results/vision.md.

    gblr reproduce cifar10-mixer --data DIR          # --smoke: seconds on a CPU, no data

Patches of 4, 8 blocks, width 512, MLP ratios 0.5 (tokens) and 4 (channels), as in the authors' runs; all four MLP
matrices of a block are converted. 30 epochs, one seed, unless --epochs and --seeds say more; every method tries two
rates for 8 epochs, those that were the best for some method on the vision transformer.
"""

import sys

from gblr.experiments.cifar10_vit import COSTS, KINDS
from gblr.experiments.comparisons import trials_and_comparison
from gblr.experiments.run import Recipe, Run
from gblr.experiments.vision import main

RATES = (1e-3, 2e-3)
TRIAL_EPOCHS = 8


def runs(seeds: int) -> dict[str, Run]:
    return trials_and_comparison("mixer", KINDS, COSTS, seeds, RATES, TRIAL_EPOCHS, epochs=30)


RECIPE = Recipe(
    "cifar10-mixer", "Fig. 5: MLP-Mixer on CIFAR-10 from scratch", "cifar10", runs, "gblr.experiments.cifar10_mixer",
    seeds=1,
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(main(RECIPE))

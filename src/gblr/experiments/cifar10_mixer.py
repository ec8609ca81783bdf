"""Fig. 5, MLP-Mixer on CIFAR-10 from scratch: every method at equal cost. Ours: docs/results/vision.md.

    gblr reproduce cifar10-mixer --data DIR          # --smoke: seconds on a CPU, no data

Patches of 4, 8 blocks, width 512, MLP ratios 0.5 (tokens) and 4 (channels), as in the authors' runs; all four MLP
matrices of a block are converted. One seed, unless --seeds says more.
"""

import sys

from gblr.experiments.cifar10_vit import COSTS, KINDS
from gblr.experiments.comparisons import trials_and_comparison
from gblr.experiments.run import Recipe, Run
from gblr.experiments.vision import main


def runs(seeds: int) -> dict[str, Run]:
    return trials_and_comparison("mixer", KINDS, COSTS, seeds)


RECIPE = Recipe(
    "cifar10-mixer", "Fig. 5: MLP-Mixer on CIFAR-10 from scratch", "cifar10", runs, "gblr.experiments.cifar10_mixer",
    seeds=1,
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(main(RECIPE))

"""Fig. 5, a vision transformer on CIFAR-100 from scratch: as cifar10-vit, for users who have the data.

    gblr reproduce cifar100-vit --data DIR           # --smoke: seconds on a CPU, no data

DIR has train-*.parquet and test-*.parquet (columns `img` and `fine_label`), or the folder cifar-100-python.
"""

import sys

from gblr.experiments.cifar10_vit import COSTS, KINDS
from gblr.experiments.comparisons import trials_and_comparison
from gblr.experiments.run import Recipe, Run
from gblr.experiments.vision import main


def runs(seeds: int) -> dict[str, Run]:
    return trials_and_comparison("vit384", KINDS, COSTS, seeds)


RECIPE = Recipe(
    "cifar100-vit", "Fig. 5: a vision transformer on CIFAR-100 from scratch", "cifar100", runs,
    "gblr.experiments.cifar100_vit", seeds=1,
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(main(RECIPE))

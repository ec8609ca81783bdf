"""Fig. 5, MLP-Mixer on CIFAR-100 from scratch: as cifar10-mixer, for users who have the data.

    gblr reproduce cifar100-mixer --data DIR         # --smoke: seconds on a CPU, no data

DIR has what cifar100-vit takes.
"""

import sys

from gblr.experiments import cifar10_mixer
from gblr.experiments.run import Recipe
from gblr.experiments.vision import main

RECIPE = Recipe(
    "cifar100-mixer", "Fig. 5: MLP-Mixer on CIFAR-100 from scratch", "cifar100", cifar10_mixer.runs,
    "gblr.experiments.cifar100_mixer", seeds=1,
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(main(RECIPE))

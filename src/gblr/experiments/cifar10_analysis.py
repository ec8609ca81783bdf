"""Tables 2, 3, 6 and Fig. 6 on CIFAR-10: what each kind of layer learned to cost, where its blocks are, and the gap
between training and test images. Ours: docs/results/vision.md.

    gblr reproduce cifar10-analysis --data DIR       # --smoke: seconds on a CPU, no data

It needs the runs of cifar10-vit for dense and GBLR, in the same folder, and makes those that are missing; then
`python -m gblr.experiments.publish` draws and tabulates.
"""

import sys

from gblr.experiments import cifar10_vit
from gblr.experiments.run import Recipe, Run
from gblr.experiments.vision import main

METHODS = ("vit384-dense", "vit384-gblr-1-", "vit384-gblr-16-")


def runs(seeds: int) -> dict[str, Run]:
    """Of the headline: dense and GBLR by projection, with the trials that choose their rates."""
    every = {name: run for name, run in cifar10_vit.runs(seeds).items() if "shrinkage" not in name}
    return {name: run for name, run in every.items() if name.removeprefix("trial-").startswith(METHODS)}


RECIPE = Recipe(
    "cifar10-analysis", "Tables 2, 3, 6 and Fig. 6: learned costs, masks and the generalization gap", "cifar10", runs,
    "gblr.experiments.cifar10_analysis", folder="cifar10-vit",
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(main(RECIPE))

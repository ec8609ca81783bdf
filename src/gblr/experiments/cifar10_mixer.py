"""Fig. 5, MLP-Mixer on CIFAR-10 from scratch: every method at equal cost. Ours: docs/results/vision.md.

    gblr reproduce cifar10-mixer --data DIR          # --smoke: seconds on a CPU, no data

Patches of 4, 8 blocks, width 512, MLP ratios 0.5 (tokens) and 4 (channels), as in the authors' runs; all four MLP
matrices of a block are converted. 30 epochs, one seed, unless --epochs and --seeds say more; every method tries two
rates for 8 epochs, those that were the best for some method on the vision transformer. At cost 0.3, where GBLR falls
behind while its masks sharpen, one thing at a time is changed in "changed-*": masks sharp sooner or later, the budget
met sooner or later, a slower or faster structure, widths cut by what they cost, or alike, not by their gradients.
"""

import sys

from gblr.experiments.cifar10_vit import COSTS, KINDS
from gblr.experiments.comparisons import comparison, trials_and_comparison
from gblr.experiments.run import CHANGED, Kind, Recipe, Run
from gblr.experiments.vision import main

RATES = (1e-3, 2e-3)
TRIAL_EPOCHS, EPOCHS = 8, 30
_CHANGES = {
    "sigma_end": (0.6, 0.95), "budget_end": (0.4, 0.8), "structure_lr": (2e-3, 1e-2), "weights": ("price", "equal"),
}  # fmt: skip
_CHANGED = tuple(
    Kind(f"{CHANGED}{name.replace('_', '-')}-{value}", "gaudi", ((name, value), ("trials", "trial-mixer-gblr-1-lr*")))
    for name, values in _CHANGES.items()
    for value in values
)


def runs(seeds: int) -> dict[str, Run]:
    found = trials_and_comparison("mixer", KINDS, COSTS, seeds, RATES, TRIAL_EPOCHS, epochs=EPOCHS)
    return found | comparison("mixer", _CHANGED, (0.3,), trials="mixer", epochs=EPOCHS)


RECIPE = Recipe(
    "cifar10-mixer", "Fig. 5: MLP-Mixer on CIFAR-10 from scratch", "cifar10", runs, "gblr.experiments.cifar10_mixer",
    seeds=1,
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(main(RECIPE))

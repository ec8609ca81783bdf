"""Fig. 4 on CIFAR-10: our dense ViT, converted and fine-tuned at several costs. Ours: docs/results/vision.md.

    gblr reproduce cifar10-finetune --data DIR       # --smoke: seconds on a CPU, no data

Starts from the run vit384-dense-seed0 of cifar10-vit, which must be there. Every method is fitted to its weights, with
errors weighted by 512 training images, and trained for 20 epochs; two rates are tried for each, from a twin of that
network which has not seen the images that judge them, for as long as the runs themselves: after a quarter of it, high
rates look worse than they are. GBLR is fitted with the three initializations and keeps sigma infinite, as in the
paper.
"""

import sys
from typing import Any

from gblr.experiments.comparisons import comparison, rate_trials, twin_of
from gblr.experiments.run import BASELINES, DENSE, Kind, Recipe, Run
from gblr.experiments.vision import main
from gblr.training.train_config import FITTED_STRUCTURE_LR

COSTS = (0.5, 0.4, 0.3, 0.2)
RATES = (1e-3, 3e-4)
COMMON: dict[str, Any] = {
    "source": "cifar10-vit/vit384-dense-seed0", "calibration": 512, "epochs": 20, "warmup_epochs": 1.0, "lr": 3e-4,
}  # fmt: skip
_FITTED = (("start_cost", None), ("sigma", None), ("structure_lr", FITTED_STRUCTURE_LR), ("budget_start", 0.0))
KINDS = (
    DENSE,
    *(Kind(f"gblr-{init.replace('_', '-')}", "gaudi", (("init", init), *_FITTED))
      for init in ("correlation", "low_rank", "full")),
    *BASELINES,
)  # fmt: skip


def runs(seeds: int) -> dict[str, Run]:
    twin = twin_of("vit384")
    (start,) = twin
    trial = {**COMMON, "source": f"cifar10-finetune/{start}"}
    found = twin | rate_trials("vit384", KINDS, 0.3, RATES, name=start, **trial)
    for seed in range(seeds):
        found |= comparison("vit384", KINDS, COSTS, seed, trials=start, **COMMON)
    return found


RECIPE = Recipe(
    "cifar10-finetune", "Fig. 4: a dense ViT converted and fine-tuned, on CIFAR-10", "cifar10", runs,
    "gblr.experiments.cifar10_finetune", seeds=1,
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(main(RECIPE))

"""Table 5 on CIFAR-10: pretrained ResNet-20, 32, 44 and 56 at 55 and 30 % of their multiplications.

    gblr reproduce cifar10-resnet --data DIR         # --smoke: seconds on a CPU, no data

DIR has CIFAR-10 and, in it or in its subfolder resnet_cifar10, resnet20.safetensors and so on (--model FOLDER for
another place). Costs are of the whole model; stem and classifier stay dense. GBLR against low rank with equal and with
globally solved ranks (the ALDS kind), all fitted with 512 training images as calibration; accuracy before and after 30
epochs of fine-tuning, with the rate that was the best for ResNet-20 at that cost. Dense is tuned alike, as a control.
Ours: docs/results/vision.md.
"""

import sys
from typing import Any

from gblr.experiments.comparisons import comparison, rate_trials
from gblr.experiments.run import DENSE, Kind, Recipe, Run
from gblr.experiments.vision import main

DEPTHS = (20, 32, 44, 56)
COSTS = (0.55, 0.3)
RATES = (3e-4, 1e-3, 3e-3)
COMMON: dict[str, Any] = {
    "source": "weights", "scope": "model", "calibration": 512, "epochs": 30, "batch_size": 256, "warmup_epochs": 1.0,
    "weight_decay": 5e-4, "smoothing": 0.0, "cutmix": 0.0,
}  # fmt: skip
_GLOBAL = ("allocation", "global")
_FITTED = (_GLOBAL, ("start_cost", None), ("sigma", None), ("structure_lr", 1e-3), ("budget_start", 0.0))
KINDS = (
    DENSE,
    Kind("gblr", "gaudi", (("init", "low_rank"), *_FITTED)),
    Kind("gblr-learned", "gaudi", (("init", "low_rank"), ("start_cost", 1.0), ("budget_start", 0.0))),
    Kind("low-rank-global", "low rank", (_GLOBAL,)),
    Kind("low-rank-uniform", "low rank"),
)


def runs(seeds: int) -> dict[str, Run]:
    trial = {**COMMON, "epochs": 5, "seed": 100}
    found: dict[str, Run] = {}
    for cost in COSTS:
        found |= rate_trials("resnet20", KINDS, cost, RATES, by_cost=True, **trial)
    for seed in range(seeds):
        for depth in DEPTHS:
            found |= comparison(f"resnet{depth}", KINDS, COSTS, seed, trials="resnet20", by_cost=True, **COMMON)
    return found


RECIPE = Recipe(
    "cifar10-resnet", "Table 5: pretrained ResNets for CIFAR-10, converted and tuned", "cifar10-resnet", runs,
    "gblr.experiments.cifar10_resnet", seeds=1,
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(main(RECIPE))

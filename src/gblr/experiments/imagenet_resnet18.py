"""Table 5: a pretrained ResNet-18, converted and retrained on ImageNet, for users who have the data.

    gblr reproduce imagenet-resnet18 --data DIR --model timm:resnet18 --workers 1

Paper: dense 69.62 %, ALDS 69.22 % at 1.03 G, GBLR 69.31 % at 1.01 of 1.82 G multiplications: 55 % of the whole model;
stem, downsampling convolutions and classifier stay dense. The length of its retraining is not printed; here 30 epochs.
--smoke: seconds on a CPU, no data.
"""

import sys
from typing import Any

from gblr.experiments.comparisons import comparison
from gblr.experiments.run import Kind, Recipe, Run
from gblr.experiments.vision import main

COMMON: dict[str, Any] = {
    "source": "weights", "scope": "model", "calibration": 512, "epochs": 30, "batch_size": 256, "lr": 1e-4,
    "warmup_epochs": 1.0, "weight_decay": 1e-4, "smoothing": 0.0, "cutmix": 0.0,
}  # fmt: skip
_GLOBAL = ("allocation", "global")
_FITTED = (_GLOBAL, ("start_cost", None), ("sigma", None), ("structure_lr", 1e-4), ("budget_start", 0.0))
KINDS = (
    Kind("gblr", "gaudi", (("init", "correlation"), *_FITTED)),
    Kind("low-rank-global", "low rank", (_GLOBAL,)),
    Kind("low-rank-uniform", "low rank"),
)


def runs(seeds: int) -> dict[str, Run]:
    found: dict[str, Run] = {}
    for seed in range(seeds):
        found |= comparison("loaded-resnet", KINDS, (0.55,), seed, **COMMON)
    return found


RECIPE = Recipe(
    "imagenet-resnet18", "Table 5: a pretrained ResNet-18, retrained on ImageNet", "imagenet", runs,
    "gblr.experiments.imagenet_resnet18", seeds=1, model="timm:resnet18",
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(main(RECIPE))

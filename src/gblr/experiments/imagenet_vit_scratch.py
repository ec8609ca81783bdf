"""Tables 2, 3, 4, 6: ViT-Base/16 on ImageNet from scratch, with the paper's settings, for users who have the data.

    gblr reproduce imagenet-vit-scratch --data DIR --workers 1     # --smoke: seconds on a CPU, no data

DIR has train/CLASS/*.jpeg and val/CLASS/*.jpeg, or parquet files of images and labels. Paper: dense 78.57 %,
Gaudi-GBLR 78.51 % at 32.8 % of the model's multiplications, which is 0.234 of the converted layers. "gblr-paper" has
the paper's shrinkage, linear sigma and equal cuts (its Table 4); "gblr" our budget and schedule. One GPU: for several,
use `gblr.train`.
"""

import sys
from typing import Any

from gblr.experiments.comparisons import comparison
from gblr.experiments.run import DENSE, Kind, Recipe, Run
from gblr.experiments.vision import main

COMMON: dict[str, Any] = {
    "epochs": 310, "batch_size": 1024, "lr": 1e-3, "structure_lr": 1e-3, "weight_decay": 0.05, "mixup": 0.8,
    "cutmix": 1.0, "mixed_share": 1.0,
}  # fmt: skip
PAPER = (
    ("budget", "shrinkage"), ("max_shrinkage", 0.04), ("budget_start", 0.0), ("weights", "equal"),
    ("sigma_shape", "linear"), ("sigma_warmup", 5 / 300), ("sigma_end", 1.0), ("sigma_sharp", 0.0),
)  # fmt: skip
COST = 0.234  # of the converted layers: 5.65 of 17.2 G in the whole model


def runs(seeds: int) -> dict[str, Run]:
    found: dict[str, Run] = {}
    for seed in range(seeds):
        found |= comparison("vit-base", (DENSE,), (1.0,), seed, **COMMON, drop_path=0.1)
        kinds = (Kind("gblr-paper", "gaudi", PAPER), Kind("gblr", "gaudi"), Kind("low-rank", "low rank"))
        found |= comparison("vit-base", kinds, (COST,), seed, **COMMON)
    return found


RECIPE = Recipe(
    "imagenet-vit-scratch", "Tables 2 to 4: ViT-Base on ImageNet from scratch", "imagenet", runs,
    "gblr.experiments.imagenet_vit_scratch", seeds=1,
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(main(RECIPE))

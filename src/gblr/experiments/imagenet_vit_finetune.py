"""Fig. 4: a pretrained ViT-Base/16, converted and fine-tuned on ImageNet, for users who have the data.

    gblr reproduce imagenet-vit-finetune --data DIR --model timm:vit_base_patch16_224 --workers 1

The paper's settings: 35 epochs, AdamW, rate 1e-4 for contents and structure alike, sigma infinite, the same for all
methods; Algorithm 2 starts GBLR. --model takes what `gblr compress` takes. --smoke: seconds on a CPU, no data.
"""

import sys
from typing import Any

from gblr.experiments.comparisons import comparison
from gblr.experiments.run import Kind, Recipe, Run
from gblr.experiments.vision import main

COSTS = (0.5, 0.4, 0.3, 0.2)
COMMON: dict[str, Any] = {
    "source": "weights", "epochs": 35, "batch_size": 512, "lr": 1e-4, "structure_lr": 1e-4, "sigma": None,
    "start_cost": None, "budget_start": 0.0, "mixup": 0.8, "mixed_share": 1.0,
}  # fmt: skip
KINDS = (
    Kind("gblr", "gaudi", (("init", "correlation"),)),
    Kind("gblr-full", "gaudi", (("init", "full"),)),
    Kind("low-rank", "low rank"),
    Kind("monarch", "monarch"),
)


def runs(seeds: int) -> dict[str, Run]:
    found: dict[str, Run] = {}
    for seed in range(seeds):
        found |= comparison("loaded-vit", KINDS, COSTS, seed, **COMMON)
    return found


RECIPE = Recipe(
    "imagenet-vit-finetune", "Fig. 4: a pretrained ViT-Base, fine-tuned on ImageNet", "imagenet", runs,
    "gblr.experiments.imagenet_vit_finetune", seeds=1, model="timm:vit_base_patch16_224",
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(main(RECIPE))

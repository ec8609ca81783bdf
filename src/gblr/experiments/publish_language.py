"""Stored runs on text into the result files and pictures of the documentation.

    python -m gblr.experiments.publish_language --runs runs/language --docs docs

writes docs/results/NAME.json for every recipe with results, and docs/images/language-*.png; docs/results/language.md
shows them. Nothing is typed by hand: a run that is not there is not in the tables, unless --keep leaves what the files
have of runs made elsewhere.
"""

import sys
from pathlib import Path

from gblr.experiments import gpt2_imdb, gpt2_wikitext103, minilm_stsb, smollm2_wikitext
from gblr.experiments.language import LANGUAGE
from gblr.experiments.publishing import has_costs, kind_of, lines_by_kind, mean_and_spread, parse, publish, save, tell
from gblr.experiments.run import Recipe
from gblr.experiments.store import Record

RECIPES: tuple[Recipe, ...] = tuple(
    module.RECIPE for module in (smollm2_wikitext, gpt2_imdb, minilm_stsb, gpt2_wikitext103)
)
_SETTINGS = (
    "model", "method", "relative_cost", "seed", "block_rank", "allocation", "calibration", "lr", "epochs", "aim",
)  # fmt: skip
_RESULTS = (
    "metric", "higher_is_better", "test", "reached_cost", "model_relative_cost", "num_params", "size_bytes", "seconds",
    "device", "commit",
)  # fmt: skip
_LOST = 1000.0  # times the perplexity of the dense model
_IF_THERE = (
    "fitted", "refitted", "fit_seconds", "refit_seconds", "train_tokens", "rate_trials", "curve",
)  # fmt: skip


def main() -> int:
    args = parse(__doc__, Path("runs/language"))
    return tell(
        [
            recipe.name
            for recipe in RECIPES
            if publish(recipe, row_of, draw, args.runs, args.docs, args.keep, LANGUAGE.goodness)
        ]
    )


def row_of(record: Record) -> Record:
    """One line of a result file."""
    config = record["config"]
    row: Record = {"name": record["name"], "kind": kind_of(record), "trial": config["held_out"] > 0}
    row |= {key: config[key] for key in _SETTINGS} | {key: record[key] for key in _RESULTS}
    row |= {"precision": config["precision"]} if config.get("precision", "float32") != "float32" else {}
    kept = () if row["trial"] else _IF_THERE
    return row | {key: record[key] for key in kept if record.get(key)}


def draw(recipe: Recipe, rows: list[Record], images: Path) -> None:
    """What counts most against the cost reached, a picture for models without training and one for trained ones."""
    from gblr.reports.comparison_figures import draw_against_cost

    for label, mine in (
        ("untrained", [row for row in rows if not row["epochs"]]),
        ("trained", [row for row in rows if row["epochs"]]),
    ):
        mine = without_lost(mine)
        lines = lines_by_kind(mine, "reached_cost", _value)
        dense = [_value(row) for row in mine if row["method"] == "dense"]
        if has_costs(lines):
            higher = mine[0]["higher_is_better"]
            measure = mine[0]["metric"] if higher else f"perplexity, {mine[0]['metric']}"
            figure = draw_against_cost(
                lines, mean_and_spread(dense) if dense else None, measure, f"{recipe.what} ({label})", higher
            )
            save(figure, images / f"language-{recipe.name}-{label}.png")


def without_lost(rows: list[Record]) -> list[Record]:
    """Rows of a picture: perplexities far beyond that of the dense model, of models that are lost, would flatten all
    the others.
    """
    dense = [_value(row) for row in rows if row["method"] == "dense"]
    if not dense or rows[0]["higher_is_better"]:
        return rows
    return [row for row in rows if _value(row) <= _LOST * max(dense)]


def _value(row: Record) -> float:
    return row["test"][row["metric"]]


if __name__ == "__main__":
    sys.exit(main())

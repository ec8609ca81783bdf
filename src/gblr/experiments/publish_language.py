"""Stored runs on text into the result files and pictures of the documentation.

    python -m gblr.experiments.publish_language --runs runs/language --docs docs

writes docs/results/NAME.json for every recipe with results, and docs/images/language-*.png; docs/results/language.md
shows them. Nothing is typed by hand: a run that is not there is not in the tables.
"""

import argparse
import statistics
import sys
from pathlib import Path

from gblr.experiments import gpt2_imdb, gpt2_wikitext103, minilm_stsb, smollm2_wikitext
from gblr.experiments.publish import by_cost, head_of, kind_of, mean_and_spread, save, stored_runs
from gblr.experiments.run import Recipe
from gblr.experiments.store import Record, write

RECIPES: tuple[Recipe, ...] = tuple(
    module.RECIPE for module in (smollm2_wikitext, gpt2_imdb, minilm_stsb, gpt2_wikitext103)
)
_SETTINGS = (
    "model",
    "method",
    "relative_cost",
    "seed",
    "block_rank",
    "allocation",
    "calibration",
    "lr",
    "epochs",
    "aim",
)
_RESULTS = (
    "metric", "higher_is_better", "test", "reached_cost", "model_relative_cost", "num_params", "size_bytes", "seconds",
    "device", "commit",
)  # fmt: skip
_IF_THERE = (
    "fitted", "refitted", "fit_seconds", "refit_seconds", "train_tokens", "rate_trials", "curve",
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs/language"), help="folder of the results of all recipes")
    parser.add_argument("--docs", type=Path, default=Path("docs"), help="folder of the documentation")
    args = parser.parse_args()
    written = [recipe.name for recipe in RECIPES if publish(recipe, args.runs, args.docs)]
    print(f"written: {', '.join(written) or 'nothing, there are no results'}")
    return 0


def publish(recipe: Recipe, runs: Path, docs: Path) -> bool:
    """The result file of a recipe, and its picture; False if it has no results."""
    records = stored_runs(recipe, runs)
    if not records:
        return False
    rows = [row_of(record) for record in records]
    write(docs / "results" / f"{recipe.result or recipe.name}.json", head_of(recipe, records), rows)
    draw(recipe, [row for row in rows if not row["trial"]], docs / "images")
    return True


def row_of(record: Record) -> Record:
    """One line of a result file."""
    config = record["config"]
    row: Record = {"name": record["name"], "kind": kind_of(record), "trial": config["held_out"] > 0}
    row |= {key: config[key] for key in _SETTINGS} | {key: record[key] for key in _RESULTS}
    kept = () if row["trial"] else _IF_THERE
    return row | {key: record[key] for key in kept if record.get(key)}


def draw(recipe: Recipe, rows: list[Record], images: Path) -> None:
    """What counts most against the cost reached, a picture for models without training and one for trained ones."""
    from gblr.reports.comparison_figures import Line, draw_against_cost

    for label, mine in (
        ("untrained", [row for row in rows if not row["epochs"]]),
        ("trained", [row for row in rows if row["epochs"]]),
    ):
        lines = []
        for kind in dict.fromkeys(row["kind"] for row in mine if row["method"] != "dense"):
            points = sorted(
                (statistics.fmean(row["reached_cost"] for row in group), *mean_and_spread(_values(group)))
                for group in by_cost([row for row in mine if row["kind"] == kind])
            )
            lines.append(Line(kind, *(list(column) for column in zip(*points, strict=True))))
        dense = _values([row for row in mine if row["method"] == "dense"])
        if lines:
            higher = mine[0]["higher_is_better"]
            measure = mine[0]["metric"] if higher else f"perplexity, {mine[0]['metric']}"
            figure = draw_against_cost(
                lines, mean_and_spread(dense) if dense else None, measure, f"{recipe.what} ({label})", higher
            )
            save(figure, images / f"language-{recipe.name}-{label}.png")


def _values(rows: list[Record]) -> list[float]:
    return [row["test"][row["metric"]] for row in rows]


if __name__ == "__main__":
    sys.exit(main())

"""Stored runs into the result files and pictures of the documentation.

    python -m gblr.experiments.publish --runs runs/vision --docs docs

writes docs/results/RECIPE.json for every recipe with results, and docs/images/vision-*.png; docs/results/vision.md
shows them. Nothing is typed by hand: a run that is not there is not in the tables.
"""

import argparse
import re
import statistics
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from gblr.experiments import (
    cifar10_analysis,
    cifar10_finetune,
    cifar10_mixer,
    cifar10_resnet,
    cifar10_vit,
    cifar100_vit,
    imagenet_resnet18,
    imagenet_vit_finetune,
    imagenet_vit_scratch,
)
from gblr.experiments.run import Recipe
from gblr.experiments.store import Record, Store, write

_MODULES = (
    cifar10_vit, cifar10_mixer, cifar10_finetune, cifar10_resnet, cifar100_vit, imagenet_vit_scratch,
    imagenet_vit_finetune, imagenet_resnet18,
)  # fmt: skip
RECIPES: tuple[Recipe, ...] = tuple(module.RECIPE for module in _MODULES)
_KEPT = ("model", "method", "relative_cost", "seed", "block_rank", "lr", "epochs", "scope")
_MOST_SEEDS = 100  # a store may hold more seeds than the recipe asks for


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs/vision"), help="folder of the results of all recipes")
    parser.add_argument("--docs", type=Path, default=Path("docs"), help="folder of the documentation")
    args = parser.parse_args()
    written = [recipe.name for recipe in RECIPES if publish(recipe, args.runs, args.docs)]
    if analyse(args.runs, args.docs):
        written.append(cifar10_analysis.RECIPE.name)
    print(f"written: {', '.join(written) or 'nothing, there are no results'}")
    return 0


def publish(recipe: Recipe, runs: Path, docs: Path) -> bool:
    """The result file of a recipe, and its picture; False if it has no results."""
    records = stored_runs(recipe, runs)
    if not records:
        return False
    rows = [row_of(record) for record in records]
    write(docs / "results" / f"{recipe.name}.json", head_of(recipe, records), rows)
    draw(recipe, [row for row in rows if not row["trial"]], docs / "images")
    return True


def stored_runs(recipe: Recipe, runs: Path) -> list[Record]:
    """Results that are there, of as many seeds as there are, in the order of the recipe."""
    store = Store(runs / recipe.place)
    return [store.read(name) for name in recipe.runs(_MOST_SEEDS) if store.has(name)]


def row_of(record: Record) -> Record:
    """One line of a result file."""
    row: Record = {"name": record["name"], "kind": kind_of(record), "trial": record["config"]["held_out"] > 0}
    row |= {key: record["config"][key] for key in _KEPT}
    row |= {"accuracy": record["test"]["accuracy"], "loss": record["test"]["loss"]}
    row |= {"train_accuracy": record["train"]["accuracy"], "train_loss": record["train"]["loss"]}
    row |= {key: record[key] for key in ("reached_cost", "model_relative_cost", "num_params", "seconds", "commit")}
    for key in ("before", "dense_start"):
        row[key] = record[key]["accuracy"] if record.get(key) else None
    kept = ("max_shrinkage",) if row["trial"] else ("rate_trials", "max_shrinkage", "curve")
    more = {key: record[key] for key in kept if record.get(key)}
    return row | more


def kind_of(record: Record) -> str:
    """The method as the name of the run has it: "gblr-16" of "vit384-gblr-16-0.3-seed0"."""
    name = record["name"].removeprefix("trial-").removeprefix(f"{record['config']['model']}-")
    return re.sub(r"(-lr[\de.-]+|(-[\d.]+)?-seed\d+)$", "", name)


def head_of(recipe: Recipe, records: list[Record]) -> Record:
    device, torch = (Counter(record[key] for record in records).most_common(1)[0][0] for key in ("device", "torch"))
    head = {"command": f"gblr reproduce {recipe.name} --data DIR", "what": recipe.what, "device": device}
    return head | {"torch": torch}


# -- learned costs, masks, the gap ---------------------------------------------------------------------------------


def analyse(runs: Path, docs: Path) -> bool:
    recipe = cifar10_analysis.RECIPE
    store = Store(runs / recipe.place)
    records = [store.read(name) for name, run in recipe.runs(_MOST_SEEDS).items() if store.has(name) and run.seed < 100]
    if not records:
        return False
    rows = []
    for record in records:
        row = {key: value for key, value in row_of(record).items() if key not in ("curve", "rate_trials")}
        if record["config"]["method"] == "gaudi":
            row |= {"by_type": record["by_type"]} | ({"layers": record["layers"]} if record["seed"] == 0 else {})
        rows.append(row)
    write(docs / "results" / f"{recipe.name}.json", head_of(recipe, records), rows)
    for record in records:
        if (blocks := store.load_blocks(record["name"])) is not None:
            draw_masks(record, blocks, docs / "images")
    return True


def draw_masks(record: Record, blocks: dict[str, np.ndarray], images: Path) -> None:
    """Fig. 6: the first, a middle and the last layer, with the ranks of their weights."""
    from gblr.reports.comparison_figures import OverlapPanel, draw_overlaps
    from gblr.reports.overlaps import overlap_counts

    depths = sorted({int(match[1]) for name in blocks if (match := re.match(r"blocks\.(\d+)\.", name))})
    panels = []
    for depth in sorted({depths[0], depths[len(depths) // 2], depths[-1]}):
        line = []
        for name, found in ((n, b) for n, b in blocks.items() if n.startswith(f"blocks.{depth}.")):
            layer = record["layers"][name]
            counts = overlap_counts(found.astype(np.int64), tuple(layer["shape"]))
            title = f"block {depth}, {name.rsplit('.', 1)[-1]}"
            line.append(OverlapPanel(title, f"rank {layer['rank']}, cost {layer['relative_cost']:.3f}", counts))
        panels.append(line)
    config = record["config"]
    title = f"Overlapping blocks, cost {config['relative_cost']:g}, block_rank {config['block_rank']}"
    save(draw_overlaps(panels, title), images / f"vision-masks-{config['relative_cost']:g}-{config['block_rank']}.png")


# -- pictures ------------------------------------------------------------------------------------------------------


def draw(recipe: Recipe, rows: list[Record], images: Path) -> None:
    """One picture for each network: accuracy against the cost reached."""
    from gblr.reports.comparison_figures import Line, draw_against_cost

    key = "model_relative_cost" if any(row["scope"] == "model" for row in rows) else "reached_cost"
    for model in sorted({row["model"] for row in rows}):
        mine = [row for row in rows if row["model"] == model]
        lines = []
        for kind in dict.fromkeys(row["kind"] for row in mine if row["method"] != "dense"):
            points = sorted(
                (statistics.fmean(row[key] for row in group), *mean_and_spread([row["accuracy"] for row in group]))
                for group in by_cost([row for row in mine if row["kind"] == kind])
            )
            lines.append(Line(kind, *(list(column) for column in zip(*points, strict=True))))
        dense = [row["accuracy"] for row in mine if row["method"] == "dense"]
        if lines:
            title = f"{recipe.what} ({model})"
            figure = draw_against_cost(lines, mean_and_spread(dense) if dense else None, "test accuracy, %", title)
            save(figure, images / f"vision-{recipe.name}-{model}.png")


def by_cost(rows: list[Record]) -> list[list[Record]]:
    groups: dict[float, list[Record]] = {}
    for row in rows:
        groups.setdefault(row["relative_cost"], []).append(row)
    return list(groups.values())


def mean_and_spread(values: list[float]) -> tuple[float, float]:
    """Mean and standard deviation over seeds, 0 for one seed."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def save(figure: Any, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=100)


if __name__ == "__main__":
    sys.exit(main())

"""Stored runs into the result files and pictures of the documentation.

    python -m gblr.experiments.publish --runs runs/vision --docs docs

writes docs/results/RECIPE.json for every recipe with results, and docs/images/vision-*.png; docs/results/vision.md
shows them. Nothing is typed by hand: a run that is not there is not in the tables, unless --keep leaves what the files
have of runs made elsewhere.
"""

import re
import sys
from pathlib import Path

import numpy as np

from gblr.experiments import (
    cifar10_analysis,
    cifar10_finetune,
    cifar10_mixer,
    cifar10_resnet,
    cifar10_vit,
    cifar100_mixer,
    cifar100_vit,
    imagenet_resnet18,
    imagenet_vit_finetune,
    imagenet_vit_scratch,
)
from gblr.experiments.publishing import (
    MOST_SEEDS,
    has_costs,
    kind_of,
    lines_by_kind,
    mean_and_spread,
    parse,
    publish,
    save,
    tell,
    write_rows,
)
from gblr.experiments.run import CHANGED, Recipe
from gblr.experiments.store import Record, Store
from gblr.experiments.vision import VISION

_MODULES = (
    cifar10_vit, cifar10_mixer, cifar10_finetune, cifar10_resnet, cifar100_vit, cifar100_mixer,
    imagenet_vit_scratch, imagenet_vit_finetune, imagenet_resnet18,
)  # fmt: skip
RECIPES: tuple[Recipe, ...] = tuple(module.RECIPE for module in _MODULES)
_KEPT = ("model", "method", "relative_cost", "seed", "block_rank", "lr", "epochs", "scope")


def main() -> int:
    args = parse(__doc__, Path("runs/vision"))
    written = [
        recipe.name
        for recipe in RECIPES
        if publish(recipe, row_of, draw, args.runs, args.docs, args.keep, VISION.goodness)
    ]
    if analyse(args.runs, args.docs, args.keep):
        written.append(cifar10_analysis.RECIPE.name)
    return tell(written)


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
    if record["config"]["method"] == "gaudi" and not row["trial"] and record["seed"] == 0:
        more["layer_costs"] = {name: layer["relative_cost"] for name, layer in record["layers"].items()}
    return row | more


# -- learned costs, masks, the gap ---------------------------------------------------------------------------------


def analyse(runs: Path, docs: Path, keep: bool = False) -> bool:
    recipe = cifar10_analysis.RECIPE
    store = Store(runs / recipe.place)
    records = [store.read(name) for name, run in recipe.runs(MOST_SEEDS).items() if store.has(name) and run.seed < 100]
    if not records:
        return False
    rows = []
    for record in records:
        row = {key: value for key, value in row_of(record).items() if key not in ("curve", "rate_trials")}
        if record["config"]["method"] == "gaudi":
            row |= {"by_type": record["by_type"]} | ({"layers": record["layers"]} if record["seed"] == 0 else {})
        rows.append(row)
    write_rows(recipe, records, rows, docs, keep)
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
    """One picture for each network that has several costs: accuracy against the cost reached. Runs that change one
    thing of another's have a table.
    """
    from gblr.reports.comparison_figures import draw_against_cost

    key = "model_relative_cost" if any(row["scope"] == "model" for row in rows) else "reached_cost"
    for model in sorted({row["model"] for row in rows}):
        mine = [row for row in rows if row["model"] == model and not row["kind"].startswith(CHANGED)]
        lines = lines_by_kind(mine, key, lambda row: row["accuracy"])
        dense = [row["accuracy"] for row in mine if row["method"] == "dense"]
        if has_costs(lines):
            title = f"{recipe.what} ({model})"
            figure = draw_against_cost(lines, mean_and_spread(dense) if dense else None, "test accuracy, %", title)
            save(figure, images / f"vision-{recipe.name}-{model}.png")


if __name__ == "__main__":
    sys.exit(main())

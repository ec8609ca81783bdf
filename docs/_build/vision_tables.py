"""Tables of the vision experiments, from the files that `python -m gblr.experiments.publish` writes."""

import statistics
from collections.abc import Callable, Sequence

from table_text import Record, markdown_table

KINDS = {
    "dense": "dense",
    "gblr": "GBLR, fitted",
    "gblr-1": "GBLR, block_rank 1",
    "gblr-16": "GBLR, block_rank 16",
    "gblr-1-shrinkage": "GBLR, block_rank 1, shrinkage",
    "gblr-correlation": "GBLR, fitted from correlations",
    "gblr-low-rank": "GBLR, fitted from low rank",
    "gblr-full": "GBLR, fitted from full blocks",
    "gblr-paper": "GBLR, the paper's settings",
    "changed-sigma-end-0.6": "GBLR, block_rank 1, sharp after 60 %",
    "changed-budget-end-0.4": "GBLR, block_rank 1, budget met after 40 %",
    "changed-budget-end-0.8": "GBLR, block_rank 1, budget met after 80 %",
    "changed-structure-lr-0.002": "GBLR, block_rank 1, slower structure",
    "changed-structure-lr-0.01": "GBLR, block_rank 1, faster structure",
    "changed-weights-price": "GBLR, block_rank 1, widths cut by what they cost",
    "changed-weights-equal": "GBLR, block_rank 1, widths cut alike",
    "changed-sigma-end-0.95": "GBLR, block_rank 1, sharp after 95 %",
    "low-rank": "low rank",
    "low-rank-global": "low rank, solved ranks (ALDS kind)",
    "low-rank-uniform": "low rank, equal cost everywhere",
    "dense-distilled": "dense, distilled",
    "gblr-distilled": "GBLR, fitted, distilled",
    "low-rank-global-distilled": "low rank, solved ranks (ALDS kind), distilled",
    "low-rank-uniform-distilled": "low rank, equal cost everywhere, distilled",
    "monarch": "Monarch",
    "pixelfly": "Pixelfly",
    "blast": "BLAST",
}


def mean_and_spread(values: Sequence[float], digits: int = 2) -> str:
    """Mean over seeds, with the standard deviation where there are several."""
    mean = f"{statistics.fmean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.{digits}f}"


def groups(rows: Sequence[Record], *keys: str) -> dict[tuple, list[Record]]:
    found: dict[tuple, list[Record]] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in keys), []).append(row)
    return found


def final_rows(record: Record) -> list[Record]:
    return [row for row in record["rows"] if not row["trial"]]


def by_cost(record: Record, model: str = "") -> str:
    """One line per network and method; for each cost asked, accuracy over seeds and the cost reached, the best bold.
    Without runs that change one thing of another's, which `changes` shows.
    """
    rows = [row for row in final_rows(record) if (not model or row["model"] == model) and not _is_changed(row)]
    costs = sorted({row["relative_cost"] for row in rows if row["method"] != "dense"})
    cells = groups(rows, "model", "kind", "relative_cost")
    means = {key: statistics.fmean(row["accuracy"] for row in found) for key, found in cells.items()}
    lines = []
    for network, kind in groups(rows, "model", "kind"):
        line = [
            network,
            KINDS.get(kind, kind),
            _seeds([found for key, found in cells.items() if key[:2] == (network, kind)]),
        ]
        for cost in (1.0, *costs):
            line.append(_cost_cell(cells.get((network, kind, cost)), _is_best(means, network, kind, cost)))
        lines.append(line)
    return markdown_table(["network", "method", "seeds", *(f"cost {cost:g}" for cost in (1.0, *costs))], lines, 2)


def _seeds(cells: Sequence[Sequence[Record]]) -> str:
    """How many runs a cell of the line has; "2 to 3" where they differ."""
    least, most = (end(len(rows) for rows in cells) for end in (min, max))
    return f"{most}" if least == most else f"{least} to {most}"


def _is_best(means: dict[tuple, float], network: str, kind: str, cost: float) -> bool:
    rivals = [mean for (model, _, c), mean in means.items() if (model, c) == (network, cost)]
    return len(rivals) > 1 and means.get((network, kind, cost)) == max(rivals)


def _cost_cell(rows: Sequence[Record] | None, best: bool) -> str:
    if not rows:
        return ""
    text = mean_and_spread([row["accuracy"] for row in rows])
    text = f"**{text}**" if best else text
    if rows[0]["method"] == "dense":
        return text
    reached = statistics.fmean(
        row["model_relative_cost" if row["scope"] == "model" else "reached_cost"] for row in rows
    )
    return f"{text} ({reached:.3f})"


def _is_changed(row: Record) -> bool:
    return row["kind"].startswith("changed-")


def changes(record: Record) -> str:
    """Runs that change one thing, below those of the same network and cost that they change, and the best of all."""
    rows = final_rows(record)
    lines = []
    for (network, cost), found in groups(rows, "model", "relative_cost").items():
        if not any(map(_is_changed, found)):
            continue
        best = max(found, key=lambda row: row["accuracy"])
        shown = [row for row in found if _is_changed(row) or row["kind"] == "gblr-1" or row is best]
        for row in shown:
            numbers = [f"{row['accuracy']:.2f}", f"{row['loss']:.3f}"]
            numbers += [f"{row['train_accuracy']:.2f}", f"{row['train_loss']:.3f}"]
            lines.append([network, KINDS.get(row["kind"], row["kind"]), f"{cost:g}", *numbers])
    heads = ["network", "method", "cost", "test accuracy", "test loss", "training accuracy", "training loss"]
    return markdown_table(heads, lines, 2)


def before_and_after(record: Record) -> str:
    """Converted models: accuracy of the dense start, after conversion, and after fine-tuning."""
    lines = []
    for (network, cost, kind), rows in groups(final_rows(record), "model", "relative_cost", "kind").items():
        numbers = [mean_and_spread([row[key] for row in rows]) for key in ("dense_start", "before", "accuracy")]
        costs = [f"{statistics.fmean(row[key] for row in rows):.3f}" for key in ("reached_cost", "model_relative_cost")]
        lines.append([network, KINDS.get(kind, kind), f"{cost:g}", *costs, *numbers])
    heads = ["network", "method", "cost asked", "cost of the layers", "cost of the model"]
    return markdown_table([*heads, "dense", "converted", "tuned"], lines, 2)


def converted_and_tuned(record: Record) -> str:
    """One line per network: accuracy of dense, and of the two that solve ranks after conversion and after tuning, and
    after distillation where that has been run.
    """
    rows = final_rows(record)
    costs = sorted({row["relative_cost"] for row in rows if row["method"] != "dense"}, reverse=True)
    tuned, made = ("low-rank-global", "gblr"), {(row["kind"], row["relative_cost"]) for row in rows}
    columns = []
    for cost in costs:
        distilled = [(f"{kind}-distilled", cost) for kind in tuned]
        columns += [(kind, cost) for kind in tuned] + [column for column in distilled if column in made]
    lines = []
    for (network,), mine in groups(rows, "model").items():
        cells = groups(mine, "kind", "relative_cost")
        line = [network, f"{mine[0]['dense_start']:.2f}"]
        for kind, cost in columns:
            found = cells.get((kind, cost), [])
            keys = ("accuracy",) if kind.endswith("-distilled") else ("before", "accuracy")
            line.append(" to ".join(mean_and_spread([row[key] for row in found]) for key in keys if found))
        lines.append(line)
    return markdown_table(["network", "dense", *(_tuned_head(kind, cost) for kind, cost in columns)], lines, 1)


def _tuned_head(kind: str, cost: float) -> str:
    name = "GBLR" if kind.startswith("gblr") else "low rank"
    return f"{name} at {cost:g}" + (", distilled" if kind.endswith("-distilled") else "")


def rates(record: Record) -> str:
    """The trials that chose learning rates: accuracy on held-out training images, the best of a line bold."""
    rows = [row for row in record["rows"] if row["trial"]]
    tried = sorted({row["lr"] for row in rows})
    lines = []
    for (network, kind, cost), found in groups(rows, "model", "kind", "relative_cost").items():
        accuracy = {row["lr"]: row["accuracy"] for row in found}
        cells = [f"{accuracy[lr]:.2f}" if lr in accuracy else "" for lr in tried]
        best = [f"**{text}**" if accuracy.get(lr) == max(accuracy.values()) else text
                for lr, text in zip(tried, cells, strict=True)]  # fmt: skip
        lines.append([network, KINDS.get(kind, kind), f"{cost:g}", *best])
    return markdown_table(["network", "method", "cost", *(f"lr {lr:g}" for lr in tried)], lines, 2)


def types(record: Record) -> str:
    """Table 3: thousands of multiplications of one product by type of layer, over the layers of the first seed."""
    lines = []
    for row in record["rows"]:
        for name, found in row.get("by_type", {}).items() if row["seed"] == 0 else ():
            sizes = [f"{found[key] / 1e3:.1f}" for key in ("min", "mean", "max", "dense")]
            label = KINDS.get(row["kind"], row["kind"])
            lines.append([label, f"{row['relative_cost']:g}", name, *sizes, f"{found['relative_cost']:.3f}"])
    return markdown_table(["method", "cost", "layers", "min", "mean", "max", "dense", "mean / dense"], lines, 1)


def gap(record: Record) -> str:
    """Tables 2 and 6: accuracy and loss on training and on test images, and the differences."""
    lines = []
    for (kind, cost), rows in groups(record["rows"], "kind", "relative_cost").items():
        line = [KINDS.get(kind, kind), f"{cost:g}", f"{len(rows)}"]
        for train, test, sign, digits in (("train_accuracy", "accuracy", 1, 2), ("train_loss", "loss", -1, 3)):
            line += [mean_and_spread([row[key] for row in rows], digits) for key in (train, test)]
            line.append(mean_and_spread([sign * (row[train] - row[test]) for row in rows], digits))
        lines.append(line)
    heads = ["method", "cost", "seeds", "training accuracy", "test accuracy", "gap"]
    return markdown_table([*heads, "training loss", "test loss", "gap"], lines, 1)


_COMPARED = ("cifar10-vit", "cifar10-mixer", "cifar10-finetune", "cifar10-resnet", "cifar100-vit",
             "cifar100-mixer", "imagenet-vit-scratch", "imagenet-vit-finetune", "imagenet-resnet18")  # fmt: skip
VISION_TABLES: dict[tuple[str, str], Callable[[Record], str]] = {
    **{(f"{name}.json", ""): by_cost for name in _COMPARED},
    **{(f"{name}.json", "rates"): rates for name in _COMPARED},
    ("cifar10-mixer.json", "changes"): changes,
    ("cifar10-finetune.json", "before"): before_and_after,
    ("cifar10-resnet.json", "before"): before_and_after,
    ("cifar10-analysis.json", "types"): types,
    ("cifar10-analysis.json", "gap"): gap,
}
VISION_COMMANDS = {
    f"{name}.json": f"gblr reproduce {name} --data DIR && python -m gblr.experiments.publish"
    for name in (*_COMPARED, "cifar10-analysis")
}

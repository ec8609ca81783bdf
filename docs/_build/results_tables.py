"""mkdocs hook: puts the tables of docs/results/*.json into the pages, so that no measured number is typed by hand.

A page says `<!-- results: masks.json -->` on a line of its own, or `<!-- results: minilm-stsb.json by_cost -->` for
another view of a file; `<!-- picture: minilm-stsb.png What it shows -->` for a picture that a measurement draws. A
result file that is not there yet becomes a note which says how to make it.
"""

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from language_tables import LANGUAGE_COMMANDS, LANGUAGE_TABLES
from speed_tables import SPEED_COMMANDS, SPEED_TABLES
from table_text import Column, Record, all_rows, cell, markdown_table, parsed
from vision_tables import VISION_COMMANDS, VISION_TABLES

DOCS = Path(__file__).parents[1]
RESULTS = DOCS / "results"
MARKER = re.compile(r"^<!-- results: ([\w.-]+\.json)(?: (\w+))? -->$", re.MULTILINE)
PICTURE = re.compile(r"^<!-- picture: ([\w.-]+) (.+) -->$", re.MULTILINE)

MINILM: Sequence[Column] = (
    ("method", "method", ""),
    ("allocation", "allocation", ""),
    ("calibration", "calibration", ""),
    ("cost asked", "cost", ".2f"),
    ("cost reached", "relative_cost", ".3f"),
    ("Spearman", "spearman", ".4f"),
    ("mean error", "mean_error", ".4f"),
    ("seconds", "seconds", ".0f"),
)
FIT: Sequence[Column] = (
    ("method", "method", ""),
    ("start", "init", ""),
    ("refinement", "refine", ""),
    ("block_rank", "block_rank", ".0f"),
    ("calibration", "calibration", ""),
    ("cost", "relative_cost", ".3f"),
    ("mean error", "mean_error", ".4f"),
    ("SVD's error", "svd_error", ".4f"),
    ("ratio", "ratio", ".3f"),
    ("seconds", "seconds", ".0f"),
)
CIFAR10: Sequence[Column] = (
    ("method", "method", ""),
    ("budget", "budget", ""),
    ("block_rank", "block_rank", ".0f"),
    ("cost asked", "relative_cost", ".2f"),
    ("cost reached", "reached_cost", ".3f"),
    ("cost of the model", "model_relative_cost", ".3f"),
    ("accuracy", "accuracy", ".2f"),
    ("on training images", "train_accuracy", ".2f"),
)
WEIGHTS: Sequence[Column] = (
    ("block_rank", "block_rank", ".0f"),
    ("p (price)", "price_power", ".0f"),
    ("q (gradient)", "gradient_power", ".1f"),
    ("cost reached", "reached_cost", ".3f"),
    ("accuracy", "accuracy", ".2f"),
)
DIGITS: Sequence[Column] = (
    ("method", "method", ""),
    ("seed", "seed", ".0f"),
    ("cost", "relative_cost", ".3f"),
    ("accuracy", "accuracy", ".2f"),
    ("seconds", "seconds", ".0f"),
)


def spearman_by_cost(record: Record) -> str:
    """One line per method, allocation and calibration, one column per cost asked; the best of a column is bold."""
    keys = ("method", "allocation", "calibration")
    chosen = [row for row in record["rows"] if row.get("cost") is not None]
    costs = sorted({row["cost"] for row in chosen}, reverse=True)
    best = {cost: max(row["spearman"] for row in chosen if row["cost"] == cost) for cost in costs}
    lines: dict[tuple[str, ...], dict[float, str]] = {}
    for row in chosen:
        value = f"{row['spearman']:.3f}"
        value = f"**{value}**" if row["spearman"] == best[row["cost"]] else value
        lines.setdefault(tuple(cell(row, key, "") for key in keys), {})[row["cost"]] = value
    rows = [[*names, *(cells.get(cost, "") for cost in costs)] for names, cells in lines.items()]
    return markdown_table([*keys, *(f"cost {cost:g}" for cost in costs)], rows, num_left=len(keys))


def cifar10(record: Record) -> str:
    """Dense, low rank and the two kinds of budget. Dense and low rank have neither a budget nor blocks."""
    none = {"budget": None, "block_rank": None}
    rows = [row if row["method"] == "gaudi" else row | none for row in record["rows"] if not change_of(row)]
    rows = [row | {"method": "learned structure"} if row["method"] == "gaudi" else row for row in rows]
    return all_rows(CIFAR10, num_left=2)({"rows": rows})


CHANGES = {
    "projection": "none",
    "earlier": "none, the same run at an earlier commit",
    "seed-1": "none, another seed",
    "equal-weights": "all widths are cut equally",
    "price-weights": "widths are cut in proportion to their price",
    "linear-sigma": "sigma rises linearly, to the last step",
    "soft-end": "no steps at sigma = inf",
    "sharp-15": "15 % of the steps at sigma = inf instead of 5 %",
    "structure-lr-0.002": "structure_lr 0.002 instead of 0.005",
    "structure-lr-0.01": "structure_lr 0.01",
    "half-start": "start at cost 0.5 instead of 1",
    "end-0.4": "the budget is reached after 40 % of the steps instead of 60 %",
    "end-0.8": "after 80 %",
    "shrinkage": "shrinkage instead of projection",
    "shrinkage-2": "shrinkage",
    "shrinkage-0.5": "shrinkage",
}


def change_of(row: Record) -> str:
    """What a run's name says after its cost and rank, if it is no run of the main table."""
    change = re.sub(r"^gaudi-[\d.]+-rank\d+-", "", row["name"])
    return "" if change == row["name"] or change in ("projection", "shrinkage") else change


def cifar10_changes(record: Record) -> str:
    """One change at a time from the default, at cost 0.08; behind each accuracy, what it is above the default's."""
    ranks = (1, 16)
    found = {row["name"]: row for row in record["rows"]}
    lines = []
    for change, text in CHANGES.items():
        cells = []
        for rank in ranks:
            row, base = (found.get(f"gaudi-0.08-rank{rank}-{name}") for name in (change, "projection"))
            if row is None or base is None:
                cells += ["", ""]
                continue
            cells += [f"{row['accuracy']:.2f}", "" if row is base else f"{row['accuracy'] - base['accuracy']:+.2f}"]
            if row["budget"] == "shrinkage":
                text = f"{CHANGES[change]}, max_shrinkage {row['max_shrinkage']:g}"
        lines.append([text, *cells])
    headings = ["change", *(heading for rank in ranks for heading in (f"block_rank {rank}", "difference"))]
    return markdown_table(headings, lines, num_left=1)


def digits_means(record: Record) -> str:
    """Means over seeds, one line per method."""
    groups: dict[str, list[Record]] = {}
    for row in record["rows"]:
        groups.setdefault(row["method"], []).append(row)
    rows = [
        [name, f"{len(runs)}", *(f"{sum(r[key] for r in runs) / len(runs):{form}}" for key, form in _DIGITS_MEANS)]
        for name, runs in groups.items()
    ]
    return markdown_table(["method", "seeds", "cost", "accuracy", "seconds"], rows, num_left=1)


_DIGITS_MEANS = (("relative_cost", ".3f"), ("accuracy", ".2f"), ("seconds", ".0f"))

TABLES: dict[tuple[str, str], Callable[[Record], str]] = {
    ("minilm-stsb.json", ""): all_rows(MINILM, num_left=3),
    ("minilm-stsb.json", "by_cost"): spearman_by_cost,
    ("fit.json", ""): all_rows(FIT, num_left=3),
    ("cifar10-learning.json", ""): cifar10,
    ("cifar10-learning.json", "changes"): cifar10_changes,
    ("cifar10-weights.json", ""): all_rows(WEIGHTS),
    ("digits.json", ""): all_rows(DIGITS, num_left=1),
    ("digits.json", "means"): digits_means,
    **SPEED_TABLES,
    **VISION_TABLES,
    **LANGUAGE_TABLES,
}
COMMANDS = {
    "minilm-stsb.json": "python examples/compress_minilm.py --model DIR --data DIR",
    "fit.json": "python examples/compress_minilm.py --model DIR --data DIR",
    "cifar10-learning.json": "python -m gblr.experiments.cifar10_learning --data DIR",
    "cifar10-weights.json": "python -m gblr.experiments.cifar10_learning --data DIR",
    "digits.json": "python examples/learn_digits.py --seeds 4",
    **SPEED_COMMANDS,
    **VISION_COMMANDS,
    **LANGUAGE_COMMANDS,
}


def source(name: str, record: Record) -> str:
    """Where the numbers come from: file, command, and what the file tells about the machine."""
    text = f"`docs/results/{name}`, by `{record.get('command', COMMANDS[name])}`"
    what = f": {record['what']}" if record.get("what") else ""
    torch = f"torch {record['torch']}" if record.get("torch") else ""
    machine = ", ".join(filter(None, (torch, record.get("cpu") or record.get("device"))))
    return f"{text}{what}{'; ' if machine else ''}{machine}."


def not_measured(name: str) -> str:
    return f'!!! note "Not measured yet"\n    `{COMMANDS[name]}` writes `docs/results/{name}`, and this table with it.'


def render(name: str, view: str = "") -> str:
    """The table of a result file, and below it where it comes from."""
    table = TABLES[name, view]
    if not (RESULTS / name).exists():
        return not_measured(name)
    record = parsed((RESULTS / name).read_text())
    text = table(record)
    has_rows = len(text.splitlines()) > 2  # heading and rule
    return f"{text}\n\n{source(name, record)}" if has_rows else not_measured(name)


def picture(name: str, text: str, up: str = "") -> str:
    return f"![{text}]({up}images/{name})" if (DOCS / "images" / name).exists() else ""


def on_page_markdown(markdown: str, page: Any = None, **_: Any) -> str:
    up = "../" * page.file.src_uri.count("/") if page is not None else ""
    markdown = PICTURE.sub(lambda match: picture(match[1], match[2], up), markdown)
    return MARKER.sub(lambda match: render(match[1], match[2] or ""), markdown)

"""mkdocs hook: puts the tables of docs/results/*.json into the pages, so that no measured number is typed by hand.

A page says `<!-- results: masks.json -->` on a line of its own, or `<!-- results: minilm-stsb.json by_cost -->` for
another view of a file; `<!-- picture: minilm-stsb.png What it shows -->` for a picture that a measurement draws. A
result file that is not there yet becomes a note which says how to make it.
"""

import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from language_tables import LANGUAGE_COMMANDS, LANGUAGE_TABLES
from table_text import Record, cell, markdown_table
from vision_tables import VISION_COMMANDS, VISION_TABLES

DOCS = Path(__file__).parents[1]
RESULTS = DOCS / "results"
MARKER = re.compile(r"^<!-- results: ([\w.-]+\.json)(?: (\w+))? -->$", re.MULTILINE)
PICTURE = re.compile(r"^<!-- picture: ([\w.-]+) (.+) -->$", re.MULTILINE)

Column = tuple[str, str, str]  # heading, key of a row, how to format its value

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
MASKS: Sequence[Column] = (
    ("blocks", "blocks", ".0f"),
    ("length", "length", ".0f"),
    ("time of the FFT form / closed form", "fft_over_closed", ".2f"),
    ("plain torch / closed form", "plain_over_closed", ".2f"),
    ("bare passes over the memory / closed form", "passes_over_closed", ".2f"),
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
LEARNER: Sequence[Column] = (
    ("mode", "mode", ""),
    ("block_rank", "block_rank", ".0f"),
    ("budget", "method", ""),
    ("step, ms", "step_ms", ".1f"),
    ("learner, ms", "learner_ms", ".1f"),
    ("share", "share", ".3f"),
)

ONNX: Sequence[Column] = (
    ("model", "model", ""),
    ("input", "input", ""),
    ("block_rank", "block_rank", ".0f"),
    ("cost", "cost", ".2f"),
    ("options", "options", ""),
    ("operators", "operators", ".0f"),
    ("file / dense", "file_ratio", ".2f"),
    ("time / dense", "time_ratio", ".2f"),
    ("load, s", "load", ".2f"),
    ("load dense, s", "dense_load", ".2f"),
)


def all_rows(columns: Sequence[Column], num_left: int = 0) -> Callable[[Record], str]:
    def table(record: Record) -> str:
        rows = [[cell(row, key, digits) for _, key, digits in columns] for row in record["rows"]]
        return markdown_table([heading for heading, _, _ in columns], rows, num_left)

    return table


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


CPU_FLOORS: Sequence[Column] = (
    ("matrix", "case", ""),
    ("batch", "batch", ".0f"),
    ("dense, us", "dense_us", ".0f"),
    ("packed, us", "packed_us", ".0f"),
    ("floor, us", "floor_us", ".0f"),
    ("packed / floor", "over_floor", ".2f"),
)
CPU_MODELS: Sequence[Column] = (
    ("model", "model", ""),
    ("cost", "cost", ".1f"),
    ("share of the layers in dense time", "share_of_layers", ".2f"),
    ("time over dense", "ratio", ".3f"),
    ("by Amdahl's law", "amdahl_ratio", ".3f"),
    ("time over that", "over_amdahl", ".3f"),
    ("at most", "target", ".3f"),
    ("kept packed", "packed_share", ".2f"),
)


def cpu_layers(record: Record) -> str:
    """One line per case, one column per batch: time over dense, bold where above the target, which follows."""
    batches = sorted({row["batch"] for row in record["rows"]})
    lines: dict[str, dict[int, str]] = {}
    for row in record["rows"]:
        text = f"{row['ratio']:.2f}"
        text = text if row["ratio"] <= row["target"] else f"**{text}**"
        lines.setdefault(row["case"], {})[row["batch"]] = f"{text} ({row['target']:.2f})"
    rows = [[case, *(cells[batch] for batch in batches)] for case, cells in lines.items()]
    return markdown_table(["matrix", *(f"batch {batch}" for batch in batches)], rows, num_left=1)


def cpu_models(record: Record) -> str:
    return all_rows(CPU_MODELS, num_left=1)({"rows": [row for row in record["models"] if "over_amdahl" in row]})


def gpu_layers(record: Record) -> str:
    """Speeds with their targets in brackets, bold where missed."""

    def judged(speed: float, target: float | None) -> str:
        text = f"{speed:.2f}" if target is None or speed >= target else f"**{speed:.2f}**"
        return text if target is None else f"{text} ({target:g})"

    heads = ["matrix", "tokens", "dense, us", "low rank, us", "GBLR, us", "speed / low rank", "speed / dense"]
    rows = []
    for row in record["rows"]:
        times = (f"{row[key]:.1f}" for key in ("dense_us", "low_rank_us", "packed_us"))
        speeds = judged(row["over_low_rank"], row["low_rank_target"]), judged(row["over_dense"], row["dense_target"])
        ends = f"{row['over_floor']:.1f}", f"{row['padding']:.2f}"
        rows.append([row["case"], f"{row['tokens']:,}", *times, *speeds, *ends])
    return markdown_table([*heads, "time / floor", "stored / needed"], rows, num_left=1)


def gpu_models(record: Record) -> str:
    rows = []
    for row in record["models"]:
        for key, target in row["targets"].items():
            way, value = target.rsplit(" ", 1)
            met = row[key] <= float(value) if way == "at most" else row[key] >= float(value)
            rows.append([row["model"], GPU_JUDGED[key], f"{row[key]:.2f}" if met else f"**{row[key]:.2f}**", target])
    return markdown_table(["model", "what", "measured", "target"], rows, num_left=2)


GPU_JUDGED = {
    "over_dense": "speed / dense",
    "over_dense_step": "time of a step / dense step",
    "fft_over_masks": "extra time with masks by FFT / with ours",
    "memory_over_dense": "peak memory / dense",
}


def command_times(record: Record) -> str:
    rows = [[row["what"], f"`{row['command']}`", f"{row['seconds']:.0f}"] for row in record["rows"]]
    return markdown_table(["what", "command", "seconds"], rows, num_left=2)


def command_results(record: Record, only: str = "") -> str:
    """The models that each command compared; `only` keeps the rows whose name begins so."""
    heads = [
        "run",
        "model",
        "measured",
        "cost",
        "cost of the model",
        "parameters",
        "file",
        "ms, batch 1",
        "ms, batch 64",
    ]
    rows = []
    for row in record["rows"]:
        for result in row["results"] if row["what"].startswith(only) and ": compressed" in row["what"] else ():
            name, unit = result["metric"], "%" if result["metric"] == "accuracy" else ""
            value = f"{name} {result['value']:.2f}{unit}" if unit else f"{name} {result['value']:.4f}"
            costs = (f"{result[key]:.3f}" for key in ("relative_cost", "model_relative_cost"))
            seconds = result["seconds_per_batch"] or {}
            times = (f"{seconds[batch] * 1e3:.3g}" if batch in seconds else "" for batch in ("1", "64"))
            size = f"{result['file_bytes'] / 1e3:,.0f} kB"
            what = row["what"].partition(": compressed")[0]
            rows.append([what, result["name"], value, *costs, f"{result['num_params']:,}", size, *times])
    return markdown_table(heads, rows, num_left=3)


def streaming(record: Record) -> str:
    """The most that each conversion took beyond the libraries; what it was allowed stands above."""

    def mb(count: int) -> str:
        return f"{count / 1e6:.0f}"

    bounds = ("model_bytes", "largest_bytes", "activation_bytes", "limit_bytes")
    heads = ["method", "calibration, windows", "most taken, MB", "within the limit"]
    rows = [
        [row["method"], f"{row['calibration']}", mb(row["peak_bytes"]) if row["within"] else "",
         "yes" if row["within"] else "no, it fails"]
        for row in record["rows"]
    ]  # fmt: skip
    names = ("all weights {} MB", "largest layer {}", "a block's activations {}", "limit {}")
    told = ", ".join(name.format(mb(record[key])) for name, key in zip(names, bounds, strict=True))
    return f"{told}.\n\n{markdown_table(heads, rows, num_left=1)}"


def conv_layers(record: Record) -> str:
    """One line per layer and cost, one column per method: time over dense; for GBLR the form that was the fastest."""
    methods = list(dict.fromkeys(row["method"] for row in record["rows"]))
    lines: dict[tuple[str, float], dict[str, str]] = {}
    for row in record["rows"]:
        form = f" ({row['form']})" if row["form"] else ""
        lines.setdefault((row["layer"], row["cost"]), {})[row["method"]] = f"{row['ratio']:.2f}{form}"
    rows = [
        [layer, f"{cost:g}", *(cells.get(method, "") for method in methods)] for (layer, cost), cells in lines.items()
    ]
    return markdown_table(["layer", "cost", *methods], rows, num_left=1)


_DIGITS_MEANS = (("relative_cost", ".3f"), ("accuracy", ".2f"), ("seconds", ".0f"))

TABLES: dict[tuple[str, str], Callable[[Record], str]] = {
    ("masks.json", ""): all_rows(MASKS),
    ("minilm-stsb.json", ""): all_rows(MINILM, num_left=3),
    ("minilm-stsb.json", "by_cost"): spearman_by_cost,
    ("fit.json", ""): all_rows(FIT, num_left=3),
    ("cifar10-learning.json", ""): cifar10,
    ("cifar10-learning.json", "changes"): cifar10_changes,
    ("cifar10-weights.json", ""): all_rows(WEIGHTS),
    ("digits.json", ""): all_rows(DIGITS, num_left=1),
    ("digits.json", "means"): digits_means,
    ("learner.json", ""): all_rows(LEARNER),
    ("onnx.json", ""): all_rows(ONNX, num_left=2),
    ("gpu.json", ""): gpu_layers,
    ("gpu.json", "models"): gpu_models,
    ("commands.json", ""): command_times,
    ("commands.json", "results"): command_results,
    ("cpu.json", ""): cpu_layers,
    ("conv.json", ""): conv_layers,
    ("streaming.json", ""): streaming,
    ("cpu.json", "floors"): all_rows(CPU_FLOORS, num_left=1),
    ("cpu.json", "models"): cpu_models,
    **VISION_TABLES,
    **LANGUAGE_TABLES,
}
COMMANDS = {
    "masks.json": "python benchmarks/bench_masks.py --out docs/results/masks.json",
    "minilm-stsb.json": "python examples/compress_minilm.py --model DIR --data DIR",
    "fit.json": "python examples/compress_minilm.py --model DIR --data DIR",
    "cifar10-learning.json": "python -m gblr.experiments.cifar10_learning --data DIR",
    "cifar10-weights.json": "python -m gblr.experiments.cifar10_learning --data DIR",
    "digits.json": "python examples/learn_digits.py --seeds 4",
    "cpu.json": "python benchmarks/bench_cpu.py --out docs/results/cpu.json",
    "conv.json": "python benchmarks/bench_conv.py --out docs/results/conv.json",
    "gpu.json": "python benchmarks/bench_gpu.py --out docs/results/gpu.json",
    "commands.json": "python benchmarks/bench_commands.py --minilm MINILM --data DATA --out docs/results/commands.json",
    "learner.json": "python benchmarks/bench_learner.py --out docs/results/learner.json",
    "onnx.json": "python benchmarks/bench_onnx.py --out docs/results/onnx.json",
    "streaming.json": (
        "python benchmarks/bench_streaming.py --model FILE.gguf --data DIR --out docs/results/streaming.json"
    ),
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
    record = json.loads((RESULTS / name).read_text())
    text = table(record)
    has_rows = len(text.splitlines()) > 2  # heading and rule
    return f"{text}\n\n{source(name, record)}" if has_rows else not_measured(name)


def picture(name: str, text: str, up: str = "") -> str:
    return f"![{text}]({up}images/{name})" if (DOCS / "images" / name).exists() else ""


def on_page_markdown(markdown: str, page: Any = None, **_: Any) -> str:
    up = "../" * page.file.src_uri.count("/") if page is not None else ""
    markdown = PICTURE.sub(lambda match: picture(match[1], match[2], up), markdown)
    return MARKER.sub(lambda match: render(match[1], match[2] or ""), markdown)

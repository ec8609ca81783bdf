"""Tables of the language experiments, from the files that `python -m gblr.experiments.publish_language` writes, and of
`benchmarks/bench_language.py`.
"""

import statistics
from collections.abc import Callable, Sequence

from table_text import Record, markdown_table
from vision_tables import KINDS as VISION_KINDS
from vision_tables import final_rows, groups

KINDS = VISION_KINDS | {
    "low-rank-plain": "low rank of the weights alone",
    "low-rank-plain-global": "low rank of the weights alone, global ranks",
    "low-rank": "low rank",
    "low-rank-global": "low rank, global ranks",
    "low-rank-8": "low rank, ranks in eights",
    "blast-8": "BLAST, ranks in eights",
    "blast-global": "BLAST, global budgets",
    "gblr-1-global": "GBLR, block_rank 1, global budgets",
    "gblr-16-global": "GBLR, block_rank 16, global budgets",
    "gblr-1-global-trainable": "GBLR, block_rank 1, global budgets, fit to be trained",
    "gblr-16-global-trainable": "GBLR, block_rank 16, global budgets, fit to be trained",
    "low-rank-global-small-batches": "low rank, global ranks, batches of 4",
    "gblr-16-global-small-batches": "GBLR, block_rank 16, global budgets, batches of 4",
    "gblr-1-learned": "GBLR, block_rank 1, learned from the dense cost",
}
_HUGE = 1e5  # a perplexity above the number of words: the model is lost, and digits say nothing
SUFFIXES = {"-distilled": "distilled", "-tuned": "tuned", "-fitted": "from dense"}


def label(kind: str) -> str:
    """The method in words; how it was trained has a column or a table of its own."""
    for suffix in SUFFIXES:
        kind = kind.removesuffix(suffix)
    return KINDS.get(kind, kind)


def training(kind: str) -> str:
    return ", ".join(word for suffix, word in SUFFIXES.items() if suffix in kind) or "from scratch"


def number(value: float, digits: int) -> str:
    return f"{value:.{digits}f}" if value < _HUGE else f"{value:.0e}"


def shown(values: Sequence[float], digits: int) -> str:
    mean = number(statistics.fmean(values), digits)
    return mean if len(values) == 1 else f"{mean} ± {number(statistics.stdev(values), digits)}"


def digits_of(row: Record) -> int:
    return 4 if row["higher_is_better"] else 2


def _costs(rows: Sequence[Record]) -> list[float]:
    return sorted({row["relative_cost"] for row in rows if row["method"] != "dense"}, reverse=True)


def untrained(record: Record) -> str:
    """One line per method; for each cost what counts most after the fit and after the refit, and the cost reached. The
    best of a column is bold.
    """
    rows = [row for row in final_rows(record) if not row["epochs"]]
    costs = _costs(rows)
    best = {cost: _best([row for row in rows if row["relative_cost"] == cost]) for cost in costs}
    lines = []
    for (kind,), mine in groups(rows, "kind").items():
        if mine[0]["method"] == "dense":
            value = number(mine[0]["test"][mine[0]["metric"]], digits_of(mine[0]))
            lines.append(["dense", *(cell for _ in costs for cell in (value, "", "1"))])
            continue
        line = [label(kind)]
        for cost in costs:
            row = next((row for row in mine if row["relative_cost"] == cost), None)
            line += _stages(row, best[cost]) if row else ["", "", ""]
        lines.append(line)
    heads = [head for cost in costs for head in (f"{cost:g}: fitted", "refitted", "cost")]
    return markdown_table(["method", *heads], lines, 1)


def _stages(row: Record, best: float | None) -> list[str]:
    cells = []
    for stage in ("fitted", "refitted"):
        value = (row.get(stage) or {}).get(row["metric"])
        text = "" if value is None else number(value, digits_of(row))
        cells.append(f"**{text}**" if value is not None and value == best else text)
    return [*cells, f"{row['reached_cost']:.3f}"]


def _best(rows: Sequence[Record]) -> float | None:
    values = [
        row[stage][row["metric"]] for row in rows for stage in ("fitted", "refitted")
        if row.get(stage) and row["method"] != "dense"
    ]  # fmt: skip
    return (max if rows[0]["higher_is_better"] else min)(values) if values else None


def untrained_by_cost(record: Record) -> str:
    """One line per method, what it ends with at each cost without training; without fits that only begin a training,
    and methods that lose the model at every cost. The best of a column is bold where every method has been run.
    """
    rows = [row for row in final_rows(record) if not row["epochs"] and not row["kind"].endswith("-trainable")]
    costs = _costs(rows)
    kinds = {kind: mine for (kind,), mine in groups(rows, "kind").items() if any(_value(row) < _HUGE for row in mine)}
    best = {}
    for cost in costs:
        rivals = [_value(row) for mine in kinds.values() for row in mine if row["relative_cost"] == cost]
        if len(rivals) == sum(mine[0]["method"] != "dense" for mine in kinds.values()):
            best[cost] = (max if rows[0]["higher_is_better"] else min)(rivals)
    lines = []
    for kind, mine in kinds.items():
        values = {row["relative_cost"]: _value(row) for row in mine}
        if mine[0]["method"] == "dense":
            values = dict.fromkeys(costs, _value(mine[0]))
        cells = {cost: number(value, digits_of(mine[0])) for cost, value in values.items()}
        bold = {cost for cost, value in values.items() if value == best.get(cost) and mine[0]["method"] != "dense"}
        lines.append([label(kind), *(f"**{cells[c]}**" if c in bold else cells.get(c, "") for c in costs)])
    return markdown_table(["method", *(f"cost {cost:g}" for cost in costs)], lines, 1)


def _value(row: Record) -> float:
    return row["test"][row["metric"]]


def trained(record: Record) -> str:
    """One line per method and kind of training; what counts most at each cost, over seeds, the best bold."""
    rows = [row for row in final_rows(record) if row["epochs"]]
    costs = _costs(rows)
    lines = []
    for (kind,), mine in groups(rows, "kind").items():
        line = [label(kind), training(kind), f"{mine[0]['lr']:g}"]
        if mine[0]["method"] == "dense":
            value = shown([row["test"][row["metric"]] for row in mine], digits_of(mine[0]))
            lines.append([*line, *(value for _ in costs)])
            continue
        rivals = [row for row in rows if training(row["kind"]) == training(kind) and row["method"] != "dense"]
        lines.append([*line, *(_cell(mine, rivals, cost) for cost in costs)])
    return markdown_table(["method", "training", "lr", *(f"cost {cost:g}" for cost in costs)], lines, 2)


def distilled_by_cost(record: Record) -> str:
    """One line per method that was trained to the dense model's outputs, with the dense model above them."""
    rows = final_rows(record)
    dense = next(row for row in rows if row["method"] == "dense" and not row["epochs"])
    rows = [row for row in rows if row["epochs"] and row["kind"].endswith("-distilled")]
    costs = _costs(rows)
    lines = [["dense", *(number(_value(dense), digits_of(dense)) for _ in costs)]]
    for (kind,), mine in groups(rows, "kind").items():
        lines.append([label(kind), *(_cell(mine, rows, cost) for cost in costs)])
    return markdown_table(["method", *(f"cost {cost:g}" for cost in costs)], lines, 1)


def _cell(mine: Sequence[Record], rivals: Sequence[Record], cost: float) -> str:
    found = [row for row in mine if row["relative_cost"] == cost]
    if not found:
        return ""
    means = {
        kind: statistics.fmean(row["test"][row["metric"]] for row in group)
        for (kind,), group in groups([row for row in rivals if row["relative_cost"] == cost], "kind").items()
    }
    text = shown([row["test"][row["metric"]] for row in found], digits_of(found[0]))
    best = (max if found[0]["higher_is_better"] else min)(means.values())
    text = f"**{text}**" if len(means) > 1 and means[found[0]["kind"]] == best else text
    return f"{text} ({statistics.fmean(row['reached_cost'] for row in found):.3f})"


def texts(record: Record) -> str:
    """Every run on every test text, with its cost and its size in bfloat16."""
    rows = final_rows(record)
    names = list(rows[0]["test"]) if rows else []
    lines = []
    for (kind, cost), mine in groups(rows, "kind", "relative_cost").items():
        how = training(kind) if mine[0]["epochs"] else "none"
        values = [shown([row["test"][name] for row in mine], digits_of(mine[0])) for name in names]
        ends = [f"{mine[0]['reached_cost']:.3f}", f"{mine[0]['model_relative_cost']:.3f}"]
        lines.append([label(kind), how, f"{cost:g}", *ends, *values, f"{mine[0]['size_bytes'] / 1e6:.1f}"])
    heads = ["method", "training", "cost asked", "cost of the layers", "cost of the model"]
    return markdown_table([*heads, *names, "MB"], lines, 2)


def rates(record: Record) -> str:
    """The trials that chose learning rates, on held-out training samples; the best of a line is bold."""
    rows = [row for row in record["rows"] if row["trial"]]
    tried = sorted({row["lr"] for row in rows})
    lines = []
    for (kind,), mine in groups(rows, "kind").items():
        values = {row["lr"]: row["test"][row["metric"]] for row in mine}
        best = (max if mine[0]["higher_is_better"] else min)(values.values())
        cells = [number(values[lr], digits_of(mine[0])) if lr in values else "" for lr in tried]
        bold = [f"**{cell}**" if values.get(lr) == best else cell for lr, cell in zip(tried, cells, strict=True)]
        lines.append([label(kind), training(kind), *bold])
    return markdown_table(["method", "training", *(f"lr {lr:g}" for lr in tried)], lines, 2)


def speed(record: Record) -> str:
    """One line per method and cost: size, and for both tasks tokens a second, those over dense, and GBLR's forms."""
    tasks = list(dict.fromkeys(row["task"] for row in record["rows"]))
    lines = []
    for (method, cost), mine in groups(record["rows"], "method", "cost").items():
        line = [label(method), f"{cost:g}", f"{mine[0]['relative_cost']:.3f}", f"{mine[0]['size_bytes'] / 1e6:.1f}"]
        for task in tasks:
            (row,) = (row for row in mine if row["task"] == task)
            forms = ", ".join(f"{count} {form}" for form, count in sorted(row["forms"].items()))
            line += [f"{row['tokens_per_second']:,.0f}", f"{row['over_dense']:.2f}", forms]
        lines.append(line)
    heads = [head for task in tasks for head in (f"{task}, tokens/s", f"{task} / dense", "forms")]
    return markdown_table(["method", "cost asked", "cost", "MB", *heads], lines, 1)


_FILES = {
    "smollm2-wikitext.json": "smollm2-wikitext --model FILE.gguf",
    "gpt2-imdb.json": "gpt2-imdb",
    "minilm-recovery.json": "minilm-stsb --model DIR",
    "gpt2-wikitext103.json": "gpt2-wikitext103 --model DIR",
}
_VIEWS: dict[str, Callable[[Record], str]] = {
    "untrained": untrained,
    "trained": trained,
    "texts": texts,
    "rates": rates,
}
_SPEEDS = {"language-speed-cpu.json": "", "language-speed-gpu.json": " --device cuda"}
LANGUAGE_TABLES = {(file, view): table for file in _FILES for view, table in _VIEWS.items()}
LANGUAGE_TABLES |= {(file, ""): speed for file in _SPEEDS}
LANGUAGE_COMMANDS = {
    file: f"gblr reproduce {options} --data DIR && python -m gblr.experiments.publish_language"
    for file, options in _FILES.items()
}
LANGUAGE_COMMANDS |= {
    file: f"python benchmarks/bench_language.py{options} --out docs/results/{file}" for file, options in _SPEEDS.items()
}

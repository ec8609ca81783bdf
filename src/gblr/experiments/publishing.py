"""What the publications of all recipes share: stored runs become one result file a recipe, and lines of pictures."""

import argparse
import io
import re
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from gblr.experiments.run import TWIN, Recipe, StructuredRun
from gblr.experiments.store import Record, Store, by_rate, parsed, plain, rate_of, write

_COLORS = 128  # of a picture
MOST_SEEDS = 100  # a store may hold more seeds than the recipe asks for


def parse(description: str | None, runs: Path) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=runs, help="folder of the results of all recipes")
    parser.add_argument(
        "--keep", action="store_true", help="rows of the present files stay if their runs are elsewhere"
    )
    parser.add_argument("--docs", type=Path, default=Path("docs"), help="folder of the documentation")
    return parser.parse_args()


def tell(written: Sequence[str]) -> int:
    print(f"written: {', '.join(written) or 'nothing, there are no results'}")
    return 0


def publish(
    recipe: Recipe,
    row_of: Callable[[Record], Record],
    draw: Callable[[Recipe, list[Record], Path], None],
    runs: Path,
    docs: Path,
    keep: bool = False,
    goodness: Callable[[Record], float] | None = None,
) -> bool:
    """The result file of a recipe, and its pictures; False if it has no results. With `keep`, rows that the file has
    and the folder of runs has not stay as they are, unless trials, judged by `goodness`, have found a better rate for
    them: a sweep would make those again.
    """
    records = stored_runs(recipe, runs)
    if not records:
        return False
    rows = write_rows(recipe, records, [row_of(record) for record in records], docs, keep, goodness)
    draw(recipe, [row for row in rows if not row["trial"]], docs / "images")
    return True


def stored_runs(recipe: Recipe, runs: Path) -> list[Record]:
    """Results that are there, of as many seeds as there are, in the order of the recipe."""
    store = Store(runs / recipe.place)
    names = [name for name in recipe.runs(MOST_SEEDS) if not name.startswith(TWIN)]
    return [store.read(name) for name in names if store.has(name)]


def write_rows(
    recipe: Recipe,
    records: list[Record],
    rows: list[Record],
    docs: Path,
    keep: bool,
    goodness: Callable[[Record], float] | None = None,
) -> list[Record]:
    """The rows of the result file: those given and, to `keep` them, the present ones of runs not made anew."""
    file, head = docs / "results" / recipe.result_file, head_of(recipe, records)
    if keep and file.exists():
        present = parsed(file.read_text())
        made, found = {row["name"] for row in rows}, {row["name"]: row for row in (*present["rows"], *rows)}
        runs = {name: run for name, run in recipe.runs(MOST_SEEDS).items() if name in found}
        rows = [
            found[name]
            for name, run in runs.items()
            if name in made or not has_better_rate(run, found[name], found, goodness)
        ]
        if any(row["name"] not in made for row in rows):
            head |= _both_heads(present, head)
    if devices := {row["device"]: None for row in rows if "device" in row}:
        head["device"] = ", ".join(devices)
    write(file, head, plain(rows, digits=17))  # rounded when they were stored
    return rows


def _both_heads(present: Record, head: Record) -> Record:
    """Devices and versions of torch of a file whose rows were made here and elsewhere."""
    return {key: ", ".join(dict.fromkeys([*present[key].split(", "), head[key]])) for key in ("device", "torch")}


def has_better_rate(
    run: StructuredRun, row: Record, rows: Mapping[str, Record], goodness: Callable[[Record], float] | None
) -> bool:
    """Whether the best trial of a run has another rate than its row."""
    if goodness is None or not run.trials:
        return False
    rates = by_rate([rows[name] for name in sorted(rows) if fnmatch(name, run.trials)], goodness)
    return bool(rates) and rate_of(row) != max(rates, key=lambda rate: rates[rate])


def kind_of(record: Record) -> str:
    """The method as the name of the run has it: "gblr-16" of "vit384-gblr-16-0.3-seed0"."""
    name = record["name"].removeprefix("trial-").removeprefix(TWIN).removeprefix(f"{record['config']['model']}-")
    return re.sub(r"(-0\.\d+)?-(lr[\de.-]+|seed\d+)$", "", name)


def head_of(recipe: Recipe, records: list[Record]) -> Record:
    device, torch = (Counter(record[key] for record in records).most_common(1)[0][0] for key in ("device", "torch"))
    head = {"command": f"gblr reproduce {recipe.name} {recipe.options}", "what": recipe.what, "device": device}
    return head | {"torch": torch}


def lines_by_kind(rows: Sequence[Record], cost: str, value: Callable[[Record], float]) -> list[Any]:
    """A line of a picture for each kind but dense: the cost reached, and mean and spread of the value over seeds."""
    from gblr.reports.comparison_figures import Line

    lines = []
    for kind in dict.fromkeys(row["kind"] for row in rows if row["method"] != "dense"):
        points = sorted(
            (statistics.fmean(row[cost] for row in group), *mean_and_spread([value(row) for row in group]))
            for group in by_cost([row for row in rows if row["kind"] == kind])
        )
        lines.append(Line(kind, *(list(column) for column in zip(*points, strict=True))))
    return lines


def by_cost(rows: list[Record]) -> list[list[Record]]:
    groups: dict[float, list[Record]] = {}
    for row in rows:
        groups.setdefault(row["relative_cost"], []).append(row)
    return list(groups.values())


def mean_and_spread(values: list[float]) -> tuple[float, float]:
    """Mean and standard deviation over seeds, 0 for one seed."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def has_costs(lines: Sequence[Any]) -> bool:
    """Whether there is anything to see against the cost: some line with two of them."""
    return any(len(line.cost) > 1 for line in lines)


def save(figure: Any, file: Path) -> None:
    """As PNG with a palette, a third of its size: pictures are kept in the repository."""
    from PIL import Image

    file.parent.mkdir(parents=True, exist_ok=True)
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=100, format="png")
    Image.open(drawn).convert("RGB").quantize(_COLORS, dither=Image.Dither.NONE).save(file, optimize=True)

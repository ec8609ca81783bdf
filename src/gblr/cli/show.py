"""Tables and lines for the terminal; plain text where there is none."""

import json
import sys
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gblr.workflows.wording import milliseconds

out = Console(highlight=False, width=None if sys.stdout.isatty() else 160)  # files have no width


def say(line: str) -> None:
    """What is going on; beside the result, so that --json stays clean."""
    print(line, file=sys.stderr, flush=True)


def plain(error: BaseException) -> str:
    return escape(str(error) or type(error).__name__)


def usage_error(console: Console, error: Any) -> None:
    if not error.format_message():  # `gblr` alone has shown its help
        return
    context = getattr(error, "ctx", None)
    if context is not None:
        console.print(context.get_usage(), markup=False)
    console.print(f"[bold]error:[/] {escape(error.format_message())}", soft_wrap=True)
    if context is not None:
        console.print(f"Try '{context.command_path} --help'.", markup=False)


def as_json(content: Any) -> None:
    print(json.dumps(content, indent=1))


def results(record: dict[str, Any]) -> Table:
    """The models of a comparison, one line each."""
    metric = record["metric"]
    batches = sorted({b for row in record["results"] for b in row["seconds_per_batch"]}, key=int)
    table = Table(title=record["title"])
    table.add_column("model")
    headings = [
        f"{metric['name']}{f', {unit}' if (unit := metric['unit'].strip()) else ''}",
        "cost",
        "cost of the model",
    ]
    lengths = record.get("timed_lengths", {})
    headings += ["parameters", "file", *(f"ms, batch {_of_length(batch, lengths.get(batch))}" for batch in batches)]
    for heading in headings:
        table.add_column(heading, justify="right")
    for row in record["results"]:
        value = "" if row["value"] is None else f"{row['value']:.4g}"
        cells = [value, f"{row['relative_cost']:.3f}", f"{row['model_relative_cost']:.3f}", f"{row['num_params']:,}"]
        cells += [size(row["file_bytes"]), *(milliseconds(row["seconds_per_batch"].get(batch)) for batch in batches)]
        table.add_row(escape(row["name"]), *cells, style="bold" if row["main"] else "")
    return table


def _of_length(batch: str, length: int | None) -> str:
    return batch if length is None else f"{batch} x {length} tokens"


def size(num_bytes: int | None) -> str:
    """
    >>> size(2048), size(3_500_000), size(None)
    ('2.0 kB', '3.5 MB', '')
    """
    if num_bytes is None:
        return ""
    return f"{num_bytes / 1e6:.1f} MB" if num_bytes >= 1e6 else f"{num_bytes / 1e3:.1f} kB"

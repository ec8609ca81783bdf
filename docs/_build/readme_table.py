"""Writes the results tables of README.md, between their markers, from docs/results/.

    python docs/_build/readme_table.py

README.md is read without the docs' hook, so it has to hold the numbers; tests/test_docs.py compares them to the files.
"""

import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from language_tables import distilled_by_cost, untrained_by_cost
from results_tables import COMMANDS, RESULTS, cifar10
from speed_tables import command_results
from table_text import Record, markdown_table, parsed
from vision_tables import by_cost, converted_and_tuned

README = Path(__file__).parents[2] / "README.md"


def by_projection(record: Record) -> str:
    """The default budget beside dense and low rank."""
    return cifar10({"rows": [row for row in record["rows"] if row["budget"] == "projection"]})


def cpu_by_batch(record: Record) -> str:
    """Time over dense, one line per matrix, one column per batch; targets and floors are left to docs/cpu.md."""
    batches = sorted({row["batch"] for row in record["rows"]})
    lines: dict[str, dict[int, str]] = {}
    for row in record["rows"]:
        lines.setdefault(row["case"], {})[row["batch"]] = f"{row['ratio']:.2f}"
    rows = [[case, *(cells.get(batch, "") for batch in batches)] for case, cells in lines.items()]
    return markdown_table(["matrix", *(f"batch {batch}" for batch in batches)], rows, num_left=1)


def demo(record: Record) -> str:
    """What `make demo` prints, without the name of the run."""
    lines = command_results(record, only="digits").splitlines()
    return "\n".join("|" + line.split("|", 2)[2] for line in lines)


def headline(record: Record) -> str:
    """The ViT that has runs of every method."""
    return by_cost(record, model="vit384")


TABLES: dict[str, Callable[[Record], str]] = {
    "cifar10-vit.json": headline,
    "cifar10-resnet.json": converted_and_tuned,
    "smollm2-wikitext.json": untrained_by_cost,
    "minilm-recovery.json": untrained_by_cost,
    "minilm-recovery.json distilled": distilled_by_cost,
    "cifar10-learning.json": by_projection,
    "cpu.json": cpu_by_batch,
    "commands.json": demo,
}


def markers(table: str) -> tuple[str, str]:
    return f"<!-- {table}: begin -->", f"<!-- {table}: end -->"


def block(table: str) -> str:
    """A table is named by its file, and by a word more where a file has several."""
    file = table.split()[0]
    path = RESULTS / file
    if not path.exists():
        return f"Not measured yet: `{COMMANDS[file]}` writes `docs/results/{file}`."
    return TABLES[table](parsed(path.read_text()))


def with_tables(text: str) -> str:
    for file in TABLES:
        begin, end = markers(file)
        before, rest = text.split(begin)
        _, after = rest.split(end)
        text = f"{before}{begin}\n\n{block(file)}\n\n{end}{after}"
    return text


if __name__ == "__main__":
    README.write_text(with_tables(README.read_text()))

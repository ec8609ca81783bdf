"""Tables as Markdown: what all files that make them share."""

import json
from collections.abc import Callable, Sequence
from typing import Any

Record = dict[str, Any]
Column = tuple[str, str, str]  # heading, key of a row, how to format its value


def parsed(text: str) -> Record:
    """A result file; its words for what JSON has no numbers for become these numbers."""

    def numbers(found: Record) -> Record:
        return {key: float(value) if value in ("nan", "inf", "-inf") else value for key, value in found.items()}

    return json.loads(text, object_hook=numbers)


def cell(row: Record, key: str, digits: str) -> str:
    """A value as the tables show it; empty where a row has none."""
    value = row.get(key)
    if value is None:
        return ""
    return format(value, digits) if isinstance(value, int | float) else str(value)


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]], num_left: int = 0) -> str:
    """The first `num_left` columns to the left, all others to the right."""
    rule = ["---" if i < num_left else "---:" for i in range(len(headings))]
    return "\n".join("| " + " | ".join(line) + " |" for line in (headings, rule, *rows))


def all_rows(columns: Sequence[Column], num_left: int = 0) -> Callable[[Record], str]:
    def table(record: Record) -> str:
        rows = [[cell(row, key, digits) for _, key, digits in columns] for row in record["rows"]]
        return markdown_table([heading for heading, _, _ in columns], rows, num_left)

    return table

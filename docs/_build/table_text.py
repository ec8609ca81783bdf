"""Tables as Markdown: what all files that make them share."""

from collections.abc import Sequence
from typing import Any

Record = dict[str, Any]


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

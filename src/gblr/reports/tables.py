"""Tables of a page: numbers aligned, empty columns left out, columns sorted by a click where asked."""

from collections.abc import Sequence
from dataclasses import dataclass

from gblr.reports.markup import Html, join, tag
from gblr.reports.numbers import NONE


@dataclass(frozen=True)
class Column:
    heading: str
    numeric: bool = True


@dataclass(frozen=True)
class Cell:
    """What is shown; the number to sort by; a remark in small type."""

    text: str
    key: float | None = None
    note: str = ""
    strong: bool = False
    again: bool = False  # as in the row above: kept for screen readers, not shown


def table(
    columns: Sequence[Column], rows: Sequence[Sequence[Cell | str]], caption: str, sortable: bool = False
) -> Html:
    """A table in a frame that scrolls sideways on a narrow screen."""
    cells = [[cell if isinstance(cell, Cell) else Cell(cell) for cell in row] for row in rows]
    shown = [i for i in range(len(columns)) if any(row[i].text not in ("", NONE) for row in cells)]
    head = tag("tr", *(_head(columns[i], sortable) for i in shown))
    body = join(*(tag("tr", *(_cell(columns[i], row[i], first=i == shown[0]) for i in shown)) for row in cells))
    inner = join(tag("caption", caption, class_="hidden"), tag("thead", head), tag("tbody", body))
    return tag(
        "div",
        tag("table", inner, class_="sortable" if sortable else None),
        class_="scroll",
        tabindex="0",
        role="region",
        aria_label=caption,
    )


def _head(column: Column, sortable: bool) -> Html:
    inner = tag("button", column.heading, type="button") if sortable else column.heading
    return tag("th", inner, scope="col", class_="num" if column.numeric else None)


def _cell(column: Column, cell: Cell, first: bool) -> Html:
    text = tag("strong", cell.text) if cell.strong else cell.text
    note = tag("small", cell.note) if cell.note else None
    classes = " ".join(word for word, holds in (("num", column.numeric), ("again", cell.again)) if holds) or None
    key = None if cell.key is None else repr(float(cell.key))
    return tag("th" if first else "td", text, note, scope="row" if first else None, class_=classes, data_key=key)

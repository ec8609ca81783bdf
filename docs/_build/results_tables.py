"""mkdocs hook: puts the tables of docs/results/*.json into the pages, so that no measured number is typed by hand.

A page says `<!-- results: masks.json -->` on a line of its own.
"""

import json
import re
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"
MARKER = re.compile(r"^<!-- results: ([\w.-]+\.json) -->$", re.MULTILINE)


def masks_table(record: dict[str, Any]) -> str:
    rows = [f"| {row['blocks']} | {row['length']} | {row['fft_over_closed']} |" for row in record["rows"]]
    return "\n".join(["| blocks | length | time of the FFT form / closed form |", "| ---: | ---: | ---: |", *rows])


TABLES = {"masks.json": masks_table}


def render(name: str) -> str:
    """The table of a result file, and below it where it comes from."""
    record = json.loads((RESULTS / name).read_text())
    source = f"`docs/results/{name}`, by `{record['command']}`: {record['what']}; torch {record['torch']}, {record['cpu']}."
    return f"{TABLES[name](record)}\n\n{source}"


def on_page_markdown(markdown: str, **_: Any) -> str:
    return MARKER.sub(lambda match: render(match[1]), markdown)

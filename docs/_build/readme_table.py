"""Writes the results table of README.md, between its markers, from docs/results/minilm-stsb.json.

    python docs/_build/readme_table.py

README.md is read without the docs' hook, so it has to hold the numbers; tests/test_docs.py compares them to the file.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from results_tables import COMMANDS, RESULTS, spearman_by_cost

README = Path(__file__).parents[2] / "README.md"
FILE = "minilm-stsb.json"
BEGIN, END = f"<!-- {FILE}: begin -->", f"<!-- {FILE}: end -->"


def block() -> str:
    """What stands between the markers: STS-B sentences as calibration, all methods."""
    path = RESULTS / FILE
    if not path.exists():
        return f"Not measured yet: `{COMMANDS[FILE]}` writes `docs/results/{FILE}`."
    return spearman_by_cost(json.loads(path.read_text()), calibration="stsb")


def with_table(text: str) -> str:
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{block()}\n\n{END}{after}"


if __name__ == "__main__":
    README.write_text(with_table(README.read_text()))

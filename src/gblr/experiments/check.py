"""`gblr reproduce NAME --check`: a tiny version of a recipe, compared with what it gave when it was stored."""

import json
from pathlib import Path
from typing import Any

from gblr.experiments.field import Field, Place
from gblr.experiments.store import Record, plain, write

CHECKS = Path(__file__).parent / "checks"


def check(recipe: str, runs: dict[str, Any], field: Field, task: Any, write: bool = False) -> int:
    """Exit code 1 if a number is off by more than its tolerance, in the unit of that number."""
    found = {name: field.numbers(field.make(run, task, Place()).record) for name, run in runs.items()}
    file = CHECKS / f"{recipe}.json"
    if write:
        store(file, recipe, found)
        return 0
    wrong = differences(found, json.loads(file.read_text())["runs"], field.tolerances)
    for name in found:
        print(f"{name}: {'; '.join(wrong[name]) if name in wrong else 'as stored'}")
    allowed = ", ".join(f"{key} {value:g}" for key, value in field.tolerances.items())
    print(f"{len(found) - len(wrong)} of {len(found)} runs are as stored, within {allowed}")
    return 1 if wrong else 0


def differences(
    found: dict[str, Record], stored: dict[str, Record], tolerances: dict[str, float]
) -> dict[str, list[str]]:
    """What is out of tolerance, by the names of runs."""
    wrong: dict[str, list[str]] = {}
    for name, numbers in found.items():
        if name not in stored:
            wrong[name] = ["nothing is stored"]
            continue
        pairs = {key: (value, stored[name][key]) for key, value in numbers.items()}
        off = [key for key, (now, then) in pairs.items() if not abs(now - then) <= tolerances[key]]
        if off:
            wrong[name] = [f"{key} {pairs[key][0]:.4f}, stored {pairs[key][1]:.4f}" for key in off]
    return wrong


def store(file: Path, recipe: str, found: dict[str, Record]) -> None:
    file.parent.mkdir(exist_ok=True)
    write(file, {"command": f"gblr reproduce {recipe} --write-check", "runs": plain(found)})

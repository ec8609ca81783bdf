"""`gblr reproduce NAME --check`: a tiny version of a recipe, compared with what it gave when it was stored."""

import json
from pathlib import Path

from gblr.experiments.datasets import Task
from gblr.experiments.run import Run
from gblr.experiments.store import Record, plain, write
from gblr.experiments.train_run import train_run

CHECKS = Path(__file__).parent / "checks"
# Another CPU rounds otherwise, and a rounded width may then fall to the other side: that much is allowed. One image of
# the 64 is 1.6 points.
TOLERANCES = {"test_loss": 0.03, "train_loss": 0.03, "accuracy": 5.0, "reached_cost": 0.005}


def check(recipe: str, runs: dict[str, Run], task: Task, write: bool = False) -> int:
    """Exit code 1 if a number is off by more than its tolerance, in the unit of that number."""
    found = {name: measured(run, task) for name, run in runs.items()}
    file = CHECKS / f"{recipe}.json"
    if write:
        store(file, recipe, found)
        return 0
    wrong = differences(found, json.loads(file.read_text())["runs"])
    for name in found:
        print(f"{name}: {'; '.join(wrong[name]) if name in wrong else 'as stored'}")
    allowed = ", ".join(f"{key} {value:g}" for key, value in TOLERANCES.items())
    print(f"{len(found) - len(wrong)} of {len(found)} runs are as stored, within {allowed}")
    return 1 if wrong else 0


def measured(run: Run, task: Task) -> Record:
    record = train_run(run, task).record
    numbers = {"test_loss": record["test"]["loss"], "train_loss": record["curve"]["train_loss"][-1:]}
    numbers["train_loss"] = numbers["train_loss"][0] if numbers["train_loss"] else record["train"]["loss"]
    return numbers | {"accuracy": record["test"]["accuracy"], "reached_cost": record["reached_cost"]}


def differences(found: dict[str, Record], stored: dict[str, Record]) -> dict[str, list[str]]:
    """What is out of tolerance, by the names of runs."""
    wrong: dict[str, list[str]] = {}
    for name, numbers in found.items():
        if name not in stored:
            wrong[name] = ["nothing is stored"]
            continue
        pairs = {key: (value, stored[name][key]) for key, value in numbers.items()}
        off = [key for key, (now, then) in pairs.items() if not abs(now - then) <= TOLERANCES[key]]
        if off:
            wrong[name] = [f"{key} {pairs[key][0]:.4f}, stored {pairs[key][1]:.4f}" for key in off]
    return wrong


def store(file: Path, recipe: str, found: dict[str, Record]) -> None:
    file.parent.mkdir(exist_ok=True)
    write(file, {"command": f"gblr reproduce {recipe} --write-check", "runs": plain(found)})

"""Experiments with images, as a field of the sweep."""

from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import ClassVar

from gblr.experiments import sweep
from gblr.experiments.datasets import Task, generated, load_task
from gblr.experiments.field import Field, Place, Result
from gblr.experiments.run import Recipe, Run
from gblr.experiments.store import Record
from gblr.experiments.train_run import Sources, tiny_run, train_run


class Vision(Field):
    out = Path("runs/vision")
    # Another CPU rounds otherwise, and a rounded width may then fall to the other side: that much is allowed. One image
    # of the 64 is 1.6 points.
    tolerances: ClassVar[dict[str, float]] = {
        "test_loss": 0.03,
        "train_loss": 0.03,
        "accuracy": 5.0,
        "reached_cost": 0.005,
    }

    def load_task(self, recipe: Recipe, data: Path, cache: Path, model: str) -> Task:
        return load_task(recipe.data, data, cache)

    def smoke_task(self, recipe: Recipe) -> Task:
        return generated(num_classes=20 if recipe.data == "cifar100" else 10)

    def tiny(self, run: Run, epochs: int = 2) -> Run:
        return tiny_run(run, epochs)

    def features(self, run: Run) -> set[Hashable]:
        structure = (run.method, run.block_rank, run.budget, run.init, run.allocation, run.start_cost, run.weights)
        return {structure, ("distilled", run.distilled > 0)}

    def make(self, run: Run, task: Task, place: Place) -> Result:
        sources = Sources(place.results, place.weights)
        return train_run(run, task, place.device, sources, place.state, place.deadline, place.say, place.eager)

    def goodness(self, record: Record) -> float:
        return record["accuracy"] if "accuracy" in record else record["test"]["accuracy"]

    def summary(self, record: Record) -> str:
        test, train = record["test"]["accuracy"], record["train"]["accuracy"]
        costs = f"cost {record['reached_cost']:.3f} (model {record['model_relative_cost']:.3f})"
        return f"accuracy {test:.2f}, training images {train:.2f}, {costs}, {record['seconds']:.0f} s"

    def numbers(self, record: Record) -> dict[str, float]:
        losses = record["curve"]["train_loss"]
        return {
            "test_loss": record["test"]["loss"], "train_loss": losses[-1] if losses else record["train"]["loss"],
            "accuracy": record["test"]["accuracy"], "reached_cost": record["reached_cost"],
        }  # fmt: skip


VISION = Vision()


def main(recipe: Recipe, arguments: Sequence[str] | None = None) -> int:
    """`gblr reproduce` of a recipe with images."""
    return sweep.main(recipe, VISION, arguments)

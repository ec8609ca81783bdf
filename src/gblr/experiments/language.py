"""Experiments with text, as a field of the sweep."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from gblr.experiments import sweep
from gblr.experiments.corpora import load_text_task
from gblr.experiments.field import Field, Place, Result
from gblr.experiments.run import Recipe
from gblr.experiments.store import Record
from gblr.experiments.text_models import TEXT_MODELS
from gblr.experiments.text_run import TextRun
from gblr.experiments.text_stages import make
from gblr.experiments.text_tasks import TextTask, generated_sentences, generated_windows


class Language(Field):
    out = Path("runs/language")
    # Another CPU rounds otherwise, and a rounded width may then fall to the other side: that much is allowed.
    tolerances: ClassVar[dict[str, float]] = {"metric": 0.05, "train_loss": 0.05, "reached_cost": 0.005}

    def load_task(self, recipe: Recipe, data: Path, cache: Path, model: str) -> TextTask:
        for run in recipe.runs(1).values():
            if run.source == "weights" and not model:
                raise ValueError(f"--model must say where the trained weights are: {TEXT_MODELS[run.model].get}.")
        return load_text_task(recipe.data, data, cache, model)

    def smoke_task(self, recipe: Recipe) -> TextTask:
        return generated_sentences() if recipe.data == "stsb" else generated_windows()

    def tiny(self, run: TextRun, epochs: int = 1) -> TextRun:
        return replace(
            run, epochs=min(run.epochs, epochs), batch_size=min(run.batch_size, 8),
            calibration=min(run.calibration, 16), held_out=min(run.held_out, 16),
        )  # fmt: skip

    def features(self, run: TextRun) -> set[Hashable]:
        found: set[Hashable] = {(run.method, run.block_rank), (run.source, run.init, run.start_cost, run.method)}
        found |= {run.allocation, run.calibration > 0, run.refit}
        return found | ({(run.aim, run.method == "gaudi")} if run.epochs else set())

    def make(self, run: TextRun, task: TextTask, place: Place) -> Result:
        return make(run, task, place)

    def goodness(self, record: Record) -> float:
        value = record["test"][record["metric"]]
        return value if record["higher_is_better"] else -value

    def summary(self, record: Record) -> str:
        found = ", ".join(f"{name} {value:.4g}" for name, value in record["test"].items())
        costs = f"cost {record['reached_cost']:.3f} (model {record['model_relative_cost']:.3f})"
        return f"{found}, {costs}, {record['size_bytes'] / 1e6:.1f} MB, trained for {record['seconds']:.0f} s"

    def numbers(self, record: Record) -> dict[str, float]:
        losses = record.get("curve", {}).get("train_loss", [])
        metric = record["test"][record["metric"]]
        found = {"metric": metric if record["higher_is_better"] else math.log(metric)}
        return found | {"reached_cost": record["reached_cost"]} | ({"train_loss": losses[-1]} if losses else {})


LANGUAGE = Language()


def main(recipe: Recipe, arguments: Sequence[str] | None = None) -> int:
    """`gblr reproduce` of a recipe with text."""
    return sweep.main(recipe, LANGUAGE, arguments)

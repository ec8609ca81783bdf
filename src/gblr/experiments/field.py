"""What kinds of experiments have in common, for the sweep that makes them: vision, and language."""

import abc
import json
import shutil
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from torch import nn

from gblr.atomic import write_json
from gblr.experiments.run import Recipe
from gblr.experiments.store import Record


@dataclass(frozen=True)
class Result:
    """What a run did, as plain values; the model itself, and its blocks layer by layer, are kept apart."""

    record: Record
    model: nn.Module
    blocks: dict[str, np.ndarray]


class Paused(Exception):
    """The time was over before the run was; its state is saved, and the next call continues."""


@dataclass(frozen=True)
class Place:
    """Where a run is made. `results` has the results of all recipes, `weights` is what users bring.

    `deadline` is a time of `time.time()`: a run that would pass it keeps what it needs to go on under `state` and
    raises `Paused`. `eager` does without compilation and CUDA graphs.
    """

    results: Path = Path("runs")
    weights: str = ""
    device: str = "cpu"
    state: Path | None = None
    deadline: float = float("inf")
    eager: bool = False
    say: Callable[[str], None] = lambda line: None

    @property
    def _settings(self) -> Path | None:
        return None if self.state is None else self.state.with_suffix(".settings")

    def is_of(self, settings: Record) -> bool:
        """Whether what is kept belongs to a run with these: between two calls trials may have found a better rate."""
        file = self._settings
        return file is None or not file.exists() or json.loads(file.read_text()) == settings

    def note(self, settings: Record) -> None:
        """With which settings the run is made that keeps its state here."""
        if self._settings is not None:
            self._settings.parent.mkdir(parents=True, exist_ok=True)
            write_json(self._settings, settings)

    def forget(self) -> None:
        """What is kept for a continuation, a file or a folder."""
        if self._settings is not None:
            self._settings.unlink(missing_ok=True)
        if self.state is not None and self.state.is_dir():
            shutil.rmtree(self.state)
        elif self.state is not None:
            self.state.unlink(missing_ok=True)


class Field(abc.ABC):
    """How the runs of a kind of recipes are made, told of and compared. Runs are frozen dataclasses with `method`,
    `relative_cost`, `seed`, `epochs`, `lr`, `trials`, `held_out`, `source` and `to_dict()`.
    """

    out: ClassVar[Path]  # of the results, by default
    tolerances: ClassVar[dict[str, float]]  # of `gblr reproduce --check`, by the names of `numbers`

    @abc.abstractmethod
    def load_task(self, recipe: Recipe, data: Path, cache: Path, model: str) -> Any:
        """Real data; what takes long to prepare is kept in `cache`."""

    @abc.abstractmethod
    def smoke_task(self, recipe: Recipe) -> Any:
        """A little generated data."""

    @abc.abstractmethod
    def tiny(self, run: Any, epochs: int = 2) -> Any:
        """The same run in a second or two, for smoke tests and checks."""

    @abc.abstractmethod
    def features(self, run: Any) -> set[Hashable]:
        """Smoke tests make the first run that has a feature, for all of them."""

    @abc.abstractmethod
    def make(self, run: Any, task: Any, place: Place) -> Result:
        """From the description of a run to its result."""

    @abc.abstractmethod
    def goodness(self, record: Record) -> float:
        """By which the best trial is chosen, of its result or its published row: more is better."""

    @abc.abstractmethod
    def summary(self, record: Record) -> str:
        """One line."""

    @abc.abstractmethod
    def numbers(self, record: Record) -> dict[str, float]:
        """What a check compares."""

"""Where runs leave what they did: one JSON file each, complete or not there, beside checkpoints and logs."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gblr.atomic import appearing

Record = dict[str, Any]
_WORDS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class Store:
    """A folder of results by the names of runs. Rows of the file `published` count as results too, so that a sweep goes
    on where another machine's stopped.
    """

    def __init__(self, folder: Path, published: Path | None = None):
        self.folder = folder
        self.published = {} if published is None else {row["name"]: row for row in read_rows(published)}

    def path(self, name: str, suffix: str = ".json") -> Path:
        return self.folder / f"{name}{suffix}"

    def has(self, name: str) -> bool:
        return self.path(name).exists() or name in self.published

    def read(self, name: str) -> Record:
        return parsed(self.path(name).read_text())

    def matching(self, pattern: str) -> list[Record]:
        """Results of the runs whose names match, in the order of their names; of published ones, their rows."""
        stored = {file.stem for file in self.folder.glob("*.json")} if self.folder.is_dir() else set()
        names = [name for name in sorted(stored | set(self.published)) if fnmatch(name, pattern)]
        return [self.read(name) if name in stored else self.published[name] for name in names]

    def rate(self, name: str) -> float:
        """With which a run was made that is there."""
        return rate_of(self.read(name) if self.path(name).exists() else self.published[name])

    def write(self, name: str, record: Record) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        write(self.path(name), plain(record))

    # -- tensors ---------------------------------------------------------------------------------------------------

    def save_model(self, name: str, state: Mapping[str, Tensor]) -> None:
        """Weights in half precision, half the size: they are the start of a fine-tuning, which forgets the rest."""
        halves = {key: t.half() if t.is_floating_point() else t for key, t in state.items()}
        self.save(self.path(name, ".model.pt"), halves)

    def load_model(self, name: str) -> dict[str, Tensor]:
        state = torch.load(self.path(name, ".model.pt"), map_location="cpu", weights_only=True)
        return {key: t.float() if t.is_floating_point() else t for key, t in state.items()}

    def save_blocks(self, name: str, blocks: Mapping[str, np.ndarray]) -> None:
        """(row_start, row_width, col_start, col_width) of the live blocks of each layer, for pictures."""
        self.folder.mkdir(parents=True, exist_ok=True)
        new = self.path(name, ".blocks.new.npz")
        np.savez_compressed(new, **{key: value.astype(np.uint16) for key, value in blocks.items()})  # type: ignore
        new.replace(self.path(name, ".blocks.npz"))

    def load_blocks(self, name: str) -> dict[str, np.ndarray] | None:
        file = self.path(name, ".blocks.npz")
        return dict(np.load(file)) if file.exists() else None

    def save(self, file: Path, content: Any) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        with appearing(file) as new:  # several processes may make the same fit at once
            torch.save(content, new)


def rate_of(record: Record) -> float:
    """The learning rate of a result, or of its published row."""
    return record.get("config", record)["lr"]


def by_rate(trials: Sequence[Record], goodness: Callable[[Record], float]) -> dict[float, float]:
    """How good trials of learning rates were, by their rates; one that ended in NaN is worse than any other."""
    found = {rate_of(trial): goodness(trial) for trial in trials}
    return {rate: -math.inf if math.isnan(value) else value for rate, value in found.items()}


def plain(value: Any, digits: int = 6) -> Any:
    """Ready for JSON: numbers with that many significant digits, infinity and NaN as words."""
    if isinstance(value, Mapping):
        return {str(key): plain(item, digits) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, digits) for item in value]
    if isinstance(value, float):
        return float(f"{value:.{digits}g}") if math.isfinite(value) else str(value)
    return value


def parsed(text: str) -> Record:
    """What `plain` made ready, with numbers in place of its words: a perplexity may be infinite or NaN."""

    def numbers(found: Record) -> Record:
        return {key: _WORDS.get(value, value) if isinstance(value, str) else value for key, value in found.items()}

    return json.loads(text, object_hook=numbers)


def read_rows(file: Path) -> list[Record]:
    """Of a file that `write` wrote with rows."""
    return parsed(file.read_text())["rows"]


def write(file: Path, content: Record, rows: list[Record] | None = None) -> None:
    """One line per entry, and one per row; the file appears complete or not at all."""
    lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in content.items()]
    if rows is not None:
        lines.append(' "rows": [\n  ' + ",\n  ".join(map(json.dumps, rows)) + "\n ]")
    file.parent.mkdir(parents=True, exist_ok=True)
    with appearing(file) as new:
        new.write_text("{\n" + ",\n".join(lines) + "\n}\n")

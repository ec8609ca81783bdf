"""The record of a run, `run.json`: what was asked, measured and learned. Written by the command line, read by the page.

Almost everything is optional: a record of a fit without training has no history, one of low rank no blocks. What is
there is checked, and an error names the field.
"""

import base64
import binascii
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Integer, UInt16

from gblr.reports.fields import Fields, RecordError

FILE_NAME = "run.json"
FORMAT = 1
SERIES = ("loss", "relative_cost", "budget", "sigma", "live_blocks")  # of the history, beside `step`


@dataclass(frozen=True)
class Metric:
    """What `value` of a result means."""

    name: str = "score"
    unit: str = ""
    higher_is_better: bool = True


@dataclass(frozen=True)
class Result:
    """One measured model: this run's own (`main`), the dense one (its name is "dense"), or a baseline."""

    name: str
    main: bool = False
    value: float | None = None
    relative_cost: float | None = None
    model_relative_cost: float | None = None
    num_params: int | None = None
    dense_params: int | None = None
    file_bytes: int | None = None
    seconds_per_batch: Mapping[int, float] = field(default_factory=dict)

    @property
    def dense(self) -> bool:
        return self.name.strip().lower() == "dense"


@dataclass(frozen=True)
class Layer:
    """One converted layer. Singular values are samples at even steps from the first to the last."""

    name: str
    shape: tuple[int, int]
    type: str = "other"
    num_blocks: int | None = None
    live_blocks: int | None = None
    block_rank: int | None = None
    dense_mults: int | None = None
    num_mults: int | None = None
    relative_cost: float | None = None
    error: float | None = None
    form: str | None = None
    form_seconds: Mapping[str, float] = field(default_factory=dict)
    blocks: str = ""
    rank: int | None = None
    singular_dense: tuple[float, ...] = ()
    singular: tuple[float, ...] = ()

    def block_array(self) -> UInt16[np.ndarray, "live_blocks 4"]:
        """(row_start, row_width, col_start, col_width) of the live blocks."""
        return decode_blocks(self.blocks)


@dataclass(frozen=True)
class TypeCost:
    """Relative cost over the layers of one type, as in the paper's Table 3."""

    type: str
    layers: int
    min: float | None = None
    mean: float | None = None
    max: float | None = None
    relative_cost: float | None = None


@dataclass(frozen=True)
class History:
    """Learning, by step. None stands for infinity in `sigma`, and for a gap in all else."""

    step: tuple[float, ...] = ()
    loss: tuple[float | None, ...] = ()
    relative_cost: tuple[float | None, ...] = ()
    budget: tuple[float | None, ...] = ()
    sigma: tuple[float | None, ...] = ()
    live_blocks: tuple[float | None, ...] = ()
    value: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True)
class Record:
    title: str
    command: str = ""
    created: str = ""
    seconds: float | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    model: Mapping[str, str] = field(default_factory=dict)
    data: Mapping[str, str] = field(default_factory=dict)
    method: str = ""
    cost: float | None = None
    metric: Metric = Metric()
    timed_lengths: Mapping[int, int] = field(default_factory=dict)  # tokens of a text, by batch size
    results: tuple[Result, ...] = ()
    layers: tuple[Layer, ...] = ()
    by_type: tuple[TypeCost, ...] = ()
    history: History = History()

    @property
    def main(self) -> Result | None:
        """This run's own result."""
        others = (result for result in self.results if not result.dense)
        return next((result for result in self.results if result.main), next(others, None))

    @property
    def dense(self) -> Result | None:
        """The dense model to compare with; none in a run whose own model is dense."""
        found = (result for result in self.results if result.dense)
        return None if self.main is not None and self.main.dense else next(found, None)


def load_record(path: str | Path) -> Record:
    """The record of a run directory, or of the file itself."""
    path = Path(path)
    file = path / FILE_NAME if path.is_dir() else path
    if not file.is_file():
        raise FileNotFoundError(
            f"{file} is not there; give a run directory that has a {FILE_NAME}, or such a file. An unfinished run gets "
            "it when the same command has ended it; one with --stream has none."
        )
    try:
        values = json.loads(file.read_text(encoding="utf-8"), parse_constant=lambda _: None)
    except ValueError as error:  # not JSON, or not text
        raise RecordError(f"{file} is not a run record, or was cut off: {error}") from error
    try:
        return parse_record(values)
    except RecordError as error:
        raise RecordError(f"{file}: {error}") from error


def save_record(record: Mapping[str, Any], directory: str | Path) -> Path:
    """Checks the record and writes `run.json`: complete or not at all. Infinite and undefined numbers become null."""
    plain = _plain(record)
    parse_record(plain)
    file = Path(directory) / FILE_NAME
    write_whole(file, json.dumps(plain, allow_nan=False, ensure_ascii=False))
    return file


def parse_record(values: Any) -> Record:
    """A record from what `run.json` holds, or from what `save_record` is given."""
    if not isinstance(values, Mapping):
        raise RecordError(f"a run record is an object with fields `format`, `title`, ...; got {type(values).__name__}")
    top = Fields(_plain(values))
    if (found := top.integer("format")) != FORMAT:
        raise RecordError(f"field `format` is {found}, this gblr reads {FORMAT}; update gblr, or make the record anew")
    return Record(
        title=top.text("title"),
        command=top.text("command", ""),
        created=top.text("created", ""),
        seconds=top.number("seconds"),
        environment=top.texts("environment"),
        model=top.texts("model"),
        data=top.texts("data"),
        method=top.text("method", ""),
        cost=top.number("cost"),
        metric=_metric(top.object("metric")),
        timed_lengths=_lengths(top.object("timed_lengths")),
        results=tuple(_result(row) for row in top.objects("results")),
        layers=tuple(_layer(row) for row in top.objects("layers")),
        by_type=tuple(_type_cost(row) for row in top.objects("by_type")),
        history=_history(top.object("history")),
    )


def encode_blocks(blocks: Integer[np.ndarray, "live_blocks 4"]) -> str:
    """Base64 of little-endian 16-bit numbers: row_start, row_width, col_start, col_width of each live block.

    >>> decode_blocks(encode_blocks(np.array([[60, 8, 0, 64]])))
    array([[60,  8,  0, 64]], dtype=uint16)
    """
    if blocks.size and (blocks.min() < 0 or blocks.max() > 65535):
        raise ValueError(f"starts and widths must lie in [0, 65535]; got {blocks.min()} to {blocks.max()}")
    return base64.b64encode(blocks.astype("<u2").tobytes()).decode("ascii")


def decode_blocks(text: str) -> UInt16[np.ndarray, "live_blocks 4"]:
    return np.frombuffer(base64.b64decode(text, validate=True), dtype="<u2").reshape(-1, 4)


def write_whole(file: Path, text: str) -> None:
    """After a crash at any moment the old file or the new one is there, complete."""
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_name(f".{file.name}.{os.getpid()}.new")
    try:
        with open(beside, "w", encoding="utf-8", newline="\n") as handle:
            handle.write(text)
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(beside, file)
    finally:
        beside.unlink(missing_ok=True)


def _metric(row: Fields) -> Metric:
    return Metric(row.text("name", "score"), row.text("unit", ""), row.flag("higher_is_better", True))


def _result(row: Fields) -> Result:
    return Result(
        name=row.text("name"),
        main=row.flag("main", False),
        value=row.number("value"),
        relative_cost=row.number("relative_cost"),
        model_relative_cost=row.number("model_relative_cost"),
        num_params=row.whole("num_params"),
        dense_params=row.whole("dense_params"),
        file_bytes=row.whole("file_bytes"),
        seconds_per_batch=_by_batch(row),
    )


def _by_batch(row: Fields) -> dict[int, float]:
    times = row.seconds("seconds_per_batch")
    for key in times:
        if not key.isdecimal():
            raise RecordError(f"field `{row.at('seconds_per_batch')}` must have batch sizes as keys; got {key!r}")
    return dict(sorted((int(key), seconds) for key, seconds in times.items()))


def _lengths(row: Fields) -> dict[int, int]:
    for key in row.values:
        if not key.isdecimal():
            raise RecordError(f"field `{row.where}` must have batch sizes as keys; got {key!r}")
    return {int(key): row.integer(key) for key in row.values if row.has(key)}


def _layer(row: Fields) -> Layer:
    shape = _shape(row)
    return Layer(
        name=row.text("name"),
        shape=shape,
        type=row.text("type", "other"),
        num_blocks=row.whole("num_blocks"),
        live_blocks=row.whole("live_blocks"),
        block_rank=row.whole("block_rank"),
        dense_mults=row.whole("dense_mults"),
        num_mults=row.whole("num_mults"),
        relative_cost=row.number("relative_cost"),
        error=row.number("error"),
        form=row.text("form") if row.has("form") else None,
        form_seconds=row.seconds("form_seconds"),
        blocks=_blocks(row, shape),
        rank=row.whole("rank"),
        singular_dense=_all_numbers(row, "singular_dense"),
        singular=_all_numbers(row, "singular"),
    )


def _shape(row: Fields) -> tuple[int, int]:
    sizes = _all_numbers(row, "shape")
    if len(sizes) != 2 or min(sizes) < 1:
        raise row.wrong("shape", "[out, in], two positive whole numbers", row.values.get("shape"))
    return int(sizes[0]), int(sizes[1])


def _blocks(row: Fields, shape: tuple[int, int]) -> str:
    text = row.text("blocks", "")
    try:
        blocks = decode_blocks(text)
    except (binascii.Error, ValueError) as error:
        raise RecordError(f"field `{row.at('blocks')}` must be base64 of 16-bit numbers, 4 a block: {error}") from error
    for axis, name in enumerate(("row", "col")):
        start, width = blocks[:, 2 * axis], blocks[:, 2 * axis + 1]
        if (start >= shape[axis]).any() or (width > shape[axis]).any():
            raise RecordError(f"field `{row.at('blocks')}` has a {name} interval outside of the shape {list(shape)}")
    return text


def _type_cost(row: Fields) -> TypeCost:
    minimum, mean, maximum = (row.number(name) for name in ("min", "mean", "max"))
    return TypeCost(row.text("type"), row.integer("layers"), minimum, mean, maximum, row.number("relative_cost"))


def _history(row: Fields) -> History:
    step = _all_numbers(row, "step")
    series = {name: row.numbers(name) for name in SERIES}
    for name, values in series.items():
        if values and len(values) != len(step):
            raise row.wrong(name, f"as long as `step`, which has {len(step)} entries", f"{len(values)} entries")
    return History(step=step, value=_pairs(row, "value"), **series)


def _pairs(row: Fields, name: str) -> tuple[tuple[float, float], ...]:
    pairs = row.values.get(name) or []
    if not isinstance(pairs, (list, tuple)):
        raise row.wrong(name, "a list of [step, value]", pairs)
    numbers = [Fields({"pair": pair}, row.at(f"{name}[{i}]")).numbers("pair") for i, pair in enumerate(pairs)]
    for i, pair in enumerate(numbers):
        if len(pair) != 2 or pair[0] is None:
            raise row.wrong(f"{name}[{i}]", "[step, value]", pairs[i])
    return tuple((step, value) for step, value in numbers if step is not None and value is not None)


def _all_numbers(row: Fields, name: str) -> tuple[float, ...]:
    values = row.numbers(name)
    if None in values:
        raise row.wrong(f"{name}[{values.index(None)}]", "a number", None)
    return tuple(value for value in values if value is not None)


def _plain(value: Any) -> Any:
    """Only what JSON knows: numpy's numbers and arrays as plain ones, infinite and undefined numbers as null."""
    if isinstance(value, np.generic | np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

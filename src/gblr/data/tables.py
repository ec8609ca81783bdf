"""Tables, from parquet files or the Hugging Face hub, and what their columns mean."""

import importlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from gblr.data.pictures import Pictures
from gblr.data.splits import by_split, train_and_test

_LABELS = ("label", "labels", "class", "target", "fine_label", "category", "y")
_TEXTS = ("text", "sentence", "content", "review", "document", "article", "story", "question")
_SCORES = ("score", "similarity_score", "similarity", "label", "labels")
EXPECTED = (
    "an image column (encoded bytes) and a label; sentence1, sentence2 and score; or text, with a label or without"
)


@dataclass(frozen=True)
class Columns:
    """Names of the columns that count; None for those that are not there."""

    image: str | None = None
    text: str | None = None
    label: str | None = None
    pair: tuple[str, str] | None = None
    score: str | None = None


def read_parquet(path: str | Path) -> dict[str, Any]:
    """A pyarrow table for each split ("" where names tell none), of a file or of all files in a folder."""
    path = Path(path)
    files = [path] if path.is_file() else sorted(path.rglob("*.parquet"))
    if not files:
        raise FileNotFoundError(f"no .parquet files in {path}.")
    named = [(str(file.relative_to(path)) if file != path else "", file) for file in files]
    return {split: _read(part) for split, part in by_split(named).items()}


def read_hub(name: str) -> dict[str, Any]:
    """A pyarrow table for each split of a Hugging Face data set, by its id or by id:configuration."""
    try:
        datasets = importlib.import_module("datasets")
    except ImportError as error:
        raise ImportError("data sets of the hub need `datasets`: pip install 'gblr[hf]'.") from error
    place, _, configuration = name.partition(":")
    try:
        found = datasets.load_dataset(place, configuration or None)
    except (OSError, ValueError, RuntimeError) as error:
        offline = os.environ.get("HF_HUB_OFFLINE", "0") not in ("0", "")
        where = "in the local cache (HF_HUB_OFFLINE is set)" if offline else "on the Hugging Face hub"
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise OSError(
            f"{name} is no file or folder here, and looking for it {where} failed: {reason}. Check the spelling, or "
            "download its parquet files where there is a network and give their folder."
        ) from error
    tables = {str(split): part.data.table for split, part in found.items()}
    return {split: parts[0] for split, parts in by_split(tables.items()).items()}


def find_columns(table: Any, source: str) -> Columns:
    """What the columns mean, by their names and types."""
    types = _pyarrow().types
    kinds = {field.name: field.type for field in table.schema}
    images = [name for name, kind in kinds.items() if _holds_images(kind)]
    texts = [name for name, kind in kinds.items() if types.is_string(kind) or types.is_large_string(kind)]
    label = next((name for name in _LABELS if name in kinds and _is_class(kinds[name])), None)
    if len(images) == 1:
        return Columns(image=images[0], label=label)
    score = next((name for name in _SCORES if name in kinds and not _is_text(kinds[name])), None)
    if {"sentence1", "sentence2"} <= set(texts) and score:
        return Columns(pair=("sentence1", "sentence2"), score=score)
    text = next((name for name in _TEXTS if name in texts), texts[0] if len(texts) == 1 else None)
    if text is None:
        listed = ", ".join(f"{name} ({kind})" for name, kind in kinds.items())
        raise ValueError(f"the columns of {source} are not understood: {listed}. Expected {EXPECTED}.")
    return Columns(text=text, label=label if label != text else None)


def parts_of(tables: dict[str, Any], label: str | None) -> tuple[Any, Any | None]:
    """Training and test table. A test part without its labels, as some contests publish it, gives way to validation."""
    usable = {split: table for split, table in tables.items() if split != "test" or not _is_hidden(table, label)}
    train, test = train_and_test(usable)
    return (next(iter(tables.values())), None) if train is None else (train, test)


def _is_hidden(table: Any, label: str | None) -> bool:
    return label is not None and set(table[label].slice(0, 100).to_pylist()) in ({-1}, {None})


def pictures(table: Any, image: str, labels: Int[Tensor, " n"] | None) -> Pictures:
    encoded = [_encoded(row) for row in table[image].to_pylist()]
    return Pictures(encoded, torch.zeros(len(encoded), dtype=torch.long) if labels is None else labels)


def class_names(table: Any, label: str) -> tuple[str, ...] | None:
    """The classes in their order: as Hugging Face keeps them in the file, sorted where labels are words; None if
    labels are bare numbers.
    """
    stored = json.loads((table.schema.metadata or {}).get(b"huggingface", b"{}"))
    names = stored.get("info", {}).get("features", {}).get(label, {}).get("names")
    if names:
        return tuple(names)
    return tuple(sorted(set(strings(table, label)))) if _is_text(table.schema.field(label).type) else None


def class_numbers(table: Any, label: str, classes: tuple[str, ...] | None) -> Int[Tensor, " n"]:
    """Labels as whole numbers; words by their place in `classes`."""
    values = table[label].to_pylist()
    if None in values:
        raise ValueError(f"the column {label} has rows without a label; leave them out.")
    if values and isinstance(values[0], str):
        number = {name: i for i, name in enumerate(classes or ())}
        if unknown := set(values) - set(number):
            raise ValueError(f"the column {label} has classes that the training part lacks: {sorted(unknown)[:5]}.")
        values = [number[value] for value in values]
    return torch.tensor(values, dtype=torch.long)


def strings(table: Any, name: str) -> list[str]:
    """The texts of a column; rows without one are left out."""
    return [value for value in table[name].to_pylist() if value]


def take(table: Any, rows: Sequence[int]) -> Any:
    return table if len(rows) == len(table) else table.take(list(rows))


def _read(files: list[Path]) -> Any:
    parquet = _pyarrow().parquet
    tables = [parquet.read_table(file) for file in files]
    try:
        return _pyarrow().concat_tables(tables)
    except _pyarrow().ArrowInvalid as error:
        names = ", ".join(file.name for file in files[:5])
        raise ValueError(f"{names} have different columns; give files of one kind.") from error


def _encoded(row: Any) -> bytes | Path:
    if isinstance(row, dict):
        return row["bytes"] if row.get("bytes") is not None else Path(row["path"])
    return row


def _holds_images(kind: Any) -> bool:
    types = _pyarrow().types
    if types.is_struct(kind):
        return any(field.name == "bytes" for field in kind)
    return types.is_binary(kind) or types.is_large_binary(kind)


def _is_class(kind: Any) -> bool:
    return _pyarrow().types.is_integer(kind) or _pyarrow().types.is_boolean(kind) or _is_text(kind)


def _is_text(kind: Any) -> bool:
    return _pyarrow().types.is_string(kind) or _pyarrow().types.is_large_string(kind)


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError("parquet files are read by pyarrow: pip install 'gblr[hf]'.") from error
    return pyarrow

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
    label = label or next((name for name in _LABELS if name in kinds and _has_gaps(table[name])), None)
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
    """Training and test table. A test part without its labels or scores, as some contests publish it, gives way to
    validation.
    """
    usable = {split: table for split, table in tables.items() if split != "test" or not _is_hidden(table, label)}
    train, test = train_and_test(usable)
    return (next(iter(tables.values())), None) if train is None else (train, test)


def _is_hidden(table: Any, label: str | None) -> bool:
    if label is None:
        return False
    return label not in table.column_names or set(table[label].slice(0, 100).to_pylist()) in ({-1}, {None})


def check_columns(table: Any, columns: Columns, what: str) -> None:
    """Raises for a part that lacks columns of the one that told what they mean."""
    wanted = (columns.image, columns.text, columns.label, *(columns.pair or ()), columns.score)
    if missing := [name for name in wanted if name is not None and name not in table.column_names]:
        raise ValueError(
            f"{what} has no column {', '.join(missing)}, which another part of the data has; it has "
            f"{', '.join(table.column_names)}. Give its columns the same names."
        )


def pictures(table: Any, image: str, labels: Int[Tensor, " n"] | None) -> Pictures:
    encoded = [_encoded(row) for row in table[image].to_pylist()]
    return Pictures(encoded, torch.zeros(len(encoded), dtype=torch.long) if labels is None else labels)


def class_names(table: Any, label: str) -> tuple[str, ...] | None:
    """The classes in their order: as Hugging Face keeps them in the file, sorted where labels are words; None if
    labels are bare numbers.
    """
    if names := stored_names(table, label):
        return names
    return tuple(sorted(set(strings(table, label)))) if _is_text(table.schema.field(label).type) else None


def stored_names(table: Any, label: str) -> tuple[str, ...] | None:
    stored = json.loads((table.schema.metadata or {}).get(b"huggingface", b"{}"))
    names = stored.get("info", {}).get("features", {}).get(label, {}).get("names")
    return tuple(names) if names else None


def model_order(classes: tuple[str, ...] | None, known: tuple[str, ...] | None) -> tuple[str, ...] | None:
    """The model's own order of classes, in the data's spelling, if it knows them all; else that of the data.

    >>> model_order(("negative", "positive"), ("POSITIVE", "NEUTRAL", "NEGATIVE"))
    ('positive', 'NEUTRAL', 'negative')
    """
    if not classes or not known or len({name.lower() for name in known}) < len(known):
        return classes
    spelled = {name.lower(): name for name in classes}
    if len(spelled) < len(classes) or not spelled.keys() <= {name.lower() for name in known}:
        return classes
    return tuple(spelled.get(name.lower(), name) for name in known)


def class_numbers(table: Any, label: str, classes: tuple[str, ...] | None) -> Int[Tensor, " n"]:
    """Labels as whole numbers; words by their place in `classes`, and so numbers that have names in the file."""
    values = table[label].to_pylist()
    if any(value is None or value != value for value in values):
        raise ValueError(f"the column {label} has rows without a label; leave them out.")
    if values and isinstance(values[0], str):
        number = {name: i for i, name in enumerate(classes or ())}
        if unknown := set(values) - set(number):
            raise ValueError(f"the column {label} has classes that the training part lacks: {sorted(unknown)[:5]}.")
        values = [number[value] for value in values]
    elif (stored := stored_names(table, label)) and classes and classes != stored:
        values = [classes.index(stored[value]) if value >= 0 else value for value in values]
    return torch.tensor(values, dtype=torch.long)


def strings(table: Any, name: str) -> list[str]:
    """The texts of a column; rows without one are left out."""
    return [value for value in table[name].to_pylist() if value]


def take(table: Any, rows: Sequence[int]) -> Any:
    return table if len(rows) == len(table) else table.take(list(rows))


def _read(files: list[Path]) -> Any:
    tables = [_read_one(file) for file in files]
    try:
        return _pyarrow().concat_tables(tables)
    except _pyarrow().ArrowInvalid as error:
        names = ", ".join(file.name for file in files[:5])
        raise ValueError(f"{names} have different columns; give files of one kind.") from error


def _read_one(file: Path) -> Any:
    """Columns of categories, as pandas writes them, become plain."""
    pyarrow = _pyarrow()
    try:
        with pyarrow.parquet.ParquetFile(file) as opened:
            names = opened.schema_arrow.names
            if doubled := sorted({name for name in names if names.count(name) > 1}):
                raise ValueError(f"{file} has several columns named {', '.join(doubled)}. Rename or drop them.")
        table = pyarrow.parquet.read_table(file)
    except pyarrow.ArrowException as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise ValueError(f"{file} cannot be read as parquet: {reason}. Write or download it again.") from error
    for i, field in enumerate(table.schema):
        if pyarrow.types.is_dictionary(field.type):
            table = table.set_column(i, field.name, table.column(i).cast(field.type.value_type))
    return table


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


def _has_gaps(column: Any) -> bool:
    """Whole numbers with rows that lack one: pandas makes floats of these."""
    if not _pyarrow().types.is_floating(column.type) or not column.null_count:
        return False
    return all(value is None or float(value).is_integer() for value in column.to_pylist())


def _is_text(kind: Any) -> bool:
    return _pyarrow().types.is_string(kind) or _pyarrow().types.is_large_string(kind)


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError("parquet files are read by pyarrow: pip install 'gblr[hf]'.") from error
    return pyarrow

"""`load_task`: whatever a user calls data, as a task for a model."""

import re
from itertools import islice
from pathlib import Path
from typing import Any

from gblr.data import cifar
from gblr.data.digits import load_digits
from gblr.data.folder import read_image_folder
from gblr.data.pictures import SUFFIXES
from gblr.data.splits import train_and_test
from gblr.data.tables import read_hub, read_parquet
from gblr.data.text import is_text, read_texts
from gblr.models.load import LoadedModel
from gblr.workflows.image_task import ImageData, image_task
from gblr.workflows.table_task import table_task
from gblr.workflows.task import Request, Task
from gblr.workflows.text_choice import reads_lines, text_task

__all__ = ["Task", "load_task"]

FORMS = (
    "digits, cifar10:DIR, a folder of images (one subfolder a class), a text file or folder (.txt, .jsonl), a parquet "
    "file or folder, or the id of a Hugging Face data set (or id:configuration)"
)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?(:[\w.-]+)?")
_TABLES = frozenset({".parquet"})
_OTHERS = frozenset({".csv", ".tsv", ".json", ".zip", ".gz", ".tar", ".npz", ".arrow"})  # files, but none of ours
_LOOK_AT = 1000  # files of a folder that decide what it is


def load_task(
    source: str,
    loaded: LoadedModel,
    *,
    seed: int = 0,
    max_train: int | None = None,
    max_eval: int | None = None,
) -> Task:
    """The task that `source` is for the model `loaded`, with at most `max_train` and `max_eval` samples.

    `source` is `digits`, `cifar10:DIR`, a folder of images, a text file or folder, a parquet file or folder, or the id
    of a Hugging Face data set. What the model is decides what is done with it: a language model reads text as windows,
    an encoder as sentences. Data without a test part lends a tenth of itself. Move the model to its device first.
    """
    request = Request(source, loaded, seed, max_train, max_eval)
    if source == "digits":
        return image_task(_digits(), request)
    if source.startswith("cifar10:"):
        return image_task(_cifar10(source.removeprefix("cifar10:")), request)
    path = Path(source).expanduser()
    if path.exists():
        return _from_disk(path, request)
    if not _HUB_ID.fullmatch(source) or is_text(path) or path.suffix.lower() in _TABLES | SUFFIXES | _OTHERS:
        raise FileNotFoundError(f"there is no {source}. Data is {FORMS}.")
    return table_task(read_hub(source), request)


def _digits() -> ImageData:
    train, test = load_digits()  # one split for all seeds: scores stay comparable
    return ImageData(train, test, 10, mean=(0.3,), std=(0.37,))


def _cifar10(folder: str) -> ImageData:
    train, test = cifar.load_cifar10(Path(folder).expanduser())
    return ImageData(train, test, 10, mean=cifar.MEAN, std=cifar.STD, pad=4, flip=True)


def _from_disk(path: Path, request: Request) -> Task:
    files = [path] if path.is_file() else list(islice((file for file in path.rglob("*") if file.is_file()), _LOOK_AT))
    suffixes = {file.suffix.lower() for file in files}
    if suffixes & _TABLES:
        return table_task(read_parquet(path), request)
    if path.is_dir() and suffixes & SUFFIXES:
        return image_task(_folder(path, request.loaded), request)
    if any(is_text(file) for file in files):
        return text_task(*_texts(path, request.loaded), request)
    some = ", ".join(file.name for file in files[:5]) or "it is empty"
    raise ValueError(f"{request.source} is no data that is understood ({some}). {_remedy(files)}Data is {FORMS}.")


def _remedy(files: list[Path]) -> str:
    readers = {".csv": "read_csv(FILE)", ".tsv": "read_csv(FILE, sep='\\t')", ".json": "read_json(FILE)"}
    known = next((readers[file.suffix.lower()] for file in files if file.suffix.lower() in readers), None)
    return f"Make a parquet file of it: pandas.{known}.to_parquet('data.parquet'). " if known else ""


def _folder(path: Path, loaded: LoadedModel) -> ImageData:
    found = read_image_folder(path, loaded.label_names)
    return ImageData(found.train, found.test, len(found.classes))


def _texts(path: Path, loaded: LoadedModel) -> tuple[Any, Any]:
    splits = read_texts(path, by_line=reads_lines(loaded))
    train, test = train_and_test(splits)
    return (next(iter(splits.values())), None) if train is None else (train, test)

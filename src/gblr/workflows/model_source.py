"""Models that gblr wrote itself, beside all that `load_model` knows: runs, and folders of `save_pretrained`."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gblr.conversion.checkpoint import MANIFEST, from_pretrained, load_
from gblr.models.hugging_face import describe
from gblr.models.load import LoadedModel, load_model
from gblr.workflows.settings import SETTINGS

RECORD = "run.json"


def open_model(source: str, *, task: str | None = None, dtype: torch.dtype | None = None) -> LoadedModel:
    """As `load_model`; also the folder of a run (`gblr compress`, `gblr train`) and of `gblr.save_pretrained`."""
    folder = Path(source)
    if (folder / RECORD).is_file():
        return _of_run(folder)
    if (folder / MANIFEST).is_file():
        return _of_checkpoint(folder)
    if (folder / "model" / MANIFEST).is_file():  # a run with --stream, which leaves no record
        return _of_checkpoint(folder / "model")
    check_finished(folder)
    return load_model(source, task=task, dtype=dtype)


def open_folder(folder: Path) -> LoadedModel:
    """As `open_model`, of a folder alone: a misspelt one is not looked for on the hub."""
    check_there(folder)
    return open_model(str(folder))


def check_there(folder: Path) -> None:
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}. Give that of a run, or of `gblr.save_pretrained`.")


def check_finished(folder: Path) -> None:
    """Raises for a run that was stopped: it has settings, and neither a record nor a model."""
    if (folder / SETTINGS).is_file() and not (folder / RECORD).is_file() and not (folder / "config.json").is_file():
        raise ValueError(f"{folder} is an unfinished run: the same `gblr` command that began it continues it.")


def read_record(folder: Path) -> dict[str, Any]:
    file = folder / RECORD
    if not file.is_file():
        raise FileNotFoundError(
            f"{folder} has no {RECORD}: it is no folder that `gblr compress` or `gblr train` finished."
        )
    try:
        found = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is damaged: {error}") from error
    parts = [found.get(name) for name in ("model", "data")] if isinstance(found, dict) else [None]
    if not all(isinstance(part, dict) and "source" in part for part in parts):
        raise ValueError(f"{file} is no record that `gblr compress` or `gblr train` wrote.")
    return found


def lasting_source(source: str) -> str:
    """A path, if it is one, that holds from any working folder."""
    prefix, path = ("cifar10:", source.removeprefix("cifar10:")) if source.startswith("cifar10:") else ("", source)
    place = Path(path).expanduser()
    return f"{prefix}{place.resolve()}" if source != "digits" and place.exists() else source


def module_folder(source: str) -> str | None:
    """Of `python:module:function`: the folder that the module, which is loaded, was found in."""
    if not source.startswith("python:"):
        return None
    name = source.removeprefix("python:").rpartition(":")[0]
    file = getattr(sys.modules.get(name.partition(".")[0]), "__file__", None)
    if file is None:
        return None
    path = Path(file).resolve()
    return str(path.parent.parent if path.name == "__init__.py" else path.parent)


def _of_run(folder: Path) -> LoadedModel:
    record = read_record(folder)
    module_place = record["model"].get("folder")
    if module_place and module_place not in sys.path:
        sys.path.append(module_place)  # the current folder and installed packages come first
    known: dict[str, Any] = {
        key: tuple(found) for key in ("image_mean", "image_std") if (found := record["data"].get(key))
    }
    try:
        loaded = open_model(record["model"]["source"])
    except (OSError, ImportError, ValueError, RuntimeError) as error:
        return replace(_without_source(folder, record["model"]["source"], error), **known)
    load_(loaded.model, folder / "model").eval()
    return replace(loaded, source=str(folder.resolve()), pretrained=True, note="", **known)


def _without_source(folder: Path, source: str, error: Exception) -> LoadedModel:
    """Of a transformers model the run has all; any other is built by the code or package that it came from."""
    try:
        loaded = _of_checkpoint(folder / "model")
    except (OSError, ImportError, ValueError):
        raise OSError(f"{folder} was made from {source}, which cannot be opened here: {error}") from error
    note = f"{source}, from which {folder} was made, cannot be opened here: the files of the run are used alone"
    return replace(loaded, source=str(folder.resolve()), note=note)


def _of_checkpoint(folder: Path) -> LoadedModel:
    """A transformers model; its tokenizer too, where it lies beside it."""
    return describe(from_pretrained(folder), str(folder.resolve()), str(folder))

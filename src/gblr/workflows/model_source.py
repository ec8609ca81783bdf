"""Models that gblr wrote itself, beside all that `load_model` knows: runs, and folders of `save_pretrained`."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gblr.conversion.checkpoint import MANIFEST, from_pretrained, load_
from gblr.models.hugging_face import describe
from gblr.models.load import LoadedModel, load_model

RECORD = "run.json"


def open_model(source: str, *, task: str | None = None, dtype: torch.dtype | None = None) -> LoadedModel:
    """As `load_model`; also the folder of a run (`gblr compress`, `gblr train`) and of `gblr.save_pretrained`."""
    folder = Path(source)
    if (folder / RECORD).is_file():
        return _of_run(folder)
    if (folder / MANIFEST).is_file():
        return _of_checkpoint(folder)
    return load_model(source, task=task, dtype=dtype)


def read_record(folder: Path) -> dict[str, Any]:
    file = folder / RECORD
    if not file.is_file():
        raise FileNotFoundError(
            f"{folder} has no {RECORD}: it is no folder that `gblr compress` or `gblr train` finished."
        )
    try:
        return json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is damaged: {error}") from error


def _of_run(folder: Path) -> LoadedModel:
    record = read_record(folder)
    loaded = open_model(record["model"]["source"])
    load_(loaded.model, folder / "model").eval()
    return replace(loaded, source=str(folder.resolve()), pretrained=True, note="")


def _of_checkpoint(folder: Path) -> LoadedModel:
    """A transformers model; its tokenizer too, where it lies beside it."""
    return describe(from_pretrained(folder), str(folder.resolve()), str(folder))

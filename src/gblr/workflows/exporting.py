"""A run as a file for other programs."""

from pathlib import Path
from typing import Any

import torch

from gblr.conversion.export_onnx import export_onnx
from gblr.conversion.planner import as_call
from gblr.models.load import LoadedModel
from gblr.workflows.model_source import RECORD, open_model, read_record
from gblr.workflows.tasks import load_task

FORMATS = {"onnx": ".onnx", "torch": ".pt2"}


def export_folder(folder: Path, format: str, out: Path | None) -> dict[str, Any]:
    loaded = open_model(str(folder))
    file = out or folder / f"model{FORMATS[format]}"
    example = example_of(folder, loaded)
    config: Any = getattr(loaded.model, "config", None)
    if getattr(config, "use_cache", False):
        config.use_cache = False  # a file has no place for keys and values of earlier tokens
    found: dict[str, Any] = {"file": str(file), "format": format}
    if format == "onnx":
        written = export_onnx(loaded.model, example, file)
        return found | {
            "bytes": written.num_bytes,
            "operators": written.num_operators,
            "difference": written.difference,
        }
    args, kwargs = as_call(example)
    with torch.no_grad():
        torch.export.save(torch.export.export(loaded.model, args, kwargs), file)
    return found | {"bytes": file.stat().st_size}


def example_of(folder: Path, loaded: LoadedModel) -> Any:
    """Inputs to call the model with: of the run's own data, or made up by a transformers model."""
    if (folder / RECORD).is_file():
        record = read_record(folder)
        return load_task(record["data"]["source"], loaded, max_train=8, max_eval=8).example
    inputs = getattr(loaded.model, "dummy_inputs", None)
    if inputs is None:
        raise ValueError(f"{folder} is no run, and its model has no example inputs; use gblr.export_onnx from Python.")
    return dict(inputs)

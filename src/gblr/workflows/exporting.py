"""A run as a file for other programs."""

import inspect
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from gblr.conversion.blocks import without_cache
from gblr.conversion.export_onnx import OnnxExport, export_onnx
from gblr.conversion.planner import as_call
from gblr.models.load import LoadedModel
from gblr.workflows.model_source import RECORD, open_folder, read_record
from gblr.workflows.tasks import Task, load_task

FORMATS = {"onnx": ".onnx", "torch": ".pt2"}
Shapes = dict[str, list[int | str]]


def export_folder(folder: Path, format: str, out: Path | None) -> dict[str, Any]:
    loaded = open_folder(folder)
    file = out or folder / f"model{FORMATS[format]}"
    example = two_samples(example_of(folder, loaded))
    found: dict[str, Any] = {"file": str(file), "format": format}
    if format == "onnx":
        written, note = _write_onnx(loaded.model, example, file)
        return found | {
            "note": note,
            "bytes": written.num_bytes,
            "inputs": _onnx_shapes(file),
            "operators": written.num_operators,
            "difference": written.difference,
        }
    with without_cache(loaded.model):  # as files in ONNX are
        shapes = _write_torch(loaded.model, example, file)
    return found | {"bytes": file.stat().st_size, "inputs": shapes}


def example_of(folder: Path, loaded: LoadedModel) -> Any:
    """Inputs to call the model with: of the run's own data, or made up by a transformers model."""
    if (folder / RECORD).is_file():
        return task_of(folder, loaded, max_train=8, max_eval=8).example
    inputs = getattr(loaded.model, "dummy_inputs", None)
    if inputs is None:
        raise ValueError(f"{folder} is no run, and its model has no example inputs; use gblr.export_onnx from Python.")
    return with_what_tokenizers_add(dict(inputs), loaded.model)


def task_of(folder: Path, loaded: LoadedModel, **most: int) -> Task:
    """That of a run, on its own data."""
    source = read_record(folder)["data"]["source"]
    try:
        return load_task(source, loaded, **most)
    except OSError as error:
        raise OSError(
            f"{folder} is fed with the data that it was made with, {source}; put it back where it was. It cannot be "
            f"read now: {error}"
        ) from error


def with_what_tokenizers_add(inputs: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """A mask of padding, and kinds of tokens for models with several: without them a file would take texts of equal
    length alone, and give wrong numbers for others.
    """
    tokens, known = inputs.get("input_ids"), inspect.signature(model.forward).parameters
    if tokens is None:
        return inputs
    if "attention_mask" in known:
        inputs.setdefault("attention_mask", torch.ones_like(tokens))
    if "token_type_ids" in known and getattr(getattr(model, "config", None), "type_vocab_size", 0) > 1:
        inputs.setdefault("token_type_ids", torch.zeros_like(tokens))
    return inputs


def two_samples(example: Any) -> Any:
    """At least: torch.export takes a size of 1 for a constant."""
    return pytree.tree_map(lambda x: torch.cat([x, x]) if len(x) == 1 else x, example)


def free_axes(x: Tensor) -> dict[int, str]:
    """Axes that may have another size: samples, and of tokens and their masks the length.

    >>> free_axes(torch.zeros(2, 7, dtype=torch.long)), free_axes(torch.zeros(2, 3, 8, 8))
    ({0: 'batch', 1: 'length'}, {0: 'batch'})
    """
    return {0: "batch"} | ({1: "length"} if x.dim() == 2 and not x.is_floating_point() else {})


def _write_onnx(model: nn.Module, example: Any, file: Path) -> tuple[OnnxExport, str]:
    """With a note where the model takes one length of tokens alone."""
    args, kwargs = as_call(example)
    axes: Any = {name: free_axes(x) for name, x in kwargs.items()} or tuple(free_axes(x) for x in args)
    if any("length" in found.values() for found in (axes.values() if kwargs else axes)):
        try:
            return export_onnx(model, example, file, dynamic_shapes=axes), ""
        except torch.onnx.OnnxExporterError:  # if that was not it, the error comes again
            written = export_onnx(model, example, file)
            return written, "the length is that of the example: torch could not export the model for any"
    return export_onnx(model, example, file), ""


def _onnx_shapes(file: Path) -> Shapes:
    import onnx

    inputs = onnx.load(file, load_external_data=False).graph.input
    return {one.name: [d.dim_param or d.dim_value for d in one.type.tensor_type.shape.dim] for one in inputs}


def _write_torch(model: nn.Module, example: Any, file: Path) -> Shapes:
    """Where the model itself needs a fixed size, torch fixes it; the shapes tell."""
    args, kwargs = as_call(example)
    axes: Any = pytree.tree_map(lambda x: dict.fromkeys(free_axes(x), torch.export.Dim.AUTO), kwargs or args)
    with torch.no_grad():
        program = torch.export.export(model, args, kwargs, dynamic_shapes=axes)
    torch.export.save(program, file)
    values = {node.name: node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"}
    names = [name for name in program.graph_signature.user_inputs if isinstance(name, str)]
    return {name: _named_axes(values[name]) for name in names if isinstance(values[name], Tensor)}


def _named_axes(x: Tensor) -> list[int | str]:
    names, sizes = free_axes(x), map(str, x.shape)  # as text: one that torch has fixed may still be a symbol by type
    return [int(size) if size.isdigit() else names.get(axis, size) for axis, size in enumerate(sizes)]

"""Converted models on disk: safetensors and JSON, nothing that runs code.

model.safetensors (or shards and model.safetensors.index.json)   every tensor of the state dict, shared ones once
gblr_buffers.safetensors                                         buffers that the state dict leaves out, if any
gblr.json                                                        which layers are converted, and how; all shapes
config.json, generation_config.json                              transformers' own, for its models
"""

import importlib.metadata
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gblr.conversion.layer_spec import is_converted, layer_spec
from gblr.conversion.placement import check_layers, fill, plan
from gblr.conversion.tensor_files import (
    CheckpointError,
    Record,
    read_tensors,
    unique_tensors,
    unsaved_buffers,
    write_tensors,
)
from gblr.conversion.transformers_model import build_on_meta, is_transformers_model, save_config
from gblr.layers.gaudi import GaudiModule

FORMAT_VERSION = 1
MANIFEST = "gblr.json"
INDEX = "model.safetensors.index.json"


def save_pretrained(model: nn.Module, directory: str | os.PathLike[str], max_shard_bytes: int = 5_000_000_000) -> None:
    """Writes the model, converted or not, to `directory`, over whatever checkpoint is there.

    New files replace old ones only when all of them are written.

        gblr.save_pretrained(model, "small")
        same = gblr.from_pretrained("small")                      # a transformers model
        same = gblr.load_(MyModel(), "small")                     # any other: dense, as it was before conversion
    """
    model = getattr(model, "_orig_mod", model)  # what torch.compile wraps
    for module in (m for m in model.modules() if isinstance(m, GaudiModule)):
        module.renew_other_tables()
    tensors, aliases = unique_tensors(model)
    buffers, buffer_aliases = unsaved_buffers(model)
    manifest = describe_model(model)
    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".gblr-", dir=target) as scratch:
        folder = Path(scratch)
        if is_transformers_model(model):
            manifest["transformers"] = save_config(model, folder)
        manifest["tensors"] = write_tensors(
            tensors, folder, "model.safetensors", max_shard_bytes, narrow=tuple(manifest["layers"])
        )
        manifest["buffers"] = (
            write_tensors(buffers, folder, "gblr_buffers.safetensors", max_shard_bytes) if buffers else {}
        )
        manifest["aliases"] = aliases | buffer_aliases
        publish(manifest, sum(t.nbytes for t in tensors.values()), folder, target)


def describe_model(model: nn.Module) -> dict[str, Any]:
    """What the manifest says of a model before its tensors are written; they may be on the meta device."""
    return {
        "format_version": FORMAT_VERSION,
        "library_version": _library_version(),
        "architecture": type(model).__name__,
        "transformers": None,
        **_layers(model),
    }


def publish(manifest: dict[str, Any], total_size: int, folder: Path, target: Path) -> None:
    """Adds index and manifest to what was written to `folder`, and moves all of it to `target`, over what is there.

    Tensor files may be in `target` already.
    """
    _write_index(manifest["tensors"], total_size, folder)
    (folder / MANIFEST).write_text(_lines(manifest))
    written = sorted(path.name for path in folder.iterdir())
    for name in sorted(written, key=lambda name: name == MANIFEST):  # the manifest last
        shutil.copymode(folder / MANIFEST, folder / name)  # safetensors makes files that only their owner reads
        os.replace(folder / name, target / name)
    _remove_stale(target, {*written, *(record["file"] for record in manifest["tensors"].values())})


def from_pretrained(
    directory: str | os.PathLike[str],
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Any:
    """The saved transformers model, in evaluation mode, on `device` (CPU unless given).

    It is built on the meta device, so dense weights of converted layers never exist. `dtype` casts the contents of
    layers and all other weights; without it everything is bit by bit as saved. A model that transformers does not
    have, and a damaged file, is a `CheckpointError`.

        same = gblr.from_pretrained("small", device="cuda", dtype=torch.bfloat16)
    """
    path = Path(directory)
    manifest = _read_manifest(path)
    if manifest["transformers"] is None:
        raise CheckpointError(
            f"{path} holds a {manifest['architecture']}, which is no transformers model, and only your code can build "
            "it. Build it, dense or on the meta device, then use `gblr.load_(model, directory)`."
        )
    model = build_on_meta(path, manifest["architecture"], manifest["transformers"].get("attention"))
    _load(model, manifest, path, torch.device(device or "cpu"))
    if dtype is not None:
        kept = {name: buffer for name, buffer in model.named_buffers() if name in manifest["buffers"]}
        model.to(dtype)
        for name, buffer in kept.items():  # rotary frequencies need their precision, as transformers itself sees to
            parent, _, leaf = name.rpartition(".")
            model.get_submodule(parent)._buffers[leaf] = buffer
    return model.eval()


def load_(model: nn.Module, directory: str | os.PathLike[str]) -> nn.Module:
    """Fills `model` from a checkpoint, replacing layers where the checkpoint has others; returns it.

    The model may be dense, converted alike, or on the meta device. Everything is checked before anything is changed:
    a `CheckpointError`, which names the layers and tensors that do not fit, leaves the model as it was.

        same = gblr.load_(MyModel(), "small")  # dense, as it was before conversion
    """
    path = Path(directory)
    _load(getattr(model, "_orig_mod", model), _read_manifest(path), path, torch.device("cpu"))
    return model


def read_state(directory: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The model's state dict, on the CPU, from a checkpoint whose layers the caller has already."""
    path = Path(directory)
    manifest = _read_manifest(path)
    values = read_tensors(path, manifest["tensors"])
    return values | {name: values[stored] for name, stored in manifest["aliases"].items() if stored in values}


def _load(model: nn.Module, manifest: dict[str, Any], path: Path, device: torch.device) -> None:
    try:
        replacements = plan(model, manifest, path)
        values = read_tensors(path, manifest["tensors"] | manifest["buffers"])
        check_layers(manifest, values, path)
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path / MANIFEST} is damaged: {type(error).__name__}: {error}") from error
    fill(model, replacements, manifest, values, device)


def _lines(manifest: dict[str, Any]) -> str:
    """JSON with a line for each layer and tensor: readable, and a third of the size of one line for each number."""

    def text(value: Any, depth: int) -> str:
        if not isinstance(value, dict) or not depth or not value:
            return json.dumps(value, separators=(",", ":"))
        fields = (f"{json.dumps(key)}: {text(field, depth - 1)}" for key, field in value.items())
        return "{\n" + ",\n".join(fields) + "\n}"

    return text(manifest, 2)


def _library_version() -> str:
    try:
        return importlib.metadata.version("gblr")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"  # a bare source tree, never installed


def _layers(model: nn.Module) -> dict[str, Any]:
    """Specs of the converted layers, other names of shared ones, and the names of plain linear layers."""
    layers: dict[str, Any] = {}
    shared: dict[str, str] = {}
    linear: list[str] = []
    first: dict[nn.Module, str] = {}
    split: tuple[str, ...] = ()
    for name, module in model.named_modules(remove_duplicate=False):
        if name.startswith(split) and split:
            continue  # parts stand in the spec of the whole
        if type(module) is nn.Linear:
            linear.append(name)
        elif is_converted(module):
            split += (f"{name}.",)
            if first.setdefault(module, name) == name:
                layers[name] = layer_spec(module)
            else:
                shared[name] = first[module]
    return {"layers": layers, "shared_layers": shared, "linear_layers": linear}


def _read_manifest(path: Path) -> dict[str, Any]:
    file = path / MANIFEST
    if not path.is_dir():
        raise CheckpointError(f"there is no directory {path}: expected one that `gblr.save_pretrained` wrote.")
    if not file.is_file():
        raise CheckpointError(
            f"{path} has no {MANIFEST}: expected a directory that `gblr.save_pretrained` wrote. "
            "(transformers' own `save_pretrained` keeps the tensors, not how to build the layers.)"
        )
    try:
        manifest = json.loads(file.read_text())
        version = manifest["format_version"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file} is damaged: {error}") from error
    if version != FORMAT_VERSION:
        raise CheckpointError(f"{file} has format version {version}; this gblr reads {FORMAT_VERSION}. Update gblr.")
    expected = {"architecture", "transformers", "layers", "shared_layers", "linear_layers", "tensors", "buffers"}
    if absent := (expected | {"aliases"}) - set(manifest):
        raise CheckpointError(f"{file} is damaged: it has no {', '.join(sorted(absent))}.")
    return manifest


def _write_index(records: dict[str, Record], total_size: int, folder: Path) -> None:
    """transformers' index, where there are several files."""
    files = {name: record["file"] for name, record in records.items()}
    if len(set(files.values())) > 1:
        index = {"metadata": {"total_size": total_size}, "weight_map": files}
        (folder / INDEX).write_text(json.dumps(index, indent=1))


def _remove_stale(target: Path, written: set[str]) -> None:
    """Files of an earlier checkpoint that this one has no use for."""
    patterns = ("model.safetensors", "model-*-of-*.safetensors", INDEX, "gblr_buffers*.safetensors")
    for file in (file for pattern in patterns for file in target.glob(pattern)):
        if file.name not in written:
            file.unlink()

"""Where the tensors of a checkpoint go: first a plan that finds every misfit, then the filling."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gblr.conversion.layer_spec import build_layer, check_values, dtype_name, is_converted, layer_spec, replaces
from gblr.conversion.replace import replace_layer
from gblr.conversion.tensor_files import CheckpointError, Record, describe, raise_all
from gblr.layers.gaudi import GaudiModule
from gblr.layers.structured import MatrixModule

_ALIGNMENT = 64  # bytes


def plan(model: nn.Module, manifest: Mapping[str, Any], path: Path) -> dict[str, nn.Module]:
    """Layers, still without numbers, that are to replace those of the model; a shared one stands under several names.

    Raises `CheckpointError` unless the checkpoint fits the model; changes nothing.
    """
    replacements, problems = _replacements(model, manifest)
    raise_all(path, problems)
    raise_all(path, _misfits(model, manifest, replacements) + _left_on_meta(model, manifest))
    return replacements


def _replacements(model: nn.Module, manifest: Mapping[str, Any]) -> tuple[dict[str, nn.Module], list[str]]:
    replacements: dict[str, nn.Module] = {}
    problems: list[str] = []
    modules = dict(model.named_modules(remove_duplicate=False))
    specs = manifest["layers"] | {name: _linear_spec(name, manifest) for name in _transposed(modules, manifest)}
    for name, spec in specs.items():
        module = modules.get(name)
        if module is None:
            problems.append(f"layer {name!r}: the model has no module of this name")
        elif is_converted(module) and layer_spec(module) == spec:
            continue
        elif reason := replaces(spec, module):
            problems.append(f"layer {name!r}: {reason} in the model")
        elif name == "":
            problems.append(f"the model itself is the layer: expected {spec['class']}, found {type(module).__name__}")
        else:
            try:
                replacements[name] = build_layer(spec).train(module.training)
            except (ValueError, RuntimeError) as error:
                problems.append(f"layer {name!r}: {error}")
    for name, first in manifest["shared_layers"].items():
        if name not in modules:
            problems.append(f"layer {name!r}: the model has no module of this name")
        elif first in replacements:
            replacements[name] = replacements[first]
    return replacements, problems


def _transposed(modules: Mapping[str, nn.Module], manifest: Mapping[str, Any]) -> list[str]:
    """Layers saved as nn.Linear where the model has another kind: transformers' Conv1D keeps its weight transposed."""
    found = (name for name in manifest["linear_layers"] if name in modules)
    return [name for name in found if is_converted(modules[name]) or hasattr(modules[name], "nf")]


def _linear_spec(name: str, manifest: Mapping[str, Any]) -> dict[str, Any]:
    weight, bias = (_record(f"{name}.{leaf}", manifest) for leaf in ("weight", "bias"))
    if weight is None:
        raise CheckpointError(f"layer {name!r} has no weight in gblr.json.")
    out_features, in_features = weight["shape"]
    sizes = {"out_features": out_features, "in_features": in_features}
    return {"class": "Linear", **sizes, "bias": bias and bias["dtype"], "dtype": weight["dtype"]}


def _record(name: str, manifest: Mapping[str, Any]) -> Record | None:
    return manifest["tensors"].get(manifest["aliases"].get(name, name))


def _misfits(model: nn.Module, manifest: Mapping[str, Any], replacements: Mapping[str, nn.Module]) -> list[str]:
    expected = _expected(model, replacements)
    names = set(manifest["tensors"]) | {a for a, name in manifest["aliases"].items() if name in manifest["tensors"]}
    problems = [f"tensor {name!r} of the model is not in the checkpoint" for name in expected if name not in names]
    problems += [f"tensor {name!r} of the checkpoint is not in the model" for name in sorted(names - set(expected))]
    for name, tensor in expected.items():
        record = _record(name, manifest)
        if record is None:
            continue
        # tensors on the meta device take the dtype of the checkpoint
        own = record["dtype"] if tensor.is_meta else dtype_name(tensor.dtype)
        wanted, found = describe(tensor.shape, own), describe(record["shape"], record["dtype"])
        if wanted != found:
            hint = f"; cast the model with .to(torch.{record['dtype']}) first" if own != record["dtype"] else ""
            problems.append(f"tensor {name!r}: expected {wanted}, found {found} in the checkpoint{hint}")
    return problems


def _expected(model: nn.Module, replacements: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """The state dict that the model will have."""
    gone = tuple(f"{name}." for name in replacements)
    state = {n: t for n, t in model.state_dict(keep_vars=True).items() if not (gone and n.startswith(gone))}
    for name, layer in replacements.items():
        state |= {f"{name}.{leaf}": tensor for leaf, tensor in layer.state_dict(keep_vars=True).items()}
    return state


def _left_on_meta(model: nn.Module, manifest: Mapping[str, Any]) -> list[str]:
    """Buffers without values that the checkpoint has none for either; tables of Gaudi layers are made from sigma."""
    known = {*model.state_dict(), *_buffer_names(manifest)}
    return [
        f"buffer {name!r} is on the meta device and not in the checkpoint: build the model off the meta device"
        for path, module in model.named_modules()
        if not isinstance(module, GaudiModule)
        for name, buffer in module.named_buffers(prefix=path, recurse=False)
        if buffer.is_meta and name not in known
    ]


def _buffer_names(manifest: Mapping[str, Any]) -> set[str]:
    stored = manifest["buffers"]
    return {*stored, *(alias for alias, name in manifest["aliases"].items() if name in stored)}


def check_layers(manifest: Mapping[str, Any], values: Mapping[str, Tensor], path: Path) -> None:
    """Raises `CheckpointError` where the numbers of a converted layer make no matrix."""
    problems = []
    for name, layer in filled_layers(manifest, values):
        try:
            check_values(layer)
        except ValueError as error:
            problems.append(f"layer {name!r}: {error}")
    raise_all(path, problems)


def filled_layers(manifest: Mapping[str, Any], values: Mapping[str, Tensor]) -> Iterator[tuple[str, nn.Module]]:
    """The converted layers of a checkpoint, one after the other, without the model around them."""
    for name, spec in manifest["layers"].items():
        layer = build_layer(spec)
        _put_all(layer, name, manifest, values, torch.device("cpu"), {})
        yield name, layer


def filled_layer(name: str, spec: Mapping[str, Any], values: Mapping[str, Tensor], device: torch.device) -> nn.Module:
    """One layer, ready to run; `values` has its tensors by the names that they have in the model."""
    layer = build_layer(dict(spec))
    _put_all(layer, name, {"aliases": {}}, values, device, {})
    _make_ready(layer, device)
    return layer


def fill(
    model: nn.Module,
    replacements: Mapping[str, nn.Module],
    manifest: Mapping[str, Any],
    values: Mapping[str, Tensor],
    device: torch.device,
) -> None:
    """Completes the new layers first, each on the device of the one it replaces, and only then touches the model."""
    made: dict[str, nn.Parameter] = {}
    for name, layer in replacements.items():
        home = _device_of(model.get_submodule(name), device)
        _put_all(layer, name, manifest, values, home, made)
        _build_tables(layer, home)
    for name, layer in replacements.items():
        replace_layer(model, name, layer)
    _put_all(model, "", manifest, values, device, made)
    _put_unsaved(model, manifest, values, device)
    _make_ready(model, device)


def _make_ready(root: nn.Module, device: torch.device) -> None:
    """What layers keep beside their numbers."""
    _build_tables(root, device)
    for module in root.modules():
        if isinstance(module, MatrixModule):
            module.prepare()


def _put_all(
    root: nn.Module,
    prefix: str,
    manifest: Mapping[str, Any],
    values: Mapping[str, Tensor],
    device: torch.device,
    made: dict[str, nn.Parameter],
) -> None:
    for name in root.state_dict():
        full = f"{prefix}.{name}" if prefix else name
        stored = manifest["aliases"].get(full, full)
        _put(root, name, stored, values[stored], device, made)


def _put_unsaved(
    model: nn.Module, manifest: Mapping[str, Any], values: Mapping[str, Tensor], device: torch.device
) -> None:
    """Buffers outside the state dict; those of equal content were stored once, but share no memory."""
    names = {name for name, _ in model.named_buffers(remove_duplicate=False)} & _buffer_names(manifest)
    for name in sorted(names):
        stored = manifest["aliases"].get(name, name)
        _put(model, name, stored, values[stored].clone(), device, {})


def _device_of(module: nn.Module, default: torch.device) -> torch.device:
    tensor = next((t for t in (*module.parameters(), *module.buffers()) if not t.is_meta), None)
    return default if tensor is None else tensor.device


def _put(
    root: nn.Module, name: str, stored: str, value: Tensor, device: torch.device, made: dict[str, nn.Parameter]
) -> None:
    """In place where there is memory already; else as a new tensor, one for all names of the stored one."""
    parent, _, leaf = name.rpartition(".")
    module = root.get_submodule(parent)
    parameter, buffer = module._parameters.get(leaf), module._buffers.get(leaf)
    current = buffer if parameter is None else parameter
    if current is not None and not current.is_meta:
        if current.shape == value.shape and current.dtype == value.dtype:  # differs for unsaved buffers alone
            with torch.no_grad():
                current.copy_(value)
        if parameter is not None:
            made.setdefault(stored, parameter)
    elif parameter is not None:
        trainable = parameter.requires_grad and value.is_floating_point()
        if stored not in made:
            made[stored] = nn.Parameter(_aligned(value.to(device)), requires_grad=trainable)
        module._parameters[leaf] = made[stored]
    else:
        module._buffers[leaf] = _aligned(value.to(device))


def _aligned(tensor: Tensor) -> Tensor:
    """Where torch would have begun it: within a mapped file it may lie anywhere, and products differ in last bits."""
    return tensor.clone() if tensor.data_ptr() % _ALIGNMENT else tensor


def _build_tables(root: nn.Module, device: torch.device) -> None:
    for module in root.modules():
        if not isinstance(module, GaudiModule):
            continue
        sigma = float(module.sigma)
        if module._row_table.is_meta:
            module._row_table, module._col_table = module._tables(sigma, device)
        else:
            module.set_sigma(sigma)

"""Layers as JSON: what is needed to build a converted layer again without its numbers, on the meta device."""

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from gblr.layers.conv import ConvGeometry, GaudiConv2d, StructuredConv2d
from gblr.layers.gaudi import GaudiLinear, GaudiModule
from gblr.layers.split import SplitLinear
from gblr.layers.structured import MatrixModule, StructuredLinear
from gblr.matrices.blast import BlastMatrix
from gblr.matrices.gblr import GBLRMatrix
from gblr.matrices.low_rank import LowRankMatrix
from gblr.matrices.monarch import MonarchMatrix
from gblr.matrices.packed import PackedGBLR
from gblr.matrices.pixelfly import PixelflyMatrix
from gblr.matrices.structure import Structure

Spec = dict[str, Any]

_FORMATS: dict[str, Any] = {
    cls.__name__: cls
    for cls in (BlastMatrix, GBLRMatrix, LowRankMatrix, MonarchMatrix, PackedGBLR, PixelflyMatrix, Structure)
}
_GAUDI: dict[str, type[GaudiModule]] = {"GaudiLinear": GaudiLinear, "GaudiConv2d": GaudiConv2d}
_IN_RUNS = "InterleavedLinear"
_GAUDI_OPTIONS = ("block_rank", "align", "rounding", "num_blocks")


def is_converted(module: nn.Module) -> bool:
    return isinstance(module, (GaudiModule, MatrixModule, SplitLinear))


def layer_spec(module: Any) -> Spec:
    """What `build_layer` makes the same layer of, without values. Plain JSON types."""
    name = type(module).__name__
    if isinstance(module, SplitLinear):
        parts = [layer_spec(part) for part in module.parts]
        # by another name, which a gblr that knows no runs refuses: it would take the rows for others
        return {"class": name, "parts": parts} | ({"class": _IN_RUNS, "runs": module.runs} if module.runs > 1 else {})
    spec: Spec = {"class": name, "out_features": module.out_features, "in_features": module.in_features}
    spec["bias"] = None if module.bias is None else dtype_name(module.bias.dtype)
    if type(module) is nn.Linear:
        return spec | {"dtype": dtype_name(module.weight.dtype)}
    if isinstance(module, (GaudiConv2d, StructuredConv2d)):
        spec["geometry"] = _plain(dataclasses.asdict(module.geometry))
    if name in _GAUDI:
        return spec | {key: getattr(module, key) for key in _GAUDI_OPTIONS} | {"dtype": dtype_name(module.u.dtype)}
    if type(module) in (StructuredLinear, StructuredConv2d):
        planned = {"form": module.planned} if module.planned else {}
        return spec | {"matrix": _matrix_spec(module.matrix)} | planned
    raise ValueError(
        f"a layer of class {name} cannot be saved: known are {', '.join(_GAUDI)}, StructuredLinear, StructuredConv2d, "
        "SplitLinear, and nn.Linear as a part of the last. Use `densify_` first."
    )


def build_layer(spec: Spec) -> nn.Module:
    """The layer of a spec on the meta device."""
    name = spec["class"]
    if name in ("SplitLinear", _IN_RUNS):
        return SplitLinear([build_layer(part) for part in spec["parts"]], spec.get("runs", 1))
    out_features, in_features, bias = spec["out_features"], spec["in_features"], spec["bias"]
    if name == "Linear":
        return nn.Linear(in_features, out_features, bias is not None, "meta", dtype_of(spec["dtype"]))
    if name in _GAUDI:
        return _build_gaudi(spec)
    matrix = _build_matrix(spec["matrix"])
    if matrix.shape != (out_features, in_features):
        raise ValueError(f"the matrix must be {out_features} x {in_features}; got {matrix.shape}.")
    vector = None if bias is None else torch.empty(out_features, dtype=dtype_of(bias), device="meta")
    if name == "StructuredLinear":
        layer: MatrixModule = StructuredLinear(matrix, vector)
    elif name == "StructuredConv2d":
        layer = StructuredConv2d(matrix, _geometry(spec), vector)
    else:
        raise ValueError(f"unknown layer class {name!r}. A newer version of gblr may know it.")
    layer.planned = spec.get("form")
    return layer


def spec_shape(spec: Spec) -> tuple[int, int]:
    """(out_features, in_features) of the layer."""
    if "parts" in spec:
        shapes = [spec_shape(part) for part in spec["parts"]]
        return sum(rows for rows, _ in shapes), shapes[0][1]
    return spec["out_features"], spec["in_features"]


def replaces(spec: Spec, module: Any) -> str | None:
    """Why the layer of `spec` cannot stand where `module` is; None when it can."""
    if is_converted(module):
        shape = spec_shape(layer_spec(module))
        geometry = getattr(module, "geometry", None)
    elif isinstance(module, nn.Linear):
        shape, geometry = (module.out_features, module.in_features), None
    elif isinstance(module, nn.Conv2d):
        if module.groups != 1:
            return f"expected a convolution with one group, found {module.groups} groups"
        shape, geometry = (module.out_channels, module.weight[0].numel()), ConvGeometry.of(module)
    elif hasattr(module, "nf") and hasattr(module, "nx"):  # transformers' Conv1D
        shape, geometry = (module.nf, module.nx), None
    else:
        return f"expected a linear or convolution layer, found {type(module).__name__}"
    if shape != spec_shape(spec):
        return f"expected a layer of shape {spec_shape(spec)}, found {tuple(shape)}"
    expected = _geometry(spec) if "geometry" in spec else None
    return None if geometry == expected else f"expected a convolution with {expected}, found {geometry}"


def check_values(module: nn.Module) -> None:
    """Raises ValueError where the numbers of a filled layer make no matrix: widths beyond the axis, places outside."""
    if isinstance(module, SplitLinear):
        for part in module.parts:
            check_values(part)
    elif isinstance(module, GaudiModule):
        if not float(module.sigma) > 0:
            raise ValueError(f"sigma must be above 0; got {float(module.sigma)}.")
        if not all(bool(p.isfinite().all()) for p in module.structure_parameters()):
            raise ValueError("widths and locations must be finite.")
    elif isinstance(module, MatrixModule):
        matrix = module.matrix.map_tensors(lambda t: t)  # runs the checks of the format on the values
        if isinstance(matrix, (GBLRMatrix, PackedGBLR)):
            widths = (matrix.structure.row_width, matrix.structure.col_width)
            _check_range(("row_width", "col_width"), widths, [n + 1 for n in matrix.shape])
        if isinstance(matrix, PixelflyMatrix):
            _check_range(("block_row", "block_col"), (matrix.block_row, matrix.block_col), matrix.grid)


def _check_range(names: Any, tensors: Any, ends: Any) -> None:
    for name, tensor, end in zip(names, tensors, ends, strict=True):
        if tensor.numel() and not (0 <= int(tensor.min()) and int(tensor.max()) < end):
            raise ValueError(f"{name} must lie in 0 .. {end - 1}; got {int(tensor.min())} .. {int(tensor.max())}.")


def _build_gaudi(spec: Spec) -> GaudiModule:
    options = {key: spec[key] for key in _GAUDI_OPTIONS} | {"dtype": dtype_of(spec["dtype"]), "device": "meta"}
    bias = spec["bias"] is not None
    if spec["class"] == "GaudiLinear":
        layer: GaudiModule = GaudiLinear(spec["in_features"], spec["out_features"], bias, **options)
    else:
        geometry = _geometry(spec)
        fields = dataclasses.asdict(geometry) | {"out_channels": spec["out_features"], "bias": bias}
        layer = GaudiConv2d(**fields, **options)
    if layer.bias is not None:
        layer.bias = nn.Parameter(layer.bias.to(dtype_of(spec["bias"])))
    return layer


def _geometry(spec: Spec) -> ConvGeometry:
    fields: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in spec["geometry"].items()}
    return ConvGeometry(**fields)


def _matrix_spec(matrix: Any) -> Spec:
    if type(matrix) is not _FORMATS.get(type(matrix).__name__):
        raise ValueError(f"a matrix of class {type(matrix).__name__} cannot be saved: known are {', '.join(_FORMATS)}.")
    spec: Spec = {"format": type(matrix).__name__}
    for field in dataclasses.fields(matrix):
        value = getattr(matrix, field.name)
        if isinstance(value, Tensor):
            value = {"shape": list(value.shape), "dtype": dtype_name(value.dtype)}
        spec[field.name] = _matrix_spec(value) if dataclasses.is_dataclass(value) else _plain(value)
    return spec


def _build_matrix(spec: Spec) -> Any:
    cls = _FORMATS.get(spec["format"])
    if cls is None:
        raise ValueError(f"unknown matrix format {spec['format']!r}. A newer version of gblr may know it.")
    fields: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        value = spec[field.name]
        if isinstance(value, dict) and "format" in value:
            value = _build_matrix(value)
        elif isinstance(value, dict):
            value = torch.empty(value["shape"], dtype=dtype_of(value["dtype"]), device="meta")
        fields[field.name] = tuple(value) if isinstance(value, list) else value
    return cls(**fields)


def _plain(value: Any) -> Any:
    """Tuples as lists, as JSON gives them back."""
    if isinstance(value, dict):
        return {key: _plain(v) for key, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, (list, tuple)) else value


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"unknown dtype {name!r}.")
    return dtype

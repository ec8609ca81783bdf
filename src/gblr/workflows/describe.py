"""What a report shows of a finished model: its layers, their blocks and singular values, and where it was made."""

import base64
import platform
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gblr.conversion.cost import Cost
from gblr.conversion.sources import read_source
from gblr.layers.structured import MatrixModule
from gblr.matrices.gblr import GBLRMatrix
from gblr.matrices.packed import PackedGBLR
from gblr.ops.native import cpu_kernels
from gblr.progress import progress

_SAMPLES = 128  # of a spectrum
_MOST_NUMBERS = 1 << 24  # of a weight whose singular values are computed; a larger one takes minutes


def describe_layers(model: nn.Module, dense: nn.Module, spent: Cost, variant: dict[str, Any]) -> list[dict[str, Any]]:
    """One entry per converted matrix."""
    errors, forms = variant.get("errors", {}), variant.get("forms", {})
    rows = []
    converted = spent.converted
    with progress("singular values", len(converted)) as tick:
        for layer in converted:
            module = model.get_submodule(layer.name)
            assert isinstance(module, MatrixModule)
            row = {
                "name": layer.name, "type": layer.type, "shape": [module.out_features, module.in_features],
                "dense_mults": layer.dense_mults, "num_mults": layer.num_mults,
                "relative_cost": round(layer.relative_cost, 5), "error": errors.get(layer.name),
            }  # fmt: skip
            row |= describe_blocks(module)
            row |= {"form": module.form, "form_seconds": forms.get(layer.name, {}).get("seconds", {})}
            row |= spectra(module, dense_weight(dense, layer.name))
            rows.append(row)
            tick()
    return rows


def describe_blocks(module: MatrixModule) -> dict[str, Any]:
    """Number of blocks, and their intervals as uint16: row start, row width, column start, column width."""
    matrix = module.matrix
    if not isinstance(matrix, (GBLRMatrix, PackedGBLR)):
        return {"num_blocks": 0, "live_blocks": 0, "block_rank": 0}
    s, (rows, cols) = matrix.structure, matrix.shape
    sides = (s.row_location % rows, s.row_width, s.col_location % cols, s.col_width)
    live = torch.stack([side.long() for side in sides], 1)[s.live]
    numbers = {"num_blocks": s.num_blocks, "live_blocks": len(live), "block_rank": matrix.block_rank}
    if max(rows, cols) > 0xFFFF:
        return numbers
    return numbers | {"blocks": base64.b64encode(live.cpu().numpy().astype("<u2").tobytes()).decode()}


@torch.no_grad()
def spectra(module: MatrixModule, dense: Tensor | None) -> dict[str, Any]:
    weight = module.weight.float().cpu()
    if weight.numel() > _MOST_NUMBERS:
        return {}
    values = torch.linalg.svdvals(weight)
    tolerance = values[0] * max(weight.shape) * torch.finfo(torch.float32).eps if len(values) else 0
    found = {"rank": int((values > tolerance).sum()), "singular": sampled(values)}
    if dense is not None and dense.shape == weight.shape:
        found["singular_dense"] = sampled(torch.linalg.svdvals(dense.float().cpu()))
    return found


def sampled(values: Tensor) -> list[float]:
    """At most so many of them, evenly, first and last included."""
    if not len(values):
        return []
    index = np.unique(np.linspace(0, len(values) - 1, _SAMPLES).round().astype(int))
    return [float(f"{values[i]:.4g}") for i in index]


def dense_weight(dense: nn.Module, name: str) -> Tensor | None:
    """The matrix that a converted one came from: out x in, parts of fused layers too."""
    owner, _, part = name.partition(".parts.")
    try:
        module = dense.get_submodule(owner)
    except AttributeError:
        return None
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor):
        return None
    weights = [weight for weight, _ in read_source(dense, owner, module, split_fused=bool(part)).parts()]
    return weights[int(part or 0)] if len(weights) > int(part or 0) else None


def describe_types(spent: Cost) -> list[dict[str, Any]]:
    """The paper's Table 3: cheapest, mean and dearest layer of each type, of its dense cost."""
    groups: dict[str, list[float]] = {}
    for layer in spent.converted:
        groups.setdefault(layer.type, []).append(layer.relative_cost)
    totals = replace(spent, layers=spent.converted).by_type()
    return [
        {
            "type": name, "layers": len(costs), "min": round(min(costs), 5), "max": round(max(costs), 5),
            "mean": round(sum(costs) / len(costs), 5), "relative_cost": round(totals[name].relative_cost, 5),
        }
        for name, costs in groups.items()
    ]  # fmt: skip


def environment(device: torch.device) -> dict[str, Any]:
    try:
        version = metadata.version("gblr")
    except metadata.PackageNotFoundError:
        version = "source tree"
    on_gpu = device.type == "cuda"
    return {
        "gblr": version, "torch": torch.__version__, "python": sys.version.split()[0],
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu": cpu_name(), "device": torch.cuda.get_device_name(device) if on_gpu else "CPU",
        "kernels": cpu_kernels(), "threads": torch.get_num_threads(),
    }  # fmt: skip


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())

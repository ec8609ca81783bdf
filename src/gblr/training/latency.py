"""Seconds as a budget: the time of each layer as a function of its widths, measured on the device it is meant for."""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gblr.conversion.measure import undisturbed
from gblr.conversion.timing import interleaved_medians, wait
from gblr.layers.gaudi import GaudiModule
from gblr.layers.structured import StructuredLinear
from gblr.matrices.packed import PackedGBLR
from gblr.matrices.structure import Structure
from gblr.ops.host import on_host
from gblr.progress import progress

# (row, column) widths as fractions of the axis: enough to tell the two slopes and the offset apart
_GRID = ((0.02, 0.02), (0.1, 0.5), (0.5, 0.1), (0.3, 0.3), (0.6, 1.0), (1.0, 0.6), (1.0, 1.0))
_REPEATS = 7


@dataclass(frozen=True)
class LayerTime:
    """base + per_row * (sum of row widths) + per_col * (sum of column widths), in seconds per call of the layer."""

    base: float
    per_row: float
    per_col: float


def fit_layer_times(
    layers: Sequence[GaudiModule], positions: Sequence[int], device: torch.device
) -> tuple[LayerTime, ...]:
    """Layers of the same shape that see equally many positions are measured once."""
    kinds = [
        (layer.out_features, layer.in_features, layer.num_blocks, layer.block_rank, layer.u.dtype, count)
        for layer, count in zip(layers, positions, strict=True)
    ]
    known: dict[Any, LayerTime] = {}
    with progress("timing layers", len(set(kinds))) as tick:
        for kind in kinds:
            if kind not in known:
                known[kind] = _fit(*kind, device)
                tick()
    return tuple(known[kind] for kind in kinds)


@on_host()
def _fit(
    out_features: int, in_features: int, num_blocks: int, block_rank: int, dtype: torch.dtype, positions: int,
    device: torch.device,
) -> LayerTime:  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(positions, in_features, generator=generator).to(device, dtype)
    layers = []
    for row, col in _GRID:
        sides = []
        for fraction, n in ((row, out_features), (col, in_features)):
            size = max(1, round(fraction * n))
            sides += [torch.full((num_blocks,), size), torch.randint(n, (num_blocks,), generator=generator)]
        structure = Structure(*(side.to(device) for side in sides))
        contents = [torch.randn(num_blocks * block_rank * int(sides[i][0]), generator=generator) for i in (0, 2)]
        u, v = (content.to(device, dtype) for content in contents)
        layer = StructuredLinear(PackedGBLR(structure, u, v, block_rank, (out_features, in_features)))
        layer.planned = "packed"  # where it can run: the form whose time falls with the widths
        layer.prepare()
        layers.append(layer)
    seconds = interleaved_medians([lambda layer=layer: layer(x) for layer in layers], device)  # type: ignore[misc]
    sums = [
        [1.0, float(layer.structure_row_width.sum()), float(layer.structure_col_width.sum())]  # type: ignore[operator]
        for layer in layers
    ]
    features = torch.tensor(sums, dtype=torch.float64)
    return LayerTime(*nonnegative_fit(features, torch.tensor(seconds, dtype=torch.float64)))


def nonnegative_fit(features: Tensor, values: Tensor) -> list[float]:
    """Least squares with coefficients of 0 or above: columns whose coefficient is negative are left out in turn."""
    scale = features.amax(0)
    active = list(range(features.shape[1]))
    result = [0.0] * features.shape[1]
    while active:
        found = torch.linalg.lstsq(features[:, active] / scale[active], values[:, None]).solution[:, 0]
        if bool((found >= 0).all()):
            for i, coefficient in zip(active, found.tolist(), strict=True):
                result[i] = coefficient / float(scale[i])
            break
        active.pop(int(found.argmin()))
    return result


def seconds_outside(
    model: nn.Module,
    layers: Sequence[GaudiModule],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    device: torch.device,
) -> float:
    """Time of one call of the model without that of its Gaudi layers, where the model is now."""
    if next(model.parameters()).device.type != device.type:
        raise ValueError(f"a budget in seconds for the whole model on {device} needs the model there; move it first.")
    inside = [0.0]

    def enter(*_: Any) -> None:
        wait(device)
        inside[0] -= time.perf_counter()

    def leave(*_: Any) -> None:
        wait(device)
        inside[0] += time.perf_counter()

    handles = [h for m in layers for h in (m.register_forward_pre_hook(enter), m.register_forward_hook(leave))]
    outside = []
    try:
        with undisturbed(model):
            for _ in range(_REPEATS + 1):
                inside[0] = 0.0
                wait(device)
                begin = time.perf_counter()
                model(*args, **kwargs)
                wait(device)
                outside.append(time.perf_counter() - begin - inside[0])
    finally:
        for handle in handles:
            handle.remove()
    return statistics.median(outside[1:])  # the first call warms up

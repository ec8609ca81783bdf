"""How each method of a comparison replaces layers: the same layers, the same cost, each with a proper start."""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gblr.conversion.calibration import Calibration
from gblr.conversion.choosing import choose
from gblr.conversion.convert import convert_, convert_measured_
from gblr.conversion.cost import Cost, cost
from gblr.conversion.filters import Filter
from gblr.conversion.sources import Source
from gblr.experiments.composed import compose_
from gblr.experiments.run import StructuredRun
from gblr.fitting.config import BlastConfig, Config, GaudiConfig, LowRankConfig, MonarchConfig, PixelflyConfig
from gblr.fitting.plan import divisors
from gblr.layers.structured import MatrixModule
from gblr.matrices.base import StructuredMatrix
from gblr.matrices.blast import BlastMatrix
from gblr.matrices.low_rank import LowRankMatrix
from gblr.matrices.monarch import MonarchMatrix
from gblr.matrices.pixelfly import PixelflyMatrix

Shape = tuple[int, int]
_BASELINES: dict[str, type[Config]] = {"low rank": LowRankConfig, "pixelfly": PixelflyConfig, "blast": BlastConfig}
# The weight is a sum of products of these; the exponents share a factor of the weight out among them.
_FACTORS: dict[type[StructuredMatrix], dict[str, float]] = {
    LowRankMatrix: {"u": 0.5, "v": 0.5},
    MonarchMatrix: {"left": 0.5, "right": 0.5},
    PixelflyMatrix: {"blocks": 1.0, "u": 0.5, "v": 0.5},
    BlastMatrix: {"u": 0.5, "v": 0.5},
}


@dataclass(frozen=True)
class Structured:
    """What converted layers may cost, and what was measured of their outputs, by layer."""

    target: float
    sensitivity: Mapping[str, Tensor] = field(default_factory=dict)


def structure_(
    model: nn.Module, run: StructuredRun, where: Filter, example: Tensor, calibration: Calibration | None = None
) -> Structured:
    """Converts the layers that `where` chooses as `run` says; dense stays as it is.

    `example` is one input, by which positions are counted; `calibration` was measured on this model. Without trained
    weights (`run.source` is empty) baselines are fitted to the random weights that the dense layers start with, and
    scaled to the same variance.
    """
    if run.method == "dense":
        return Structured(1.0)
    spent = cost(model, example)
    target = layers_cost(run, spent.dense_mults, converted_mults(model, where, spent))
    deviations = standard_deviations(model)
    if run.method == "monarch":
        sensitivity = _convert_to_monarch_(model, where, spent, target, calibration, run.sensitivity)
    else:
        config = gaudi_config(run, target) if run.method == "gaudi" else _baseline_config(run, target)
        sensitivity = convert_(model, config, where, calibration, sensitivity=run.sensitivity).sensitivity
    if not run.source and run.method != "gaudi":
        restore_variances_(model, deviations)
    compose_(model)
    return Structured(target, sensitivity)


def _baseline_config(run: StructuredRun, target: float) -> Config:
    return _BASELINES[run.method](target, allocation=run.allocation)


def _convert_to_monarch_(
    model: nn.Module,
    where: Filter,
    spent: Cost,
    target: float,
    calibration: Calibration | None,
    sensitivity: bool,
) -> Mapping[str, Tensor]:
    """Shape by shape."""
    sources, _ = choose(model, where, split_fused=True, config=MonarchConfig(target))
    mults = {layer.name: layer.dense_mults for layer in spent.layers}
    shapes: dict[Shape, list[Source]] = {}
    for source in sources:  # parts of a fused projection are matrices of their own
        shapes.setdefault((source.part_sizes[0], source.weight.shape[1]), []).append(source)
    of_shapes = {shape: float(sum(mults[source.name] for source in found)) for shape, found in shapes.items()}
    measured = Calibration() if calibration is None else calibration.of(sources, sensitivity)
    for shape, share in monarch_costs(of_shapes, target).items():
        convert_measured_(model, MonarchConfig(share), shapes[shape], measured)
    return measured.sensitivity


def gaudi_config(run: StructuredRun, target: float) -> GaudiConfig:
    """Starts at `run.start_cost`, or at the target where that is None."""
    start = target if run.start_cost is None else min(1.0, run.start_cost)
    return GaudiConfig(start, run.allocation, block_rank=run.block_rank, init=run.init, max_growth=run.max_growth)


def converted_mults(model: nn.Module, where: Filter, spent: Cost) -> float:
    """Dense multiplications a sample of the layers to convert."""
    modules = dict(model.named_modules())
    mults = float(sum(layer.dense_mults for layer in spent.layers if where(modules[layer.name], layer.name)))
    if not mults:
        raise ValueError("the run converts no layer of this model.")
    return mults


def layers_cost(run: StructuredRun, whole: float, converted: float) -> float:
    """The cost that is asked of the converted layers; with scope "model", what the dense rest leaves over for them."""
    if run.scope == "layers":
        return run.relative_cost
    target = (run.relative_cost * whole - (whole - converted)) / converted
    if target <= 0:
        raise ValueError(f"the layers that stay dense cost more than {run.relative_cost} of the model.")
    return target


def monarch_costs(mults: dict[Shape, float], target: float) -> dict[Shape, float]:
    """A cost for each shape of weight, such that Monarch matrices come as near to `target` in all as they can.

    Monarch has coarse steps, (1 + min / max) / num_blocks of dense: with one bound for all layers it would stay up to
    a third below the others. Of all choices within the target the dearest, and of those the most even, is taken.
    """
    total, shapes = sum(mults.values()), list(mults)

    def judged(choice: tuple[float, ...]) -> tuple[float, float]:
        spent = sum(c * mults[shape] for c, shape in zip(choice, shapes, strict=True)) / total
        uneven = sum(abs(math.log(c / target)) for c in choice)
        return (round(spent, 9), -uneven) if spent <= target * (1 + 1e-9) else (-1.0, -spent)

    best = max(itertools.product(*(_monarch_steps(shape, target) for shape in shapes)), key=judged)
    if judged(best)[0] < 0:
        raise ValueError(f"no Monarch matrices of these shapes cost {target:g} or less.")
    return dict(zip(shapes, best, strict=True))


def _monarch_steps(shape: Shape, target: float) -> list[float]:
    """Relative costs of the Monarch matrices of that shape, a factor of two around the target, the cheapest always."""
    steps = [min(shape) * sum(shape) / n / (shape[0] * shape[1]) for n in divisors(math.gcd(*shape))]
    near = [step for step in steps if target / 2 <= step <= min(1.0, 2 * target)]
    return near or [min(steps)]


def standard_deviations(model: nn.Module) -> dict[str, float]:
    """Of the weights of all layers that have one, by their names."""
    weights = {name: getattr(module, "weight", None) for name, module in model.named_modules()}
    return {name: float(w.detach().std()) for name, w in weights.items() if isinstance(w, Tensor) and w.dim() > 1}


def restore_variances_(model: nn.Module, deviations: dict[str, float]) -> None:
    """Of every layer of a baseline in the model, to those that dense layers of these names had."""
    for name, module in model.named_modules():
        if isinstance(module, MatrixModule) and type(module.matrix) in _FACTORS:
            restore_variance_(module, deviations[name.partition(".parts.")[0]])


@torch.no_grad()
def restore_variance_(layer: Any, deviation: float) -> None:
    """Truncation takes variance away; factors are scaled so that outputs start with that of the dense layer."""
    lost = deviation / float(layer.weight.std())
    for name, share in _FACTORS[type(layer.matrix)].items():
        getattr(layer, name).mul_(lost**share)

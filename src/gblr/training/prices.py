"""What an element of a block costs in the unit of a budget: multiplications, parameters or seconds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from gblr.conversion.cost import is_converted, is_counted
from gblr.conversion.measure import measure
from gblr.layers.gaudi import GaudiModule
from gblr.training.budget import Budget
from gblr.training.latency import LayerTime, fit_layer_times, seconds_outside
from gblr.training.widths import Price, Widths


@dataclass(frozen=True)
class Rest:
    """What does not follow the widths. Positions and multiplications are per sample, seconds per call."""

    positions: tuple[float, ...] | None = None  # of each Gaudi layer; None: not known before the first step
    mults: float = 0.0
    dense_mults: float = 0.0  # the same, were its layers of fixed structure dense
    params: int = 0
    bias_params: int = 0  # of the Gaudi layers
    seconds: float = 0.0
    layer_times: tuple[LayerTime, ...] = ()


@dataclass(frozen=True)
class Prices:
    """`budget`: cost in its unit, at most `target`. `weight`: of each width in the proximal step, 1 on average."""

    budget: Price
    target: float
    weight: Tensor
    unit: str

    def to(self, device: torch.device) -> "Prices":
        price = replace(self.budget, per_element=self.budget.per_element.to(device))
        return replace(self, budget=price, weight=self.weight.to(device))


def count_rest(model: nn.Module, named: Mapping[str, GaudiModule], budget: Budget, example_inputs: Any) -> Rest:
    """Parameters always; positions, multiplications and seconds by running the model on `example_inputs`."""
    inside = {id(p) for layer in named.values() for p in (*layer.structure_parameters(), *layer.content_parameters())}
    biases = {id(layer.bias): layer.bias.numel() for layer in named.values() if layer.bias is not None}
    params = sum(p.numel() for p in model.parameters() if id(p) not in inside and id(p) not in biases)
    if example_inputs is None:
        if budget.needs_inputs:
            unit = "seconds" if budget.seconds is not None else "multiplications of the whole model"
            raise ValueError(f"a budget in {unit} is counted on real inputs; pass `example_inputs`.")
        return Rest(params=params, bias_params=sum(biases.values()))
    args, kwargs = ((), example_inputs) if isinstance(example_inputs, Mapping) else (_tuple(example_inputs), {})
    layers = {name: module for name, module in model.named_modules() if is_counted(module)}
    run = measure(model, layers, args, kwargs)
    unseen = [name for name in named if not run.positions.get(name)]
    if unseen:
        raise ValueError(f"`example_inputs` do not reach {len(unseen)} Gaudi layers, {unseen[0]!r} first.")
    others = {name: module for name, module in layers.items() if name not in named}
    others_now = sum(run.positions[name] * _product(module) for name, module in others.items())
    others_dense = sum(run.positions[name] * _dense_product(module) for name, module in others.items())
    unowned = run.attention_mults + run.other_mults
    times: tuple[LayerTime, ...] = ()
    seconds = 0.0
    if budget.seconds is not None:
        device = torch.device(budget.device or next(iter(named.values())).u.device)
        times = fit_layer_times(list(named.values()), [run.positions[name] for name in named], device)
        if budget.scope == "model":
            seconds = seconds_outside(model, list(named.values()), args, kwargs, device)
    return Rest(
        positions=tuple(run.positions[name] / run.batch_size for name in named),
        mults=(others_now + unowned) / run.batch_size,
        dense_mults=(others_dense + unowned) / run.batch_size,
        params=params,
        bias_params=sum(biases.values()),
        seconds=seconds,
        layer_times=times,
    )


def unit_prices(budget: Budget, widths: Widths, positions: Sequence[float], rest: Rest) -> Prices:
    """Raises ValueError where not even a model without any block would meet the budget."""
    whole = budget.scope == "model"
    if budget.relative_cost is not None:
        price = mults_price(widths, positions, base=rest.mults if whole else 0.0)
        dense = sum(
            p * layer.out_features * layer.in_features for p, layer in zip(positions, widths.layers, strict=True)
        )
        dense += rest.dense_mults if whole else 0.0
        target, unit = budget.relative_cost * dense, "multiplications per sample"
    elif budget.num_params is not None:
        base: float = rest.bias_params + (rest.params if whole else 0)
        price = Price(widths.per_layer([(n.block_rank,) * 2 for n in widths.layers], torch.float64), base)
        target, unit = float(budget.num_params), "parameters"
    else:
        assert budget.seconds is not None
        slopes = [(time.per_row, time.per_col) for time in rest.layer_times]
        base = sum(time.base for time in rest.layer_times) + (rest.seconds if whole else 0.0)
        price = Price(widths.per_layer(slopes, torch.float64), base)
        target, unit = budget.seconds, "seconds"
    weight = price.per_element * widths.length
    mean = weight.mean()  # 0 where the clock saw no layer depend on its widths: then no width is worth shrinking
    prices = Prices(price, target, torch.where(mean > 0, weight / mean, 0.0).float(), unit)
    check_reachable(prices, widths)
    return prices


def check_reachable(prices: Prices, widths: Widths) -> None:
    least = float(widths.cost(widths.read() * (1 - widths.trainable), prices.budget))
    if least > prices.target:
        raise ValueError(
            f"the budget of {prices.target:.4g} {prices.unit} cannot be met: what does not follow the trainable widths "
            f"takes {least:.4g} alone. Raise the budget, or let more layers learn."
        )


def mults_price(widths: Widths, positions: Sequence[float], base: float = 0.0) -> Price:
    each = [(p * layer.block_rank,) * 2 for p, layer in zip(positions, widths.layers, strict=True)]
    return Price(widths.per_layer(each, torch.float64), base)


def _product(module: Any) -> int:
    """Multiplications of the layer's matrix with one vector."""
    return module.matrix.num_mults if is_converted(module) else module.weight.numel()


def _dense_product(module: Any) -> int:
    """The same of its dense original."""
    return module.out_features * module.in_features if is_converted(module) else module.weight.numel()


def _tuple(inputs: Any) -> tuple[Any, ...]:
    return tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)

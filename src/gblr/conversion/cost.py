"""What a model costs, now and as it was when dense: multiplications and parameters, per layer, per type and in all."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group
from torch import nn

from gblr.conversion.cost_table import render, tables
from gblr.conversion.layer_types import CONVOLUTIONS, layer_type
from gblr.conversion.measure import Measurement, measure
from gblr.layers.gaudi import GaudiModule
from gblr.layers.split import SplitLinear
from gblr.layers.structured import MatrixModule


@dataclass(frozen=True)
class LayerCost:
    """One layer. A product is its matrix times one vector; a sample takes `positions` of them."""

    name: str
    type: str
    form: str  # the matrix format, or the class of a dense layer
    converted: bool
    positions: float
    dense_product: int
    product: int
    dense_params: int
    num_params: int

    @property
    def dense_mults(self) -> int:
        """Multiplications per sample of the dense original."""
        return round(self.dense_product * self.positions)

    @property
    def num_mults(self) -> int:
        """Multiplications per sample now."""
        return round(self.product * self.positions)

    @property
    def relative_cost(self) -> float:
        return self.product / max(1, self.dense_product)


@dataclass(frozen=True)
class TypeCost:
    """All layers of one type, as in the paper's Table 3: smallest, largest and mean product."""

    type: str
    num_layers: int
    min_product: int
    max_product: int
    mean_product: float
    dense_product: float
    num_mults: int
    dense_mults: int

    @property
    def relative_cost(self) -> float:
        return _ratio(self.num_mults, self.dense_mults)


@dataclass(frozen=True)
class Cost:
    """Multiplications (a multiply-add counts once) per sample, and parameters.

    `relative_cost` and what starts with `converted_` mean the converted layers; `num_mults`, `dense_mults`,
    `num_params`, `dense_params` and `model_relative_cost` mean the whole model: converted layers, dense layers and
    attention products, counted alike in both. Prints as a table; `to_dict()` for everything else.
    """

    layers: tuple[LayerCost, ...]
    attention_mults: int
    other_mults: int  # of products with weights that belong to no listed layer
    rest_params: int  # of everything but the converted layers
    batch_size: int | None  # None: nothing was run, every layer counts one position and attention is left out

    @property
    def converted(self) -> tuple[LayerCost, ...]:
        return tuple(layer for layer in self.layers if layer.converted)

    @property
    def measured(self) -> bool:
        return self.batch_size is not None

    @property
    def relative_cost(self) -> float:
        """Of the converted layers; 1 when there are none."""
        return _ratio(self.converted_mults, self.converted_dense_mults)

    @property
    def model_relative_cost(self) -> float:
        """Of the whole model, as in the paper's tables; the paper counts one of the two attention products."""
        return _ratio(self.num_mults, self.dense_mults)

    @property
    def converted_mults(self) -> int:
        return sum(layer.num_mults for layer in self.converted)

    @property
    def converted_dense_mults(self) -> int:
        return sum(layer.dense_mults for layer in self.converted)

    @property
    def converted_params(self) -> int:
        return sum(layer.num_params for layer in self.converted)

    @property
    def converted_dense_params(self) -> int:
        return sum(layer.dense_params for layer in self.converted)

    @property
    def num_mults(self) -> int:
        """Of the whole model."""
        return sum(layer.num_mults for layer in self.layers) + self.attention_mults + self.other_mults

    @property
    def dense_mults(self) -> int:
        """Of the whole model, were all its layers dense."""
        return sum(layer.dense_mults for layer in self.layers) + self.attention_mults + self.other_mults

    @property
    def num_params(self) -> int:
        """Of the whole model; shared parameters count once, those of a Gaudi layer as far as its live blocks reach."""
        return self.rest_params + self.converted_params

    @property
    def dense_params(self) -> int:
        """Of the whole model, were all its layers dense."""
        return self.rest_params + self.converted_dense_params

    def by_type(self) -> dict[str, TypeCost]:
        """Converted and dense layers by type, in the order of their first layer."""
        groups: dict[str, list[LayerCost]] = {}
        for layer in self.layers:
            groups.setdefault(layer.type, []).append(layer)
        return {name: _summary(name, layers) for name, layers in groups.items()}

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers and strings, ready for JSON."""
        return {
            "unit": "multiplications per sample" if self.measured else "multiplications of one product per layer",
            "batch_size": self.batch_size,
            "converted_layers": {
                "relative_cost": self.relative_cost,
                "mults": self.converted_mults,
                "dense_mults": self.converted_dense_mults,
                "params": self.converted_params,
                "dense_params": self.converted_dense_params,
            },
            "whole_model": {
                "relative_cost": self.model_relative_cost,
                "mults": self.num_mults,
                "dense_mults": self.dense_mults,
                "attention_mults": self.attention_mults if self.measured else None,
                "other_mults": self.other_mults if self.measured else None,
                "params": self.num_params,
                "dense_params": self.dense_params,
            },
            "types": {
                name: asdict(group) | {"relative_cost": group.relative_cost} for name, group in self.by_type().items()
            },
            "layers": [
                asdict(layer)
                | {"mults": layer.num_mults, "dense_mults": layer.dense_mults, "relative_cost": layer.relative_cost}
                for layer in self.layers
            ],
        }

    def __rich__(self) -> Group:
        return tables(self)

    def __str__(self) -> str:
        return render(tables(self))


def cost(model: nn.Module, *example_inputs: Any, batch_size: int | None = None, **kwargs: Any) -> Cost:
    """Counts what `model(*example_inputs, **kwargs)` costs per sample; the model is run once and left as it was.

    The batch size is the first axis of the first tensor unless given. Without inputs nothing is run: every layer
    counts one position, and attention is left out. Gaudi layers count their live blocks as rounded, hardened or not.

    >>> cost(nn.Linear(4, 6)).num_mults
    24
    """
    model = getattr(model, "_orig_mod", model)  # what torch.compile wraps
    layers = {name: module for name, module in model.named_modules() if is_counted(module)}
    run: Measurement | None = None
    if example_inputs or kwargs:
        run = measure(model, layers, example_inputs, kwargs, batch_size)
    parts = {
        f"{name}.parts.{i}".lstrip("."): len(module.parts)
        for name, module in model.named_modules()
        if isinstance(module, SplitLinear)
        for i in range(len(module.parts))
    }
    rows = [
        _layer_cost(name, module, parts.get(name, 1), run.positions.get(name, 0) / run.batch_size if run else 1)
        for name, module in layers.items()
    ]
    inside = {id(p) for module in layers.values() if is_converted(module) for p in module.parameters()}
    rest = sum(p.numel() for p in model.parameters() if id(p) not in inside)
    if run is None:
        return Cost(tuple(rows), 0, 0, rest, None)
    attention, other = (round(mults / run.batch_size) for mults in (run.attention_mults, run.other_mults))
    return Cost(tuple(rows), attention, other, rest, run.batch_size)


def is_converted(module: nn.Module) -> bool:
    return isinstance(module, (GaudiModule, MatrixModule))


def is_counted(module: nn.Module) -> bool:
    is_conv1d = any(base.__name__ == "Conv1D" for base in type(module).__mro__) and hasattr(module, "nf")
    dense = isinstance(module, (nn.Linear, *CONVOLUTIONS)) or is_conv1d  # Conv1D: transformers' linear layer
    return dense or is_converted(module)


def _layer_cost(name: str, module: Any, num_parts: int, positions: float) -> LayerCost:
    label = layer_type(name, module, num_parts)
    bias = 0 if module.bias is None else module.bias.numel()
    if not is_converted(module):
        size = module.weight.numel()  # also for groups: each output sees in_channels / groups
        params = size + bias
        return LayerCost(name, label, _dense_form(module), False, positions, size, size, params, params)
    if any(t.is_meta for t in module.state_dict().values()):
        raise ValueError(f"layer {name!r} is on the meta device: its structure has no values yet. Load them first.")
    form: Any = module if isinstance(module, GaudiModule) else module.matrix
    form_name = type(form).__name__.removesuffix("Matrix")
    dense = module.out_features * module.in_features
    kept = form.num_mults if isinstance(module, GaudiModule) else form.num_params
    return LayerCost(name, label, form_name, True, positions, dense, form.num_mults, dense + bias, kept + bias)


def _dense_form(module: nn.Module) -> str:
    """The name of the layer that torch's users know; subclasses have longer ones."""
    known = (nn.Linear, *CONVOLUTIONS)
    return next((base.__name__ for base in known if isinstance(module, base)), "Conv1D")


def _summary(name: str, layers: Sequence[LayerCost]) -> TypeCost:
    products = [layer.product for layer in layers]
    return TypeCost(
        type=name,
        num_layers=len(layers),
        min_product=min(products),
        max_product=max(products),
        mean_product=sum(products) / len(products),
        dense_product=sum(layer.dense_product for layer in layers) / len(layers),
        num_mults=sum(layer.num_mults for layer in layers),
        dense_mults=sum(layer.dense_mults for layer in layers),
    )


def _ratio(now: int, dense: int) -> float:
    return now / dense if dense else 1.0

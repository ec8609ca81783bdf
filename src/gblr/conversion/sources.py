"""Dense layers as matrices: what can be converted, as which matrices, and why something cannot."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gblr.conversion.filters import is_conv, is_conv1d, is_linear
from gblr.conversion.fused import fused_runs, fused_sizes
from gblr.layers.conv import ConvGeometry, StructuredConv2d
from gblr.layers.gaudi import GaudiModule
from gblr.layers.split import SplitLinear, rows_of_parts
from gblr.layers.structured import MatrixModule

_PART_NAMES = {2: ("k", "v"), 3: ("q", "k", "v")}
_SAME_FORWARD = frozenset({"FalconLinear"})  # classes whose own forward computes what that of nn.Linear does


@dataclass(frozen=True)
class Source:
    """A dense layer to convert: its weight as an out x in matrix, the rows of its parts, and its bias."""

    name: str
    module: Any
    weight: Float[Tensor, "out in"]
    bias: Tensor | None
    geometry: ConvGeometry | None
    part_sizes: tuple[int, ...]
    runs: int = 1  # how often rows of the parts take turns

    @property
    def part_names(self) -> tuple[str, ...]:
        if len(self.part_sizes) == 1:
            return (self.name,)
        labels = _PART_NAMES.get(len(self.part_sizes), tuple(str(i) for i in range(len(self.part_sizes))))
        return tuple(f"{self.name}[{label}]" for label in labels)

    def parts(self) -> list[tuple[Tensor, Tensor | None]]:
        rows = rows_of_parts(self.part_sizes, self.runs)
        return [(self.weight[part], None if self.bias is None else self.bias[part]) for part in rows]


def read_source(model: nn.Module, name: str, module: Any, split_fused: bool) -> Source:
    weight: Tensor = module.weight.detach()
    geometry = None
    if isinstance(module, nn.Conv2d):
        geometry, weight = ConvGeometry.of(module), weight.flatten(1)
    elif is_conv1d(module):
        weight = weight.T
    sizes: tuple[int, ...] = (weight.shape[0],)
    if split_fused and geometry is None:
        sizes = fused_sizes(model, name, weight.shape[0], weight.shape[1])
    bias = None if module.bias is None else module.bias.detach()
    return Source(name, module, weight, bias, geometry, sizes, fused_runs(model, name, sizes))


def reason_against(model: nn.Module, name: str, module: nn.Module, uses: "Uses") -> str | None:
    """Why a module must stay as it is; None if it can be converted."""
    if isinstance(module, GaudiModule | MatrixModule | SplitLinear | StructuredConv2d):
        return "is structured already"
    if not (is_linear(module) or is_conv(module)):
        return f"{type(module).__name__} is not a kind of layer that can be converted"
    if not name:
        return "it is the model itself, so nothing holds it that could hold another; wrap it in nn.Sequential"
    parent = model.get_submodule(name.rpartition(".")[0])
    if isinstance(parent, nn.MultiheadAttention):
        return "nn.MultiheadAttention reads this weight itself instead of calling the layer"
    if isinstance(module, nn.Conv2d) and module.groups != 1:
        return f"grouped convolution (groups={module.groups}): each group would need a matrix of its own"
    if uses.modules[id(module)] > 1:
        return "this module is used in several places of the model"
    return _reason_against_tensors(module, uses) or _reason_against_forward(module)


def _reason_against_tensors(module: Any, uses: "Uses") -> str | None:
    if getattr(module, "parametrizations", None):
        return "its weight is parametrized; remove the parametrization first"
    for name in ("weight", "bias"):
        if name not in module._parameters:
            return (
                f"its {name} is no parameter: something computes it before each call (weight_norm, spectral_norm, "
                "pruning). Remove that first, by `nn.utils.remove_weight_norm`, `nn.utils.prune.remove` and the like"
            )
    weight, bias = module.weight, module.bias
    if is_lazy(weight):
        return "its weight has no shape yet; run the model once first"
    if not weight.numel():
        return "its weight is empty"
    if uses.parameters[id(weight)] > 1:
        return "its weight is tied to another module's (an embedding, as a rule)"
    if bias is not None and uses.parameters[id(bias)] > 1:
        return "its bias is tied to another module's"
    is_plain = weight.is_floating_point() and weight.dtype.itemsize > 1  # float8 has scales elsewhere
    return None if is_plain else f"its weight is quantized ({weight.dtype})"


def _reason_against_forward(module: nn.Module) -> str | None:
    """A structured layer computes W x + bias, and nothing that a class or an object has added to it."""
    if "forward" in vars(module) and "_hf_hook" not in vars(module):  # Accelerate's hook moves along with the layer
        return "its `forward` was replaced on this object; put the original back first"
    kind = type(module)
    if is_conv1d(module) or kind.__name__ in _SAME_FORWARD:
        return None
    plain: Any = nn.Conv2d if is_conv(module) else nn.Linear
    if any(getattr(kind, name) is not getattr(plain, name) for name in _computed_by(plain)):
        return f"{kind.__name__} computes something of its own: its `forward` is not that of nn.{plain.__name__}"
    return None


def _computed_by(plain: type[nn.Module]) -> tuple[str, ...]:
    return ("forward", "_conv_forward") if plain is nn.Conv2d else ("forward",)


class Uses:
    """How many places of a model use each module and each parameter."""

    def __init__(self, model: nn.Module):
        self.modules = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
        owners: dict[int, set[int]] = {}
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                owners.setdefault(id(parameter), set()).add(id(module))
        self.parameters = Counter({key: len(modules) for key, modules in owners.items()})


def check_weights(sources: list[Source]) -> None:
    """All weights must be there and finite; checked before anything is changed."""
    for source in sources:
        if source.weight.is_meta:
            raise ValueError(
                f"{source.name}: its weight is on the meta device, so there is nothing to fit. "
                'Load the weights first, or use `GaudiConfig(init="scratch")`.'
            )
        if not bool(torch.isfinite(source.weight).all()):
            raise ValueError(f"{source.name}: its weight holds NaN or infinity. Check the checkpoint.")

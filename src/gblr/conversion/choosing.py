"""Which layers a conversion takes, and why others that were asked for stay; errors for what cannot be meant."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gblr.conversion.filters import Filter, NameFilter, is_conv, is_linear, near_matches
from gblr.conversion.heads import heads_left_dense
from gblr.conversion.report import Row
from gblr.conversion.sources import Source, Uses, read_source, reason_against
from gblr.fitting.config import Config, GaudiConfig
from gblr.layers.gaudi import GaudiModule
from gblr.layers.structured import MatrixModule


def check_arguments(model: Any, config: Any, where: Any) -> None:
    if not isinstance(config, Config):
        raise TypeError(f"`config` must be a config, such as gblr.GaudiConfig(relative_cost=0.3); got {config!r}.")
    check_model(model, where)


def check_model(model: Any, where: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` must be a torch.nn.Module; got {type(model).__name__}. Load it first.")
    if not callable(where):
        raise TypeError(
            '`where` must be a function of (module, name), such as gblr.linear_layers(include=("fc1", "fc2")); got '
            f"{where!r}."
        )


def choose(
    model: nn.Module, where: Filter, split_fused: bool, config: Config | None = None
) -> tuple[list[Source], list[Row]]:
    """The layers to convert, and rows for those that the filter chose but that must stay; with a `config`, those too
    that its format makes no cheaper.
    """
    uses, sources, skipped = Uses(model), [], []
    names, heads = [], heads_left_dense(model, where)
    for name, module in model.named_modules():
        if is_linear(module) or is_conv(module):
            names.append(name)
        if not where(module, name):
            continue
        reason = reason_against(model, name, module, uses) or _reason_against_format(module, config)
        if reason or name in heads:
            reason = reason or "it is the output head; name it in `include` to convert it"
            skipped.append(Row(name, _matrix_shape(module), f"skipped: {reason}", converted=False))
        else:
            sources.append(read_source(model, name, module, split_fused))
    if not sources:
        structured = any(isinstance(module, GaudiModule | MatrixModule) for module in model.modules())
        raise ValueError(_nothing_chosen(where, names, skipped, structured))
    return sources, skipped


def _reason_against_format(module: nn.Module, config: Config | None) -> str | None:
    if config is None or isinstance(config, GaudiConfig) or 1 not in _matrix_shape(module):
        return None
    return "its weight is a single row or column, which GBLR alone makes cheaper"


def _hint_at_convolutions(where: Filter, names: Sequence[str], skipped: Sequence[Row]) -> str:
    """For networks of convolutions, whose only linear layer is the head."""
    left = len(set(names) - {row.layer for row in skipped})
    if not left or not isinstance(where, NameFilter) or where.kind != "linear" or where.include or where.exclude:
        return ""
    return f" The other {left} are convolutions or named as heads: `gblr.conv_layers()` chooses convolutions."


def _matrix_shape(module: nn.Module) -> tuple[int, int]:
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or is_lazy(weight) or weight.dim() == 0:
        return 0, 0
    return weight.shape[0], weight.numel() // max(1, weight.shape[0])


def _nothing_chosen(where: Filter, names: Sequence[str], skipped: Sequence[Row], structured: bool) -> str:
    if skipped:
        reasons = "; ".join(f"{row.layer}: {row.what}" for row in skipped[:5])
        hint = _hint_at_convolutions(where, names, skipped)
        return f"`where` chose only layers that must stay as they are: {reasons}.{hint}"
    if not names:
        return "the model has no linear or convolution layer" + (
            " left: they are structured already. `gblr.densify_` makes them dense again." if structured else "."
        )
    if isinstance(where, NameFilter) and where.include:
        near = "; ".join(pattern + near_matches(pattern, names) for pattern in where.include)
        return f"`where` chose no {where.kind} layer. Patterns: {near}."
    return (
        f"`where` chose no layer. The model has {len(names)} linear and convolution layers: {', '.join(names[:8])} ..."
    )

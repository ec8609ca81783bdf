"""The layers that a conversion would take, before it takes them."""

from dataclasses import replace
from typing import Any

from torch import nn

from gblr.conversion.choosing import choose
from gblr.conversion.cost import cost
from gblr.conversion.filters import NameFilter, is_conv
from gblr.conversion.heads import heads_left_dense
from gblr.conversion.left_dense import notes_on_stacks
from gblr.conversion.planner import as_call
from gblr.layers.gaudi import GaudiModule
from gblr.layers.structured import MatrixModule
from gblr.workflows.block_ranks import with_block_rank
from gblr.workflows.settings import Settings
from gblr.workflows.variants import config_of, where_of
from gblr.workflows.wording import counted

_SHOWN = 12
_MOST = 0.5  # of the multiplications


def list_layers(model: nn.Module, settings: Settings, example: Any = None) -> str:
    """A line per kind of layer: how many, their shape, the first and the last; then what has to stay dense, and why,
    and what may not be meant. `example` is a batch, for the multiplications of convolutions.
    """
    where = where_of(settings)
    check_something_left(model, settings)
    sources, skipped = choose(model, where, split_fused=True, config=config_of(settings, settings.method))
    groups: dict[tuple[int, ...], list[str]] = {}
    for source in sources:
        groups.setdefault(tuple(source.weight.shape), []).append(source.name)
    rank = with_block_rank(settings, model).block_rank
    blocks = f", in blocks of rank {rank}" if rank != 1 and settings.method == "gaudi" else ""
    lines = [f"{counted(len(sources), 'layer')} to convert at cost {settings.cost:g}{blocks}:"]
    for (rows, cols), names in sorted(groups.items(), key=lambda item: -len(item[1]))[:_SHOWN]:
        span = names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]}"
        lines.append(f"  {len(names):4d} of {rows} x {cols}: {span}")
    lines += [f"  {row.layer} stays dense: {row.what.removeprefix('skipped: ')}" for row in skipped[:_SHOWN]]
    notes = notes_on_stacks(model) + notes_on_convolutions(model, settings, example)
    if isinstance(where, NameFilter):
        notes += where.unmatched([name for name, _ in model.named_modules()])
    return "\n".join(lines + [f"  {note}" for note in notes])


def check_something_left(model: nn.Module, settings: Settings) -> None:
    """Two likely mistakes: a model that is compressed already, though one may be in parts; and convolutions alone."""
    if _chooses(model, settings):
        return
    if settings.exclude and _chooses(model, replace(settings, exclude=())):
        raise ValueError(f"--exclude {' '.join(settings.exclude)} leaves no layer to convert: exclude fewer.")
    num_done = sum(isinstance(module, GaudiModule | MatrixModule) for module in model.modules())
    if num_done:
        raise ValueError(
            f"{settings.model} is compressed already: {counted(num_done, 'layer')} structured, and no other that the "
            "options choose. Compress the dense model that it came from, or make it dense by `gblr.densify_` first."
        )
    convolutions = [name for name, module in model.named_modules() if is_conv(module)]
    if convolutions and not (settings.convolutions or settings.include):
        raise ValueError(
            f"no linear layer but a head: {counted(len(convolutions), 'convolution')} would stay dense: "
            f"{_remedy(settings)}."
        )


def _chooses(model: nn.Module, settings: Settings) -> bool:
    where = where_of(settings)
    heads = heads_left_dense(model, where)
    return any(where(module, name) and name not in heads for name, module in model.named_modules())


def notes_on_convolutions(model: nn.Module, settings: Settings, example: Any) -> list[str]:
    """Says that convolutions are most of the model, where they are and the options leave them out."""
    left = {name for name, module in model.named_modules() if is_conv(module)}
    if settings.convolutions or example is None or not left:
        return []
    args, kwargs = as_call(example)
    spent = cost(model, *args, **kwargs)
    share = sum(layer.dense_mults for layer in spent.layers if layer.name in left) / max(1, spent.dense_mults)
    if share < _MOST:
        return []
    stay = "stays" if len(left) == 1 else "stay"
    of = f"{share:.0%} of the multiplications"
    return [f"{counted(len(left), 'convolution')}, {of}, {stay} dense: {_remedy(settings)}"]


def _remedy(settings: Settings) -> str:
    return "set `convolutions` in a --recipe" if settings.from_scratch else "add --convolutions"

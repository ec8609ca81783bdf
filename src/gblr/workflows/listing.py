"""The layers that a conversion would take, before it takes them."""

from torch import nn

from gblr.conversion.convert import choose
from gblr.conversion.left_dense import notes_on_stacks
from gblr.workflows.block_ranks import with_block_rank
from gblr.workflows.settings import Settings
from gblr.workflows.variants import where_of

_SHOWN = 12


def list_layers(model: nn.Module, settings: Settings) -> str:
    """A line per kind of layer: how many, their shape, the first and the last; then what has to stay dense, and why."""
    sources, skipped = choose(model, where_of(settings), split_fused=True)
    groups: dict[tuple[int, ...], list[str]] = {}
    for source in sources:
        groups.setdefault(tuple(source.weight.shape), []).append(source.name)
    rank = with_block_rank(settings, model).block_rank
    blocks = f", in blocks of rank {rank}" if rank != 1 and settings.method == "gaudi" else ""
    lines = [f"{len(sources)} layers to convert at cost {settings.cost:g}{blocks}:"]
    for (rows, cols), names in sorted(groups.items(), key=lambda item: -len(item[1]))[:_SHOWN]:
        span = names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]}"
        lines.append(f"  {len(names):4d} of {rows} x {cols}: {span}")
    lines += [f"  {row.layer} stays dense: {row.what.removeprefix('skipped: ')}" for row in skipped[:_SHOWN]]
    return "\n".join(lines + [f"  {note}" for note in notes_on_stacks(model)])

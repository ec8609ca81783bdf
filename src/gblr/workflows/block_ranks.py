"""The rank of blocks that suits a model, where none was asked for."""

from dataclasses import replace

from torch import nn

from gblr.conversion.choosing import choose
from gblr.workflows.settings import Settings
from gblr.workflows.variants import where_of

_WIDE, _NARROW, _RANK = 512, 128, 16


def with_block_rank(settings: Settings, model: nn.Module) -> Settings:
    """Rank 16 for fits of wide layers, which then take a fraction of the time. It may cost a little quality: on
    MiniLM without training 0.003 of Spearman at costs 0.5 and 0.3 (docs/results/minilm-recovery.json). All layers
    must have room for several such blocks, each of q, k and v where they are fused. Convolutions lose by it, and what
    learns from scratch gains most with rank 1.
    """
    if settings.block_rank is not None:
        return settings
    if settings.from_scratch or settings.convolutions or "gaudi" not in (settings.method, *settings.baselines):
        return replace(settings, block_rank=1)
    sources, _ = choose(model, where_of(settings), split_fused=True)
    sides = [min(*source.part_sizes, source.weight.shape[1]) for source in sources]
    return replace(settings, block_rank=_RANK if max(sides) >= _WIDE and min(sides) >= _NARROW else 1)

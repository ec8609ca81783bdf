"""FSDP2: parameters, gradients and optimizer state divided among the processes, block by block."""

from collections import Counter
from typing import Any

import torch.distributed as dist
from torch import nn


def shard_(model: nn.Module) -> nn.Module:
    """Shards the blocks, members of the outermost `nn.ModuleList`s and `nn.Sequential`s, then what is left.

    All processes start from the weights of the first. Call it before an optimizer is built.
    """
    from torch.distributed.fsdp import fully_shard  # a second to import, for sharded models only

    blocks = find_blocks(model)
    _refuse_shared(model, blocks)
    for tensor in (*model.parameters(), *model.buffers()):
        dist.broadcast(tensor.detach(), src=0)
    for module in (*blocks, model):
        fully_shard(module, reshard_after_forward=True)  # evaluation has no backward that would shard it again
    return model


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Outermost members of containers that are modules with parameters of their own, each once."""
    found: dict[nn.Module, None] = {}

    def visit(module: nn.Module) -> None:
        is_container = isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential))
        for child in module.children():
            if is_container and _can_be_sharded(child):
                found[child] = None
            else:
                visit(child)

    visit(model)
    return list(found)


def _can_be_sharded(module: nn.Module) -> bool:
    no_forward = isinstance(module, (nn.ModuleList, nn.ModuleDict))
    return not no_forward and any(True for _ in module.parameters())


def _refuse_shared(model: nn.Module, blocks: list[nn.Module]) -> None:
    """A parameter belongs to one group of those that are gathered together."""
    inside: Counter[Any] = Counter(p for block in blocks for p in set(block.parameters()))
    members = {m for block in blocks for m in block.modules()}
    outside = {p for m in model.modules() if m not in members for p in m.parameters(recurse=False)}
    shared = [name for name, p in model.named_parameters() if inside[p] > 1 or (inside[p] and p in outside)]
    if shared:
        raise ValueError(
            f"FSDP cannot shard {len(shared)} parameters that several blocks share, {shared[0]!r} first; use "
            "`parallel='ddp'`."
        )

"""The repeated blocks of a model, and how to run them one at a time with what the whole model would give them."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from gblr.conversion.model_files import ModelFiles
from gblr.conversion.sources import Source

Call = tuple[list[Any], dict[str, Any]]  # what a block is called with; None where the hidden states stand


@dataclass(frozen=True)
class Blocks:
    """Names of the blocks in the order in which they run, and the sources that stand in none of them."""

    names: tuple[str, ...]
    sources: dict[str, list[Source]]  # by block
    outside: list[Source]


def find_blocks(model: nn.Module, sources: Sequence[Source]) -> Blocks:
    """The `nn.ModuleList` whose elements hold most of the weights to convert."""
    best, shares = largest_list(model, {source.name: source.weight.numel() for source in sources})
    if best is None:
        found = ", ".join(f"{name} ({share:.0%})" for name, share in list(shares.items())[:5]) or "none"
        raise ValueError(
            f"{type(model).__name__} has no list of blocks that holds most of the layers to convert (found: {found}), "
            "so it cannot be streamed. Use `gblr.convert_` where the model fits into memory."
        )
    names = tuple(block_names(model, best))
    inside = {name: [s for s in sources if s.name.startswith(f"{name}.")] for name in names}
    return Blocks(names, inside, [source for source in sources if not source.name.startswith(f"{best}.")])


def largest_list(model: nn.Module, sizes: Mapping[str, int]) -> tuple[str | None, dict[str, float]]:
    """The `nn.ModuleList` that holds more than half of the layers, by their sizes, of nested ones the outer; and what
    share each holds.
    """
    total = max(1, sum(sizes.values()))
    shares = {
        name: sum(size for layer, size in sizes.items() if layer.startswith(f"{name}.")) / total
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
    }
    best = max(shares, key=lambda name: shares[name], default=None)  # of nested ones the outer comes first
    return (best if best is not None and shares[best] > 0.5 else None), shares


def block_names(model: nn.Module, name: str) -> list[str]:
    return [f"{name}.{i}" for i in range(len(model.get_submodule(name)))]  # type: ignore[arg-type]


def load_module(model: nn.Module, name: str, files: ModelFiles, device: torch.device) -> nn.Module:
    """A copy of a part of the model, with its weights; the model itself stays without."""
    module = copy.deepcopy(model.get_submodule(name))
    files.fill(module, name)
    return module.eval().to(device)


@contextmanager
def without_cache(model: nn.Module) -> Iterator[None]:
    """Blocks would be given a store of keys and values, which cannot be kept, and which grows with every call.

    A part of the model may have a configuration of its own.
    """
    configs: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    before = [(config, config.use_cache) for config in configs if getattr(config, "use_cache", None)]
    for config, _ in before:
        config.use_cache = False
    try:
        yield
    finally:
        for config, value in before:
            config.use_cache = value


def version_of(tensor: Tensor) -> int | None:
    """It grows with every change in place; None for tensors of inference mode, whose changes nobody counts."""
    return None if tensor.is_inference() else tensor._version


def shifted(hidden: Tensor) -> Tensor:
    """Other hidden states, by which to find what depends on them; a ramp outlives a normalization."""
    return hidden + torch.linspace(1, 2, hidden.shape[-1], device=hidden.device).to(hidden.dtype)


def same(a: Any, b: Any) -> bool:
    """Whether what blocks are called with is the same, tensors by their values."""
    ours, theirs = tree_leaves(a), tree_leaves(b)
    return len(ours) == len(theirs) and all(
        type(x) is type(y) and (torch.equal(x, y) if isinstance(x, Tensor) else x == y)
        for x, y in zip(ours, theirs, strict=True)
    )


def split_call(args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> tuple[Tensor, Call]:
    """The hidden states, and the rest of the call as plain values on the CPU."""
    rest, named = list(args), dict(kwargs)
    if rest and isinstance(rest[0], Tensor):
        hidden, rest[0] = rest[0], None
    elif isinstance(named.get("hidden_states"), Tensor):
        hidden, named["hidden_states"] = named["hidden_states"], None
    else:
        raise ValueError(f"block {name} is called without hidden states; it cannot be streamed with calibration.")
    return hidden, ([_kept(v, name) for v in rest], {key: _kept(v, f"{name}: {key}") for key, v in named.items()})


def _kept(value: Any, what: str) -> Any:
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if isinstance(value, (tuple, list)):
        return [_kept(v, what) for v in value] if isinstance(value, list) else tuple(_kept(v, what) for v in value)
    if isinstance(value, Mapping):
        return {key: _kept(v, what) for key, v in value.items()}
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
        return value
    raise ValueError(f"{what} is given a {type(value).__name__}, which cannot be kept on disk for the next block.")


def run_block(block: nn.Module, call: Call, hidden: Tensor) -> Any:
    """The output of a block on its device for one batch."""
    device = hidden.device
    args, kwargs = _moved(call[0], device), _moved(call[1], device)
    if args:
        args[0] = hidden
    else:
        kwargs["hidden_states"] = hidden
    with torch.inference_mode(False), torch.no_grad():  # inference mode counts no versions
        return block(*args, **kwargs)


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, (tuple, list)):
        return type(value)(_moved(v, device) for v in value)
    return {key: _moved(v, device) for key, v in value.items()} if isinstance(value, dict) else value


def form_of(output: Any, name: str) -> int | None:
    """None for hidden states alone, else the length of the tuple that they stand first in."""
    if isinstance(output, Tensor):
        return None
    if isinstance(output, tuple) and output and isinstance(output[0], Tensor):
        if not any(isinstance(value, Tensor) for value in output[1:]):
            return len(output)
    raise ValueError(
        f"block {name} gives more than hidden states to the next one, so blocks cannot be run alone. Stream without "
        "calibration, or use `gblr.convert_` where the model fits into memory."
    )


def as_form(hidden: Tensor, form: int | None) -> Any:
    return hidden if form is None else (hidden, *([None] * (form - 1)))


def hidden_of(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]

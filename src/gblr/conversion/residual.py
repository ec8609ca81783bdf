"""Layers whose outputs are added to a stream that passes them by, as at the end of attention and of an MLP.

What comes after such a layer sees the sum alone. In a compressed model the stream has the errors of all layers before,
and some of that shows in the layer's own inputs: a refit that aims at the teacher's sum can take it away, one that aims
at the teacher's outputs leaves it for good.
"""

from collections import Counter, deque
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gblr.conversion.calls import batch_call

_RECENT = 32  # modules: a branch begins and ends that near to the layer
_SAMPLE = 8  # vectors that are compared: no two sums agree in thousands of numbers by chance


class _Seen(NamedTuple):
    """A few vectors that a module was given, or gave, when it was the `number`-th to be called."""

    name: str
    number: int
    shape: torch.Size
    vectors: Tensor

    def is_as_large_as(self, other: "_Seen") -> bool:
        """Whether it has as many vectors of the same length, along whatever axes."""
        return self.shape.numel() == other.shape.numel() and self.shape[-1] == other.shape[-1]


def residual_streams(model: nn.Module, layers: Sequence[str], batch: Any, blocks: Sequence[str] = ()) -> dict[str, str]:
    """For each of the `layers` whose outputs are added to a stream, a module that is given this stream before.

    Found by running the model once: a later module is given the exact sum of what the layer gave and of what an earlier
    module was given. Of layers in one of the `blocks`, that module lies in the same block. Left out are layers that are
    called several times, and sums that are scaled, normalized or made of more than two.
    """
    found: dict[str, str] = {}
    recent: deque[_Seen] = deque(maxlen=_RECENT)  # inputs
    pending: list[_Seen] = []  # outputs that have not been met in a sum
    calls: Counter[str] = Counter()

    def before(name: str, args: Any, kwargs: Any) -> None:
        calls[name] += 1
        x = first_tensor(args, kwargs)
        if x is None:
            return
        given = _seen(name, calls.total(), x)
        for output in list(pending):
            if given.number - output.number > _RECENT:
                pending.remove(output)
            elif stream := _other_summand(given, output, recent, blocks):
                found[output.name] = stream
                pending.remove(output)
        recent.append(given)

    def after(name: str, output: Any) -> None:
        if isinstance(output, Tensor) and output.is_floating_point() and output.dim() > 1:
            pending.append(_seen(name, calls.total(), output))

    with ExitStack() as stack:
        for name, module in model.named_modules():

            def enter(module: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
                before(name, args, kwargs)

            stack.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
        for name in layers:

            def leave(module: nn.Module, args: Any, output: Any, name: str = name) -> None:
                after(name, output)

            stack.callback(model.get_submodule(name).register_forward_hook(leave, prepend=True).remove)
        batch_call(model, batch)
    return {layer: stream for layer, stream in found.items() if calls[layer] == calls[stream] == 1}


def first_tensor(args: Any, kwargs: Any) -> Tensor | None:
    """What a module is given first, if that is vectors."""
    x = args[0] if args else next(iter(kwargs.values()), None)
    return x if isinstance(x, Tensor) and x.is_floating_point() and x.dim() > 1 else None


def _seen(name: str, number: int, x: Tensor) -> _Seen:
    """Copies, as the tensor may be changed in place; on the CPU, so that comparing them waits for no device."""
    vectors = x.detach().reshape(-1, x.shape[-1])
    places = torch.linspace(0, max(0, len(vectors) - 1), min(_SAMPLE, len(vectors))).long()
    return _Seen(name, number, x.shape, vectors[places.to(x.device)].cpu())


def _other_summand(total: _Seen, output: _Seen, recent: Sequence[_Seen], blocks: Sequence[str]) -> str | None:
    """The last module before the layer that was given what the total has besides the layer's outputs."""
    if not total.is_as_large_as(output):
        return None
    block = _block_of(output.name, blocks)
    for one in reversed(recent):
        if one.number > output.number or one.shape != output.shape or _block_of(one.name, blocks) != block:
            continue
        if torch.equal(one.vectors + output.vectors, total.vectors):
            return one.name
    return None


def _block_of(name: str, blocks: Sequence[str]) -> str | None:
    return next((block for block in blocks if f"{name}.".startswith(f"{block}.")), None)

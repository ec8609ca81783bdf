"""Layers whose outputs are added to a stream that passes them by, as at the end of attention and of an MLP.

What comes after such a layer sees the sum alone. In a compressed model the stream has the errors of all layers before,
and some of that shows in the layer's own inputs: a refit that aims at the teacher's sum can take it away, one that aims
at the teacher's outputs leaves it for good.
"""

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import combinations
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gblr.conversion.calls import batch_call

_RECENT = 32  # modules: a branch begins and ends that near to the layer
_SAMPLE = 8  # vectors that are compared: no two sums agree in thousands of numbers by chance


class Stream(NamedTuple):
    """What the outputs of a layer are added to: what `module` is given, and the outputs of those of the `branches`
    that run beside it and before it (attention, where an MLP has the same stream).
    """

    module: str
    branches: tuple[str, ...] = ()


class _Seen(NamedTuple):
    """A few vectors that a module was given, or gave, when it was the `number`-th to be called."""

    name: str
    block: str | None
    number: int
    shape: torch.Size
    vectors: Tensor

    @classmethod
    def of(cls, name: str, number: int, x: Tensor, blocks: Sequence[str]) -> "_Seen":
        """Copies, as the tensor may be changed in place; on the CPU, so that comparing them waits for no device."""
        block = next((block for block in blocks if f"{name}.".startswith(f"{block}.")), None)
        vectors = x.detach().reshape(-1, x.shape[-1])
        places = torch.linspace(0, max(0, len(vectors) - 1), min(_SAMPLE, len(vectors))).long()
        return cls(name, block, number, x.shape, vectors[places.to(x.device)].cpu())

    def lies_beside(self, other: "_Seen") -> bool:
        """So that the two can be added, in one block."""
        return self.shape == other.shape and self.block == other.block

    def is_as_large_as(self, other: "_Seen") -> bool:
        """Whether it has as many vectors of the same length, along whatever axes."""
        return self.shape.numel() == other.shape.numel() and self.shape[-1] == other.shape[-1]


def residual_streams(
    model: nn.Module, layers: Sequence[str], batch: Any, blocks: Sequence[str] = ()
) -> dict[str, Stream]:
    """Of those of the `layers` whose outputs are added to a stream.

    Found by running the model once: a later module is given the exact sum of what the layer gave and of what an earlier
    module was given, or of these and of what another layer gave. Of layers in one of the `blocks`, all of that lies in
    the same block. Left out are layers that are called several times, and sums that are scaled, normalized or made of
    more than three.
    """
    found: dict[str, Stream] = {}
    recent: deque[_Seen] = deque(maxlen=_RECENT)  # inputs
    pending: list[_Seen] = []  # outputs that have not been met in a sum
    calls: Counter[str] = Counter()

    def before(name: str, args: Any, kwargs: Any) -> None:
        calls[name] += 1
        x = first_tensor(args, kwargs)
        if x is None:
            return
        given = _Seen.of(name, calls.total(), x, blocks)
        pending[:] = [output for output in pending if given.number - output.number <= _RECENT]
        for outputs, stream in _sums(given, pending, recent):
            for i, output in enumerate(outputs):
                found[output.name] = Stream(stream, tuple(other.name for other in outputs[:i]))
                pending.remove(output)
        recent.append(given)

    def after(name: str, output: Any) -> None:
        if isinstance(output, Tensor) and output.is_floating_point() and output.dim() > 1:
            seen = _Seen.of(name, calls.total(), output, blocks)
            if bool(seen.vectors.any()):  # with zeros, whatever is given the stream would be taken for a sum
                pending.append(seen)

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
    return {
        layer: stream for layer, stream in found.items()
        if all(calls[name] == 1 for name in (layer, stream.module, *stream.branches))
    }  # fmt: skip


def first_tensor(args: Any, kwargs: Any) -> Tensor | None:
    """What a module is given first, if that is vectors."""
    x = args[0] if args else next(iter(kwargs.values()), None)
    return x if isinstance(x, Tensor) and x.is_floating_point() and x.dim() > 1 and x.shape[-1] else None


def _sums(total: _Seen, outputs: Sequence[_Seen], recent: Sequence[_Seen]) -> Iterator[tuple[tuple[_Seen, ...], str]]:
    """Outputs, in the order in which they came, that make the total with a stream; and the last module before them
    that was given this stream.
    """
    alike = [output for output in outputs if total.is_as_large_as(output)]
    taken: set[str] = set()
    for together in (*((output,) for output in alike), *combinations(alike, 2)):
        names = {output.name for output in together}
        if not names & taken and (stream := _stream_of(total, together, recent)):
            taken |= names
            yield together, stream


def _stream_of(total: _Seen, outputs: tuple[_Seen, ...], recent: Sequence[_Seen]) -> str | None:
    if not all(output.lies_beside(outputs[0]) for output in outputs):
        return None
    for one in reversed(recent):
        if one.number <= outputs[0].number and one.lies_beside(outputs[0]):
            if _is_sum(total.vectors, one.vectors, *(output.vectors for output in outputs)):
                return one.name
    return None


def _is_sum(total: Tensor, *parts: Tensor) -> bool:
    """To the bit, in any order: rounded sums of three depend on it."""
    if len(parts) == 2:
        return torch.equal(parts[0] + parts[1], total)
    a, b, c = parts
    return any(torch.equal(x + y + z, total) for x, y, z in ((a, b, c), (a, c, b), (b, c, a)))

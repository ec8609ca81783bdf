"""What layers are given in a model, and what those of its teacher answer: runs for `refit.py`."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gblr.conversion.block_runs import BlockRuns
from gblr.conversion.calls import batch_call, input_vectors, padding_of
from gblr.conversion.goals import Halves, halves_of
from gblr.conversion.grams import LastInputs
from gblr.conversion.residual import Stream, first_tensor
from gblr.conversion.sources import read_source
from gblr.fitting.precision import full_precision

_DIFFER = "{}: {} in the model and {} in its teacher, so that its outputs cannot be compared."


class _Reached(Exception):
    """Every layer that was asked for has been run."""


@dataclass
class _Kept:
    """Vectors by the names of layers: those of every call, and all that the layer's outputs are added to."""

    calls: dict[str, list[Tensor]] = field(default_factory=dict)
    added: dict[str, list[Tensor]] = field(default_factory=dict)

    def stream(self, name: str) -> Tensor:
        return sum(self.added[name][1:], self.added[name][0])

    def has_all(self, names: Sequence[str], streams: Mapping[str, Stream]) -> bool:
        found = all(len(self.added[name]) == 1 + len(stream.branches) for name, stream in streams.items())
        return found and len(self.calls) == len(names)


def repeated_layers(model: nn.Module, teacher: nn.Module, names: Sequence[str], batch: Any) -> set[str]:
    """Layers that are called more than once in a run, as often in the model as in its teacher."""
    calls, in_teacher = (_num_calls(each, names, batch) for each in (model, teacher))
    for name in names:
        if calls[name] != in_teacher[name]:
            raise ValueError(_DIFFER.format(name, f"called {calls[name]} times", in_teacher[name]))
    return {name for name in names if calls[name] > 1}


def _num_calls(model: nn.Module, names: Sequence[str], batch: Any) -> Counter[str]:
    calls: Counter[str] = Counter()
    with ExitStack() as stack:
        for name in names:

            def hook(*_: Any, name: str = name) -> None:
                calls[name] += 1

            stack.callback(model.get_submodule(name).register_forward_pre_hook(hook).remove)
        batch_call(model, batch)
    return calls


def collect_pairs(
    model: BlockRuns,
    teacher: BlockRuns,
    names: Sequence[str],
    repeated: set[str],
    tick: Callable[[], None] = lambda: None,
    streams: Mapping[str, Stream] | None = None,
) -> dict[str, Halves]:
    """Inputs from the model as it is now, outputs from its teacher: of every call, the first to the first and so on.

    Where it is given another number of vectors there, they are the teacher's layer's on the model's inputs.
    `streams` are those of `residual_streams`: to the outputs of these layers comes what the teacher's stream has more
    than the model's, so that the sums are alike.
    """
    found: dict[str, Halves] = {}
    shared = _has_other_names(model.model, names)
    for runs in (model, teacher):
        runs.go_to("" if shared else names[0])  # calls of a shared layer may lie in several blocks
    ends_early = repeated.isdisjoint(names)
    streams = {name: stream for name, stream in (streams or {}).items() if name in names}
    for number in range(len(model.batches)):
        theirs = _outputs(teacher, names, number, ends_early, streams)
        ours = _inputs(model, names, number, ends_early, streams)
        last: Tensor | None = None  # layers with the same input come one after the other
        for name, inputs in ours.calls.items():
            outputs = theirs.calls[name]
            if len(inputs) != len(outputs):
                raise ValueError(_DIFFER.format(name, f"called {len(inputs)} times", len(outputs)))
            for x, y in zip(inputs, outputs, strict=True):
                if len(x) != len(y):  # experts that choose what they are given: no vector has its like
                    y = _answers(teacher.model, name, x)
                elif name in streams:
                    y += theirs.stream(name) - ours.stream(name).to(y)
                if name not in found:
                    found[name] = Halves.zeros(x.shape[1], y.shape[1], x.device)
                if x is not last:
                    last, seen = x, halves_of(x)
                found[name].add(seen, y.to(x.device))
        tick()
    return found


@full_precision()
def _answers(teacher: nn.Module, layer: str, x: Tensor) -> Tensor:
    dense = read_source(teacher, layer, teacher.get_submodule(layer), split_fused=False)
    return nn.functional.linear(x, dense.weight.to(x), None if dense.bias is None else dense.bias.to(x))


def _has_other_names(model: nn.Module, names: Sequence[str]) -> bool:
    layers = {model.get_submodule(name) for name in names}
    return sum(module in layers for _, module in model.named_modules(remove_duplicate=False)) > len(layers)


def _inputs(
    model: BlockRuns, names: Sequence[str], number: int, ends_early: bool, streams: Mapping[str, Stream]
) -> _Kept:
    last = LastInputs()
    found, kept = (torch.empty(0),) * 2  # the vectors of the last input, and a copy that layers with this input share

    def read(name: str, module: nn.Module, args: Any, kwargs: Any) -> Tensor:
        nonlocal found, kept
        geometry, padding = getattr(module, "geometry", None), padding_of(model.batches[number], name, model.model)
        vectors = last.vectors(args[0] if args else next(iter(kwargs.values())), geometry, padding)
        if vectors is not found:
            found, kept = vectors, vectors.clone()
        return kept

    def register(module: nn.Module, hook: Any) -> Any:
        return module.register_forward_pre_hook(hook, with_kwargs=True)

    return _run(model, names, number, register, read, ends_early, streams)


def _outputs(
    teacher: BlockRuns, names: Sequence[str], number: int, ends_early: bool, streams: Mapping[str, Stream]
) -> _Kept:
    def read(name: str, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return _given_vectors(teacher, name, number, output)

    def register(module: nn.Module, hook: Any) -> Any:
        return module.register_forward_hook(hook, prepend=True)  # before a hook of the user's changes the output

    return _run(teacher, names, number, register, read, ends_early, streams)


def _given_vectors(runs: BlockRuns, layer: str, number: int, x: Tensor) -> Tensor:
    """A copy of what the layer gives, or of what is added to that: one vector for each position."""
    if _is_convolution(runs.model.get_submodule(layer)):
        x = x.movedim(-3, -1)  # with or without a batch axis
        return input_vectors(x.reshape(-1, x.shape[-1]), None, None).clone()
    return input_vectors(x, None, padding_of(runs.batches[number], layer, runs.model)).clone()


def _is_convolution(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Conv2d) or getattr(layer, "geometry", None) is not None


def _stream_hooks(runs: BlockRuns, layer: str, stream: Stream, number: int, added: list[Tensor]) -> Iterator[Any]:
    """Handles of hooks that put all that the layer's outputs are added to into `added`."""

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        x = first_tensor(args, kwargs)
        assert x is not None
        added.append(_given_vectors(runs, layer, number, x))

    def leave(module: nn.Module, args: Any, output: Tensor) -> None:
        added.append(_given_vectors(runs, layer, number, output))

    yield runs.model.get_submodule(stream.module).register_forward_pre_hook(enter, with_kwargs=True)
    for branch in stream.branches:
        yield runs.model.get_submodule(branch).register_forward_hook(leave, prepend=True)


def _run(
    runs: BlockRuns, names: Sequence[str], number: int, register: Any, read: Callable[..., Tensor], ends_early: bool,
    streams: Mapping[str, Stream],
) -> _Kept:  # fmt: skip
    """What `read` finds at each call of the layers, and their streams: copies, as the run goes on and may change
    tensors in place. It ends once all layers were met, where they are called but once.
    """
    kept = _Kept()
    ends_early = ends_early and not runs.ends_with(names)
    with ExitStack() as stack:
        for name, stream in streams.items():
            for handle in _stream_hooks(runs, name, stream, number, kept.added.setdefault(name, [])):
                stack.callback(handle.remove)
        for name in names:

            def hook(*args: Any, name: str = name) -> None:
                runs.reached()
                kept.calls.setdefault(name, []).append(read(name, *args))
                if ends_early and len(kept.calls) == len(names):
                    raise _Reached

            stack.callback(register(runs.model.get_submodule(name), hook).remove)
        with suppress(_Reached):
            runs.run(number)
    if not kept.has_all(names, streams):
        raise ValueError(
            f"{', '.join(names)}: not every layer runs on every batch, so their outputs cannot be compared. Larger "
            "batches may reach all experts of a mixture; else convert such layers when the others are healed."
        )
    return kept

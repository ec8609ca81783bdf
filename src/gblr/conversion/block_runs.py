"""Runs a model as far as a layer, batch by batch: block after block on hidden states that are kept, where the model is
a plain chain of blocks; from its beginning where it is not.

A refit of all layers looks at each of them in turn. From the beginning, that takes time in proportion to the square of
the depth; from the last block on, to the depth.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from gblr.conversion.blocks import (
    as_form,
    block_names,
    form_of,
    hidden_of,
    largest_list,
    same,
    shifted,
    version_of,
    without_cache,
)
from gblr.conversion.calls import batch_call
from gblr.conversion.kept_attention import KeptAttention

_PLAIN = (Tensor, bool, int, float, str, type(None))
Call = tuple[tuple[Any, ...], dict[str, Any]]


class BlockRuns:
    """`go_to` a layer, then `run` batches; hooks may end a run early by raising.

    `layers` are the names of those that will be gone to, in the order in which they run. Weights of blocks that were
    passed must not change any more. Hidden states of all batches are kept, of one block, and what of its attention will
    come out the same again. With `fixed`, no weights change at all: then runs that reach the end of a block need not be
    made again to pass it.
    """

    def __init__(self, model: nn.Module, batches: Sequence[Any], layers: Sequence[str], fixed: bool = False):
        self.model, self.batches, self.fixed = model, batches, fixed
        found, _ = largest_list(model, dict.fromkeys(layers, 1))
        self.blocks = [] if found is None else block_names(model, found)
        self.at: int | None = None  # the block that `run` runs; None: all of the model
        self.next, self.calls, self.hidden = 0, [], []  # type: ignore[var-annotated]
        self.form: int | None = None  # of what blocks give, see `form_of`
        self.given: dict[int, Tensor] = {}  # by block `at`, for the batches that were run to its end
        self.attention = KeptAttention()  # of block `at`
        if len(self.blocks) < 2 or not self._is_chain():
            self.blocks = []
        self.last = {block: name for name in layers for block in self.blocks if name.startswith(f"{block}.")}

    def ends_with(self, layers: Sequence[str]) -> bool:
        """Whether what these layers give is all but what the block gives, so that it is worth a run to its end."""
        return self.fixed and self.at is not None and self.last.get(self.blocks[self.at]) in layers

    def go_to(self, layer: str) -> None:
        found = next((i for i, name in enumerate(self.blocks) if f"{layer}.".startswith(f"{name}.")), None)
        self.at = found
        if found is None:  # a layer that is to change: what blocks are called with may come from it
            self.next, self.calls, self.hidden, self.given = 0, [], [], {}
            self.attention.forget()
            return
        if not self.calls:
            self._record()
        while self.next < found:
            for i in range(len(self.batches)):  # one by one, as all of them are large
                given = self.given.pop(i, None)
                self.hidden[i] = hidden_of(self._block(self.next, i, True)) if given is None else given
            self.attention.forget()
            self.next += 1
        self.given = {}

    def run(self, number: int) -> None:
        """As much of the model as is needed for that batch."""
        if self.at is None:
            batch_call(self.model, self.batches[number])
        else:
            given = hidden_of(self._block(self.at, number))
            if self.fixed:
                self.given[number] = given

    def reached(self) -> None:
        """To be called in a run before a layer that was gone to: unless weights are `fixed`, it is about to change."""
        if not self.fixed:
            self.attention.settle()

    def _block(self, block: int, number: int, is_last: bool = False) -> Any:
        args, kwargs = self.calls[number][block]
        hidden, module = self.hidden[number], self.model.get_submodule(self.blocks[block])
        with self.attention.run(module, number, is_last):
            if args:
                return module(hidden, *args[1:], **kwargs)
            return module(**{**kwargs, "hidden_states": hidden})

    def _record(self) -> None:
        """What blocks are called with, without running them: it does not depend on what they give."""
        for batch in self.batches:
            calls = _calls_of_idle_blocks(self.model, self.blocks, batch, self.form)
            self.hidden.append(_hidden_in(calls[0]))
            self.calls.append([_without_hidden(call) for call in calls])

    def _is_chain(self) -> bool:
        """Whether each block runs once, on what the one before gave, with nothing that remembers the call, that is
        changed in place, or that comes from a block before.
        """
        seen = _seen_calls(self.model, self.blocks, self.batches[0])
        if [each.name for each in seen] != self.blocks or any(_hidden_in(each.call) is None for each in seen):
            return False
        if not all(_is_plain(each.call) and _is_plain(each.output) for each in seen):
            return False
        outputs = [each.output for each in seen]
        if any(not isinstance(o, Tensor) and any(isinstance(v, Tensor) for v in o[1:]) for o in outputs):
            return False
        given = [_hidden_in(each.call) for each in seen[1:]]
        if any(x is not hidden_of(y) for x, y in zip(given, outputs[:-1], strict=True)):
            return False
        if any(version is None or version != version_of(x) for each in seen for x, version in each.versions):
            return False
        self.form = form_of(outputs[0], self.blocks[0])
        other = _seen_calls(self.model, self.blocks, self.batches[0], shift_first=True)
        return same([_without_hidden(each.call) for each in seen], [_without_hidden(each.call) for each in other])


class _Enough(Exception):
    """Every block has been called."""


def _calls_of_idle_blocks(model: nn.Module, blocks: Sequence[str], batch: Any, form: int | None) -> list[Call]:
    """Of blocks that give what they are given; ends with the last."""
    calls: list[Call] = []
    modules = [model.get_submodule(name) for name in blocks]

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        calls.append((args, kwargs))
        if len(calls) == len(modules):
            raise _Enough

    def idle(*args: Any, **kwargs: Any) -> Any:
        return as_form(_hidden_in(calls[-1]), form)

    with ExitStack() as stack:
        stack.enter_context(without_cache(model))
        for module in modules:
            # ahead of a hook of the user's, which will run again with the block
            stack.callback(module.register_forward_pre_hook(before, with_kwargs=True, prepend=True).remove)
            if module._compiled_call_impl is None:  # what was compiled may not look at another `forward`
                stack.enter_context(_instead_of_forward(module, idle))
        with suppress(_Enough):
            batch_call(model, batch)
    return calls


@contextmanager
def _instead_of_forward(module: nn.Module, forward: Any) -> Iterator[None]:
    own = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own


@dataclass(frozen=True)
class _Seen:
    """A block as it ran; `versions` are those that its tensors had when it was given them or gave them."""

    name: str
    call: Call
    output: Any
    versions: list[tuple[Tensor, int | None]]


def _seen_calls(model: nn.Module, blocks: Sequence[str], batch: Any, shift_first: bool = False) -> list[_Seen]:
    """The blocks as they ran; `shift_first` changes what the first of them gives."""
    seen: list[_Seen] = []
    call: Call = (), {}
    given: list[tuple[Tensor, int | None]] = []

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        nonlocal call, given
        call, given = (args, kwargs), _versions((args, kwargs))

    with ExitStack() as stack:
        stack.enter_context(without_cache(model))
        for name in blocks:

            def after(module: nn.Module, args: Any, output: Any, name: str = name) -> Any:
                seen.append(_Seen(name, call, output, [*given, *_versions(output)]))
                if not shift_first or name != blocks[0]:
                    return None
                hidden = shifted(hidden_of(output))
                return hidden if isinstance(output, Tensor) else (hidden, *output[1:])

            block = model.get_submodule(name)
            # ahead of a hook of the user's, which will run again with the block
            stack.callback(block.register_forward_pre_hook(before, with_kwargs=True, prepend=True).remove)
            stack.callback(block.register_forward_hook(after).remove)
        batch_call(model, batch)
    return seen


def _versions(values: Any) -> list[tuple[Tensor, int | None]]:
    return [(value, version_of(value)) for value in tree_leaves(values) if isinstance(value, Tensor)]


def _hidden_in(call: Call) -> Any:
    args, kwargs = call
    found = args[0] if args else kwargs.get("hidden_states")
    return found if isinstance(found, Tensor) else None


def _without_hidden(call: Call) -> Call:
    args, kwargs = call
    return ((None, *args[1:]), kwargs) if args else (args, {k: v for k, v in kwargs.items() if k != "hidden_states"})


def _is_plain(value: Any) -> bool:
    """No object that a call could change, such as a store of keys and values."""
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return all(map(_is_plain, value.values())) if isinstance(value, dict) else isinstance(value, _PLAIN)

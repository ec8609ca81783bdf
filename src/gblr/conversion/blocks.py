"""The repeated blocks of a model, and how to run them one at a time with what the whole model would give them."""

import copy
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from gblr.conversion.calibrate import add_gram_, batch_call, input_vectors, padding_of
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


class _Enough(Exception):
    """Ends a run of the model once all that was asked for is known."""


class Outside:
    """Runs what stands around the blocks: each module gets its own weights when it is called, and loses them after."""

    def __init__(self, model: nn.Module, blocks: Blocks, files: ModelFiles):
        self.model, self.names, self.files = model, blocks.names, files

    def calls(
        self, batch: Any, form: int | None, only_first: bool = False, shift: bool = False
    ) -> tuple[Tensor, list[Call]]:
        """The hidden states that the first block is given, and what each block is called with besides them.

        Blocks give back what they are given; with `shift`, other values.
        """
        found: list[Call] = []
        first, given = torch.empty(0), torch.empty(0)
        version: int | None = None

        def record(number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            nonlocal first, given, version
            name = self.names[number]
            hidden, call = split_call(args, kwargs, name)
            if number != len(found):
                raise self._refusal(f"call {len(found) + 1} is one of {name}")
            if number and (hidden is not given or version_of(hidden) != version):
                raise self._refusal(f"what {name} is given was changed on the way from the block before")
            first = first if number else hidden.detach().clone()  # the model may go on in place
            found.append(call)
            if only_first:
                raise _Enough
            given = shifted(hidden) if shift else hidden
            version = version_of(given)
            return as_form(given, form)

        def end(*_: Any) -> None:
            if len(found) == len(self.names):
                raise _Enough

        owner = self.names[0].rpartition(".")[0].rpartition(".")[0]
        handle = self.model.get_submodule(owner).register_forward_hook(end)  # until then, blocks might run again
        try:
            self._run(batch, record)
        finally:
            handle.remove()
        if not found or (not only_first and len(found) != len(self.names)):
            raise self._refusal(f"{len(found)} of them ran")
        return first, found

    def check_calls(self, batch: Any, form: int | None, calls: list[Call]) -> None:
        """`calls`, those of `batch`, must hold whatever the blocks give: they are kept for all of the blocks."""
        if not same(calls, self.calls(batch, form, shift=True)[1]):
            raise self._refusal("what some are given besides depends on outputs of others")

    def _refusal(self, why: str) -> ValueError:
        return ValueError(
            f"each of the blocks {self.names[0]} ... {self.names[-1]} must run once, in turn, on just what the one "
            f"before gave; {why}. They cannot be streamed with calibration: stream without, or use `gblr.convert_` "
            "where the model fits into memory."
        )

    def finish(self, batch: Any, last: Tensor, form: int | None, sources: Sequence[Source], grams: "Grams") -> None:
        """Runs the model with `last` as the output of its blocks, until every source outside them was reached."""
        modules = {source.name: source.module for source in sources}
        with grams.hooked(modules, lambda name: padding_of(batch, name, self.model)) as reached:

            def skip(number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
                hidden, _ = split_call(args, kwargs, self.names[number])
                return as_form(last if number == len(self.names) - 1 else hidden, form)

            def stop(module: nn.Module, args: Any, kwargs: Any) -> None:
                if len(reached) == len(sources):
                    raise _Enough

            handles = [s.module.register_forward_pre_hook(stop, with_kwargs=True) for s in sources]
            try:
                self._run(batch, skip)
            finally:
                for handle in handles:
                    handle.remove()

    def _run(self, batch: Any, forward: Callable[[int, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        blocks: list[Any] = [self.model.get_submodule(name) for name in self.names]
        for number, block in enumerate(blocks):
            block.forward = lambda *args, number=number, **kwargs: forward(number, args, kwargs)
        try:
            with (
                torch.inference_mode(False),  # it counts no versions
                torch.no_grad(),
                self._weights_on_demand(),
                without_cache(self.model),
            ):
                batch_call(self.model, batch)
        except _Enough:
            pass
        finally:
            for block in blocks:
                del block.forward

    @contextmanager
    def _weights_on_demand(self) -> Iterator[None]:
        inside = tuple(f"{name}." for name in self.names)
        with ExitStack() as stack:
            for name, module in self.model.named_modules():
                tables = module._parameters, module._buffers
                if name in self.names or name.startswith(inside) or not any(tables):
                    continue

                def load(module: nn.Module, args: Any, name: str = name) -> None:
                    self.files.fill(module, name, recurse=False)

                def drop(module: nn.Module, args: Any, output: Any, tables: Any = tables) -> None:
                    module._parameters.update(tables[0])
                    module._buffers.update(tables[1])

                stack.callback(module.__dict__.update, _parameters=tables[0], _buffers=tables[1])
                module._parameters, module._buffers = (_Table(table, name, self.files) for table in tables)
                stack.callback(module.register_forward_pre_hook(load).remove)
                stack.callback(module.register_forward_hook(drop).remove)
            yield


class _Table(dict[str, Any]):
    """A module's own tensors. Other modules may read them without a call of this one: they get those of the file."""

    def __init__(self, table: Mapping[str, Any], module: str, files: ModelFiles):
        super().__init__(table)
        self.module, self.files = module, files

    def __getitem__(self, leaf: str) -> Any:
        value = super().__getitem__(leaf)
        if value is None or not value.is_meta:
            return value
        name = f"{self.module}.{leaf}" if self.module else leaf
        return self.files.read(self.files.aliases.get(name, name))


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
    with torch.no_grad():
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


class Grams:
    """Sums of X^T X for some layers; those that are given the very same tensor (q, k and v) share one."""

    def __init__(self, sources: Sequence[Source], make: Callable[[str, int], Tensor]):
        self.sources = {source.name: source for source in sources}
        self.make = make
        self.grams: dict[str, Tensor] = {}
        self.owners: dict[str, str] = {}
        self.positions: dict[str, int] = dict.fromkeys(self.sources, 0)

    @contextmanager
    def hooked(self, modules: Mapping[str, nn.Module], padding: Callable[[str], Tensor | None]) -> Iterator[set[str]]:
        """While a batch runs; yields the names of the layers that it has reached. `padding` is asked for each."""
        given: list[tuple[Any, str]] = []
        reached: set[str] = set()

        def hook(module: nn.Module, args: Any, kwargs: Any, name: str) -> None:
            x = args[0] if args else next(iter(kwargs.values()))
            reached.add(name)
            self._see(name, x, given, padding(name))

        handles = [
            module.register_forward_pre_hook(
                lambda module, args, kwargs, name=name: hook(module, args, kwargs, name), with_kwargs=True
            )
            for name, module in modules.items()
        ]
        try:
            yield reached
        finally:
            for handle in handles:
                handle.remove()

    def _see(self, name: str, x: Tensor, given: list[tuple[Any, str]], padding: Tensor | None) -> None:
        source = self.sources[name]
        if name not in self.owners:
            same = (self.owners[o] for ref, o in given if ref() is x and self.sources[o].geometry == source.geometry)
            self.owners[name] = next(same, name)
        given.append((weakref.ref(x), name))
        vectors = input_vectors(x, source.geometry, padding)
        self.positions[name] += vectors.shape[0]
        if self.owners[name] != name:
            return
        if name not in self.grams:
            self.grams[name] = self.make(name, vectors.shape[1])
        add_gram_(self.grams[name], vectors)

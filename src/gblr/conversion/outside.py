"""Runs what stands around the repeated blocks of a model, with weights that come and go."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gblr.conversion.blocks import Blocks, Call, as_form, same, shifted, split_call, version_of, without_cache
from gblr.conversion.calls import batch_call, padding_of
from gblr.conversion.grams import Grams
from gblr.conversion.model_files import ModelFiles
from gblr.conversion.sources import Source


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

    def finish(self, batch: Any, last: Tensor, form: int | None, sources: Sequence[Source], grams: Grams) -> None:
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

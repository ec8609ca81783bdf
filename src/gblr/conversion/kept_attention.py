"""Attention that a block computes again and again from the same inputs, computed once.

A refit runs a block once for every set of layers with a common input, and attention takes more of such a run than all
products with weights: at 1,024 tokens of SmolLM2 a third of the whole refit.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gblr.conversion.blocks import version_of

_ATTENTION = torch.nn.functional.scaled_dot_product_attention
_Key = tuple[int, int]  # a batch, and the how manieth call of attention in a run of it


class KeptAttention:
    """What calls of `scaled_dot_product_attention` gave in the runs of one block, batch by batch.

    A result is kept if it was found before any layer ran that is still to change (`settle`), and given again in later
    runs, in which everything up to there is the same. `forget` it when another block comes.
    """

    def __init__(self) -> None:
        self._kept: dict[_Key, tuple[Tensor, int]] = {}
        self._settled = False

    def forget(self) -> None:
        self._kept.clear()

    def settle(self) -> None:
        """A layer that will change is about to run: what comes after it in this run is not kept."""
        self._settled = True

    @contextmanager
    def run(self, block: nn.Module, number: int, is_last: bool = False) -> Iterator[None]:
        """While the block runs on that batch; nothing is kept of the `is_last` run of it."""
        self._settled = is_last
        if any(_is_compiled(module) for module in block.modules()):
            yield  # what was traced must not meet another way of calling functions
            return
        with _Calls(self, number):
            yield

    def _result(self, key: _Key, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
        kept = self._kept.get(key)
        if kept is not None and version_of(kept[0]) == kept[1]:  # else the model changed it in place
            return kept[0]
        found: Tensor = _ATTENTION(*args, **kwargs)
        version = version_of(found)
        if not self._settled and version is not None:
            self._kept[key] = found, version
        return found


def _is_compiled(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None or hasattr(module, "_orig_mod")


class _Calls(TorchFunctionMode):
    """Counts the calls of attention in one run."""

    def __init__(self, kept: KeptAttention, number: int):
        super().__init__()
        self.kept, self.number, self.calls = kept, number, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not _ATTENTION or torch.compiler.is_compiling():
            return func(*args, **kwargs)
        self.calls += 1
        return self.kept._result((self.number, self.calls), args, kwargs)

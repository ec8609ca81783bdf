"""How many input vectors each Gaudi layer sees, counted while the first training step runs."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from gblr.layers.gaudi import GaudiModule


class PositionCounter:
    """Sums over all calls of a layer until `stop`: it may be applied several times, or to several micro-batches.

    Calls inside a compiled graph are not seen; where there are any, each layer counts its last call alone.
    """

    def __init__(self, layers: Sequence[GaudiModule]):
        self._layers = tuple(layers)
        self._counts = [0] * len(self._layers)
        self._handles = [layer.register_forward_hook(self._hook(i)) for i, layer in enumerate(self._layers)]

    def _hook(self, i: int) -> Callable[..., None]:
        def count(layer: Any, *_: Any) -> None:
            if torch.compiler.is_compiling() or not layer.training:
                return
            if torch._C._current_graph_task_id() == -1:  # else in a backward pass: a checkpoint computes again
                self._counts[i] += layer.num_positions

        return count

    def stop(self) -> list[int]:
        for handle in self._handles:
            handle.remove()
        last = [layer.num_positions for layer in self._layers]
        called = ["num_positions" in vars(layer) for layer in self._layers]
        if any(was_called and not count for was_called, count in zip(called, self._counts, strict=True)):
            return last
        return [count or one for count, one in zip(self._counts, last, strict=True)]

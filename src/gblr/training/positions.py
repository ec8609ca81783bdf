"""How many input vectors each Gaudi layer sees, counted in the first training step that reaches it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gblr.layers.gaudi import GaudiModule


class PositionCounter:
    """Sums over all calls of a layer until `stop`: it may be applied several times, or to several micro-batches.

    Of a layer without a call in training mode, those in evaluation mode with gradients count, as of a part that is
    kept in that mode, and else its last call. Calls inside a compiled graph are not seen; where there are any, each
    layer counts its last call alone.
    """

    def __init__(self, layers: Sequence[GaudiModule]):
        self._layers = tuple(layers)
        self._calls = [_Calls() for _ in self._layers]
        for layer in self._layers:
            vars(layer).pop("num_positions", None)  # of an earlier run
        self._handles = [
            layer.register_forward_hook(calls) for layer, calls in zip(self._layers, self._calls, strict=True)
        ]

    def counts(self) -> list[int]:
        """Until now, in this process; 0 of a layer that was not reached."""
        both = list(zip(self._layers, self._calls, strict=True))
        # a graph that was compiled before the hooks came tells of itself by `num_positions` alone
        in_graph = [calls.in_graph or vars(layer).get("num_positions", 0) for layer, calls in both]
        if any(unseen and not calls.training for calls, unseen in zip(self._calls, in_graph, strict=True)):
            return [unseen or calls.last for calls, unseen in zip(self._calls, in_graph, strict=True)]
        return [calls.training or calls.evaluation or calls.last for calls in self._calls]

    def stop(self) -> None:
        for calls, handle in zip(self._calls, self._handles, strict=True):
            calls.is_stopped = True
            handle.remove()


class _Calls:
    """The forward hook of one layer: positions of its calls by mode, of the last one, and of the last in a graph."""

    def __init__(self) -> None:
        self.training = self.evaluation = self.last = self.in_graph = 0
        self.is_stopped = False

    def __call__(self, layer: Any, inputs: Any, output: Tensor) -> None:
        positions = output.numel() // layer.out_features
        if torch.compiler.is_compiling():
            self.in_graph = positions  # written, never read: a graph that reads it is compiled again for every value
            return
        if self.is_stopped or torch._C._current_graph_task_id() != -1:  # a checkpoint computes again in the backward
            return
        self.last = positions
        if layer.training:
            self.training += positions
        elif torch.is_grad_enabled():
            self.evaluation += positions

    def __reduce__(self) -> Any:
        return _Nothing, ()


class _Nothing:
    """The hook in copies of the model, an average of its weights or one on disk: their calls are no training."""

    def __call__(self, *_: Any) -> None:
        return


def with_stand_ins(counts: Sequence[float]) -> list[float]:
    """For layers without any: as much as the others have on average."""
    reached = [count for count in counts if count]
    mean = sum(reached) / len(reached) if reached else 1.0
    return [count or mean for count in counts]

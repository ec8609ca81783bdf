"""A running average of the weights, for evaluation (EMA). Structure is never averaged: half a block is no block."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from gblr.layers.gaudi import GaudiModule
from gblr.training.widths import local_part


class Average:
    """Contents, biases, norms and their statistics on average over the last steps; widths, locations, sigma as are.

    Early steps count less than `decay` says, so that the start is forgotten: the decay of step n is at most
    (1 + n) / (10 + n). The average of a model in half precision is kept in float32: steps as small as 1 - decay of a
    difference would be rounded away.
    """

    def __init__(self, model: nn.Module, decay: float):
        self.decay = decay
        structure = {
            id(getattr(module, name))
            for module in model.modules()
            if isinstance(module, GaudiModule)
            for name in module._structure_names
        }
        state = model.state_dict(keep_vars=True).values()
        tensors = [value for value in state if isinstance(value, Tensor)]  # not what `get_extra_state` adds
        unique = {id(t): local_part(t) for t in tensors if t.is_floating_point() and id(t) not in structure}
        self._live: list[Tensor] = list(unique.values())
        self._mean = [t.to(torch.promote_types(t.dtype, torch.float32), copy=True) for t in self._live]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """After optimizer step `step`, counted from 0."""
        decay = min(self.decay, (1 + step) / (10 + step))
        live = [tensor.to(mean.dtype) for tensor, mean in zip(self._live, self._mean, strict=True)]
        torch._foreach_lerp_(self._mean, live, 1 - decay)

    @torch.no_grad()
    def restart(self) -> None:
        """Takes the model's present weights for the average."""
        torch._foreach_copy_(self._mean, self._live)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The model has the averaged weights inside, and its own again after."""
        with torch.no_grad():
            own = [tensor.clone() for tensor in self._live]
            torch._foreach_copy_(self._live, self._mean)
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(self._live, own)

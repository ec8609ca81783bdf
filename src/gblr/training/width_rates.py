"""What an optimizer knows of the widths: their learning rate now, and the size of their gradients."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from gblr.layers.gaudi import GaudiModule
from gblr.ops.host import on_host
from gblr.training.widths import side_by_side, whole

# gradients hold widths up against the shrinkage: at 0.25 and 0.07 cost 0.08 was not reached in 30 epochs of CIFAR-10,
# at 0.1 cost 0.2 not in 60 of the digits; at 0.03 both were, in about a third of them
_SHRINKING_SHARE = 0.03


class WidthRates:
    """The present learning rate of every layer's widths, wherever schedulers and frameworks move it."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], named: Mapping[str, GaudiModule]):
        self._optimizers, self._named = optimizers, named
        self._places = self._found_places()
        self._layers = tuple(named.values())
        self._num_blocks = [layer.num_blocks for layer in self._layers]
        with on_host():
            layer_of = torch.arange(len(self._layers)).repeat_interleave(torch.tensor(self._num_blocks))
        self._layer_of = layer_of.to(self._layers[0].width_frac.device)  # of each block
        owners = [place[0] for place in self._places if place]
        if not owners:
            raise ValueError(
                "all widths are frozen: there is no structure to learn. Thaw some, or leave out the learner."
            )
        self.last_optimizer = next(o for o in reversed(optimizers) if any(o is owner for owner in owners))

    def _found_places(self) -> list[tuple[torch.optim.Optimizer, int] | None]:
        """By place, not by object: restoring an optimizer replaces its groups. None for frozen widths."""
        self._num_groups = self._count_groups()
        places = {
            id(p): (optimizer, index)
            for optimizer in self._optimizers
            for index, group in enumerate(optimizer.param_groups)
            for p in group["params"]
        }
        missing = [
            name
            for name, layer in self._named.items()
            if layer.width_frac.requires_grad and id(layer.width_frac) not in places
        ]
        if missing:
            raise ValueError(
                f"the optimizer does not hold the widths of {len(missing)} layers, {missing[0]!r} first; build it from "
                "`gblr.param_groups(model, ...)`, after sharding if the model is sharded, or freeze those layers."
            )
        return [places.get(id(layer.width_frac)) for layer in self._named.values()]

    def move(self, device: torch.device) -> None:
        self._layer_of = self._layer_of.to(device)

    def _count_groups(self) -> list[int]:
        return [len(optimizer.param_groups) for optimizer in self._optimizers]

    def trainable(self) -> list[bool]:
        """Of each layer, whether its widths learn now. Those that were frozen at first may have been given to the
        optimizer since, by `add_param_group`; groups may have been taken from it, too.
        """
        learns = [layer.width_frac.requires_grad for layer in self._layers]
        is_new = any(one and place is None for one, place in zip(learns, self._places, strict=True))
        if is_new or self._count_groups() != self._num_groups:
            self._places = self._found_places()
        return learns

    def full_shrinkage(self, total_steps: int) -> float:
        """The lambda_0 that would take a width from the whole axis to nothing in 3 % of the steps."""
        groups = [place[0].param_groups[place[1]] for place in self._places if place]
        lr = max(float(group.get("initial_lr", group["lr"])) for group in groups)
        if not lr > 0:
            raise ValueError(
                "the learning rate of the widths is 0 now, and `max_shrinkage` follows from it; pass "
                "`Budget(..., max_shrinkage=...)`, or make the learner before rates are warmed up."
            )
        return 1 / (_SHRINKING_SHARE * total_steps * lr)

    def gradient_sizes(self, like: Float[Tensor, "2 blocks"]) -> Float[Tensor, "2 blocks"]:
        """Root mean square of each width's gradient, as its optimizer keeps it; 0 where none came yet, or ever will."""
        squares, steps, betas = [], [], []
        for place, layer in zip(self._places, self._layers, strict=True):
            state = place[0].state.get(layer.width_frac, {}) if place else {}
            if place and layer.width_frac.grad is not None and "exp_avg_sq" not in state:
                self._found_places()  # tells if these widths are no longer the optimizer's
                raise ValueError(
                    f"{type(place[0]).__name__} keeps no mean square of gradients (`exp_avg_sq`), by which widths are "
                    'weighed; use Adam or AdamW for the structure, or `Budget(..., weights="equal")`.'
                )
            squares.append(state["exp_avg_sq"] if "exp_avg_sq" in state else torch.zeros_like(layer.width_frac))
            steps.append(state.get("step", 1.0))
            betas.append(place[0].param_groups[place[1]].get("betas", (0.0, 0.0))[1] if place else 0.0)
        mean = whole(side_by_side(squares, like.device)) / self._shares_seen(steps, betas, like)
        return mean.nan_to_num(0.0).sqrt()

    def _shares_seen(
        self, steps: Sequence[Any], betas: Sequence[float], like: Float[Tensor, "2 blocks"]
    ) -> Float[Tensor, " blocks"]:
        """How much of a mean square that began at 0 is there, 1 - beta2^step: Adam divides by it. Layers that begin to
        learn later than others would seem to matter less.
        """
        on_device = any(isinstance(step, Tensor) and not step.is_cpu for step in steps)  # captured, fused: never read
        device = like.device if on_device else torch.device("cpu")
        counts = [
            step.to(device, non_blocking=True)
            if isinstance(step, Tensor)
            else torch.full((), float(step), device=device)
            for step in steps
        ]
        exponents = torch.stack(torch._foreach_mul(counts, [math.log(max(float(beta), 1e-30)) for beta in betas]))
        return -exponents.expm1().to(like, non_blocking=True).index_select(0, self._layer_of)

    def lr(self, like: Float[Tensor, "2 blocks"]) -> Float[Tensor, "*s"]:
        """A number where all widths share it, else one per block."""
        rates = [place[0].param_groups[place[1]]["lr"] if place else 0.0 for place in self._places]
        first = rates[0]
        if any(isinstance(rate, Tensor) for rate in rates) or any(rate != first for rate in rates):
            parts = [
                (rate.to(like) if isinstance(rate, Tensor) else torch.full((), rate, device=like.device)).expand(n)
                for rate, n in zip(rates, self._num_blocks, strict=True)
            ]
            return torch.cat(parts)
        return torch.full((), first, device=like.device)


def unwrapped(optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
    """The optimizers themselves, out of the wrappers of Accelerate or Lightning."""
    given = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
    for i, one in enumerate(given):
        while not hasattr(one, "param_groups") or hasattr(one, "optimizer"):
            inner = getattr(one, "optimizer", None)
            if inner is None:
                raise TypeError(f"`optimizer` must be a torch optimizer or several; got {type(one).__name__}.")
            one = inner
        given[i] = one
    return given

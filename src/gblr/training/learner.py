"""Algorithm 1 inside `optimizer.step()`: after every real step widths shrink to the budget and sigma moves on."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gblr.layers.gaudi import GaudiModule
from gblr.ops.prox import budget_threshold
from gblr.ops.step import step_spectrum_at, step_table_at
from gblr.training.budget import Budget
from gblr.training.latency import LayerTime
from gblr.training.positions import PositionCounter, with_stand_ins
from gblr.training.prices import Prices, check_reachable, count_rest, mults_price, unit_prices
from gblr.training.processes import from_main, is_one_of_several, sum_over_processes
from gblr.training.schedules import SigmaSchedule, fall
from gblr.training.width_rates import WidthRates, unwrapped
from gblr.training.widths import Widths

Callback = Callable[[dict[str, float]], None]
_STATE_KEY = "gblr_learner"
_SMALL_GRADIENT = 1e-3  # of the mean: keeps the weight of a width without gradient finite
_MAX_WEIGHT = 10.0  # a width that matters little shrinks at most that much faster than the average one


class StructureLearner:
    """Hangs on `optimizer` and makes any training loop learn structure: two lines, and the budget is met.

    After each *real* optimizer step (not after a micro-batch, nor after one that a GradScaler skipped) widths are
    shrunk to the budget, locations wrapped and sigma advanced; over `total_steps` such steps the budget falls and the
    masks sharpen. From the share `budget.end` of the steps on, what hardening at the last sigma keeps of the widths is
    within the budget; a copy that is hardened before sigma gets there keeps soft edges besides and costs more.

    `optimizer` is the one that holds the widths, or several of which the last one with widths is stepped last.
    Layers are weighed by how many positions they see: counted in the first training step, or by running
    `example_inputs` (a tuple of arguments, or a dict of keyword arguments) at once; pass those for a compiled model
    that applies a layer several times, where calls are not seen. In a budget of multiplications a layer that no step
    has reached, one that the loss does not need or an expert without a token, is neither counted nor cut; from the
    step that reaches it on, it counts as much as the others do on average. `callback` gets `metrics()` after every
    `every` steps; reading them waits for the device.

    Widths that do not require gradients are left alone and paid for, from the step after they were frozen on. Steps
    that were captured before go on as they are.

    The state travels in `optimizer.state_dict()`: whatever saves and restores the optimizer resumes the learner too.

    >>> from gblr import GaudiLinear, param_groups
    >>> model = nn.Sequential(GaudiLinear(16, 16), nn.ReLU(), GaudiLinear(16, 4))
    >>> optimizer = torch.optim.AdamW(param_groups(model, lr=1e-3))
    >>> learner = StructureLearner(model, optimizer, Budget(relative_cost=0.25), total_steps=10)
    >>> for _ in range(10):
    ...     model(torch.randn(8, 16)).square().mean().backward()
    ...     optimizer.step()
    >>> learner.relative_cost <= 0.25
    True
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        budget: Budget,
        sigma: SigmaSchedule | None = None,
        total_steps: int = 0,
        example_inputs: Any = None,
        callback: Callback | None = None,
        every: int = 1,
    ):
        model = getattr(model, "_orig_mod", model)  # what torch.compile wraps: counting runs it as it is
        named = {name: module for name, module in model.named_modules() if isinstance(module, GaudiModule)}
        if not named:
            raise ValueError(
                "the model has no Gaudi layer; convert it first, e.g. `gblr.convert_(model, GaudiConfig(...))`."
            )
        if not isinstance(budget, Budget):
            raise TypeError(f"`budget` must be a gblr.Budget, such as Budget(relative_cost=0.3); got {budget!r}.")
        if not (sigma is None or isinstance(sigma, SigmaSchedule)):
            raise TypeError(f"`sigma` must be a gblr.SigmaSchedule, such as SigmaSchedule(1.0, 100.0); got {sigma!r}.")
        if total_steps < 1:
            raise ValueError(
                f"`total_steps` must be the number of optimizer steps to come, at least 1; got {total_steps}."
            )
        if every < 1:
            raise ValueError(f"`every` must be at least 1; got {every}.")
        self.budget, self.sigma, self.total_steps = budget, sigma or SigmaSchedule(), total_steps
        self.callback, self.every = callback, every
        self.layers = tuple(named.values())
        real = [name for name, layer in named.items() if not layer.rounding]
        if real and self.sigma.final == float("inf"):
            raise ValueError(
                f"layers with `rounding=False` cannot be hardened at sigma = inf ({real[0]!r}); use "
                "`SigmaSchedule(..., sharp=0.0)` with a finite last sigma."
            )
        self._rates = WidthRates(unwrapped(optimizer), named)
        self.optimizer = self._rates.last_optimizer
        if hasattr(self.optimizer, "_gblr_learner"):
            raise ValueError("this optimizer has a StructureLearner already; call its `remove()` first.")
        self._max_shrinkage = budget.max_shrinkage or 0.0
        if budget.method == "shrinkage" and budget.max_shrinkage is None:
            self._max_shrinkage = self._rates.full_shrinkage(total_steps)
        self._widths = Widths(self.layers, self.sigma.final)
        device = self._widths.device
        self._steps = torch.zeros((), dtype=torch.float64, device=device)  # on the device: a captured step counts too
        self._threshold = torch.zeros((), device=device)
        self._calls = 0
        self._rest = from_main(count_rest(model, named, budget, example_inputs))  # clocks and inputs may differ
        self._positions = None if self._rest.positions is None else list(self._rest.positions)
        self._prices: Prices | None = None
        self._start: Tensor | None = None
        self._counter: PositionCounter | None = None
        if self._positions is not None:
            self._settle(self._positions)
        self._set_sigma(force=True)
        self._handles = self._attach(self.optimizer)
        self._watch()

    def _attach(self, optimizer: torch.optim.Optimizer) -> list[Any]:
        optimizer._gblr_learner = self  # type: ignore[attr-defined]
        return [
            optimizer.register_step_post_hook(lambda *_: self._after_step()),
            optimizer.register_state_dict_post_hook(self._save_with),
            optimizer.register_load_state_dict_pre_hook(self._load_with),
        ]

    def remove(self) -> None:
        """Lets go of the optimizer: later steps change neither widths nor sigma."""
        self._stop_counting()
        for handle in self._handles:
            handle.remove()
        if self._handles:
            del self.optimizer._gblr_learner  # type: ignore[attr-defined]
        self._handles = []

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_handles": bool(self._handles), "_counter": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy goes on with the model and the optimizer that were copied with it, which have no hooks any more."""
        vars(self).update(state)
        was_attached, self._handles = self._handles, []
        if was_attached and not hasattr(self.optimizer, "_gblr_learner"):
            self._handles = self._attach(self.optimizer)
            self._watch()

    # -- one step ------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _after_step(self) -> None:
        self._follow(self.layers[0].width_frac.device)
        if self._counter is not None:
            self._take_counts(self._counter)
        if self._widths.set_trainable(self._trainable()):
            check_reachable(*self._settled())
        # a fused optimizer runs even when a GradScaler found infinities, and skips by this tensor
        skipped = getattr(self.optimizer, "found_inf", None)
        done = 1.0 if skipped is None else 1.0 - (skipped > 0).double().reshape(())
        self._steps += done
        before = self._widths.read()
        width = self._shrunk(before.clamp(0, 1))
        if skipped is not None:
            width = torch.where(skipped > 0, before, width)
        self._widths.write(width)
        self._widths.wrap_locations()
        self._set_sigma()
        self._calls += 1
        if self.callback and self._calls % self.every == 0:
            self.callback(self.metrics())

    def _follow(self, device: torch.device) -> None:
        """To where the model was moved after this was made, as trainers do: else every step would wait for the device,
        and processes that talk through NCCL could not tell each other their counts.
        """
        if device == self._widths.device or device.type == "mps":  # which has no float64
            return
        self._widths.move(device)
        self._rates.move(device)
        self._steps, self._threshold = self._steps.to(device), self._threshold.to(device)
        if self._prices is not None and self._start is not None:
            self._prices, self._start = self._prices.to(device), self._start.to(device)

    def _shrunk(self, width: Float[Tensor, "2 blocks"]) -> Float[Tensor, "2 blocks"]:
        """The proximal step (Eq. 9) with the threshold that the budget's method asks for."""
        prices, widths = self._settled()
        bound = self._bound()
        weight = self._weights()
        before, shrinkage = width, torch.zeros_like(self._threshold)
        if self.budget.method == "shrinkage":
            shrinkage = self._max_shrinkage * self._rates.lr(width)
            to_target = budget_threshold(width, weight * shrinkage, lambda w: widths.cost(w, prices.budget), bound)
            shrinkage = shrinkage * to_target.clamp(max=1)  # 0 below the target, and never past it
            width = (width - shrinkage * weight).clamp(min=0)
            bound = torch.where(self._part >= self.budget.last_share, bound, torch.inf)
        threshold = budget_threshold(width, weight, lambda w: widths.cost(w, prices.budget), bound)
        self._threshold.copy_(threshold + shrinkage.amax())
        return widths.keep_alive((width - threshold * weight).clamp(min=0), before)

    def _weights(self) -> Float[Tensor, "2 blocks"]:
        """How much of the threshold each width feels, 1 on average."""
        prices, widths = self._settled()
        if self.budget.weights == "equal":
            return widths.trainable
        if self.budget.weights == "price":
            return prices.weight * widths.trainable
        size = self._rates.gradient_sizes(widths.trainable) * widths.trainable
        count = widths.trainable.sum().clamp(min=1)
        weight = widths.trainable / (size / (size.sum() / count + 1e-30) + _SMALL_GRADIENT)
        return (weight / (weight.sum() / count + 1e-30)).clamp(1 / _MAX_WEIGHT, _MAX_WEIGHT) * widths.trainable

    def _bound(self) -> Tensor:
        """What the widths may cost now, in the budget's unit."""
        prices, _ = self._settled()
        assert self._start is not None
        target = torch.full_like(self._start, prices.target)
        if self.budget.method == "shrinkage":
            return target
        return fall(self._start, target, self._part, self.budget.start, self.budget.last_share, self.budget.shape)

    @property
    def _part(self) -> Tensor:
        return (self._steps / self.total_steps).clamp(max=1)

    @torch.no_grad()
    def _set_sigma(self, force: bool = False) -> None:
        if self.sigma.is_constant and not force:
            return
        sigma = self.sigma.at(self._part)
        kinds = {(n, layer.rounding) for layer in self.layers for n in layer._axes}
        tables = {
            (n, rounding): (step_table_at if rounding else step_spectrum_at)(n, sigma.double()).float()
            for n, rounding in sorted(kinds)
        }
        targets, values = [], []
        for layer in self.layers:
            row, col = ((n, layer.rounding) for n in layer._axes)
            targets += [layer.sigma, layer._row_table, layer._col_table]
            values += [sigma, tables[row], tables[col]]
        torch._foreach_copy_(targets, [value.to(target.device) for value, target in zip(values, targets, strict=True)])
        if not torch.compiler.is_compiling():  # compilers would guard the marks
            for layer in self.layers:
                layer.mark_tables()

    def _trainable(self) -> list[bool]:
        """Of each layer, whether its widths may be cut: those that learn, of layers that are counted."""
        counted = [True] * len(self.layers)
        if self.budget.relative_cost is not None and self._positions is not None:
            counted = [position > 0 for position in self._positions]
        return [learns and counts for learns, counts in zip(self._rates.trainable(), counted, strict=True)]

    def _take_counts(self, counter: PositionCounter) -> None:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return  # this step is not run, and others like it were counted
        found = [float(count) for count in counter.counts()]
        if is_one_of_several():  # batches may differ, and structure must not; alone, no step waits for the device
            counts = torch.tensor(found, dtype=torch.float64, device=self._widths.device)
            found = sum_over_processes(counts).tolist()
        if self._positions is not None:
            self._take_late_counts(found)
        elif any(found):
            self._settle(found)
        else:  # an empty batch: layers count equally in this step, and the next one is counted
            self._weigh([1.0] * len(self.layers))

    def _take_late_counts(self, found: Sequence[float]) -> None:
        """Of the layers that no step had reached before this one."""
        assert self._positions is not None and self._start is not None
        if not any(found):
            return
        counts, late = with_stand_ins(self._positions), iter(found)
        positions = [p or (count if next(late) else 0.0) for p, count in zip(self._positions, counts, strict=True)]
        width, before = self._widths.read().clamp(0, 1), self._settled()[0].budget
        start = self._start - self._widths.cost(width, before)
        self._settle(positions)
        self._start = start + self._widths.cost(width, self._settled()[0].budget)  # as if it had been there

    def _settle(self, positions: Sequence[float], start: float | None = None) -> None:
        """Positions are known: now layers can be weighed against each other. Those without any are watched further."""
        self._positions = list(positions)
        self._weigh(self._positions, start)
        self._watch()

    def _watch(self) -> None:
        """Counts the positions of layers that no step has reached yet."""
        self._stop_counting()
        known = self._positions or [0.0] * len(self.layers)
        unreached = [layer for layer, position in zip(self.layers, known, strict=True) if not position]
        self._counter = PositionCounter(unreached) if unreached else None

    def _weigh(self, positions: Sequence[float], start: float | None = None) -> None:
        self._widths.set_trainable(self._trainable())
        self._prices = unit_prices(self.budget, self._widths, positions, self._rest)
        width = self._widths.read().clamp(0, 1)
        cost = self._widths.cost(width, self._prices.budget)
        self._start = cost if start is None else torch.full_like(cost, start)

    def _stop_counting(self) -> None:
        if self._counter is not None:
            self._counter.stop()
        self._counter = None

    def _settled(self) -> tuple[Prices, Widths]:
        assert self._prices is not None
        return self._prices, self._widths

    # -- what it knows -------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return int(self._steps)

    @property
    def is_done(self) -> bool:
        """Whether the model, hardened now, would meet the budget: the bound and sigma are at their last values."""
        last = self.sigma.at(torch.ones_like(self._part))  # as the layers have it, in float32
        return float(self._part) >= self.budget.last_share and float(self.layers[0].sigma) == float(last)

    @property
    def relative_cost(self) -> float:
        """Multiplications of the Gaudi layers over those of their dense originals, as hardening will leave them at the
        last sigma.

        Layers count as often as they are applied; until the first step, without `example_inputs`, all equally.
        """
        positions = self._positions or [1.0] * len(self.layers)
        price = mults_price(self._widths, positions)
        dense = sum(p * layer.out_features * layer.in_features for p, layer in zip(positions, self.layers, strict=True))
        return float(self._widths.hardened_cost(self._widths.read(), price)) / dense

    def metrics(self) -> dict[str, float]:
        """Cost, live blocks, mean width (of the axis, over live blocks), sigma, threshold of the last step."""
        width = self._widths.read()
        live = self._widths.sizes(width)[0] > 0
        fractions = (self._widths.rounded(width) / self._widths.length)[:, live]
        return {
            "step": self.step,
            "relative_cost": self.relative_cost,
            "live_blocks": int(live.sum()),
            "mean_width": float(fractions.mean()) if fractions.numel() else 0.0,
            "sigma": float(self.layers[0].sigma),
            "threshold": float(self._threshold),
        }

    # -- its state -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers. Widths, locations and sigma are the model's own state."""
        return {
            "step": self.step,
            "total_steps": self.total_steps,
            "counts": self.budget.counts,
            "positions": self._positions,
            "start": None if self._positions is None or self._start is None else float(self._start),
            "max_shrinkage": self._max_shrinkage,
            "layer_times": [list(astuple(time)) for time in self._rest.layer_times],
            "seconds_outside": self._rest.seconds,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        positions = state["positions"]
        if positions is not None and len(positions) != len(self.layers):
            raise ValueError(
                f"the state is of a model with {len(positions)} Gaudi layers; this one has {len(self.layers)}."
            )
        if state["total_steps"] != self.total_steps:
            raise ValueError(
                f"the state is of a run of {state['total_steps']} steps; this learner was made for {self.total_steps}. "
                "Schedules would jump: give the same `total_steps`."
            )
        if state.get("counts", self.budget.counts) != self.budget.counts:
            raise ValueError(
                f"the state is of a budget by `{state['counts']}`; this one is by `{self.budget.counts}`, so that its "
                "numbers mean something else. Continue with a budget of the same kind."
            )
        self._steps.fill_(state["step"])
        self._calls = state["step"]
        self._max_shrinkage = state["max_shrinkage"]  # of the rates at the beginning
        # measured once: a second measurement would differ, and with it the rest of the run
        times = tuple(LayerTime(*time) for time in state["layer_times"])
        self._rest = replace(self._rest, layer_times=times, seconds=state["seconds_outside"])
        if positions is not None:
            self._settle(positions, state["start"])
        self._set_sigma(force=True)

    def _save_with(self, optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
        return state | {_STATE_KEY: self.state_dict()}

    def _load_with(self, optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
        if _STATE_KEY in state:
            self.load_state_dict(state[_STATE_KEY])
        return {key: value for key, value in state.items() if key != _STATE_KEY}

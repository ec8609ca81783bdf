"""Structure and content by block coordinate descent: each block in turn gets its best intervals and contents, exactly.

Minimises ||W - sum_k u_k^T v_k||^2 + price * cost. With the other blocks fixed and u_k given, the best v_k on *any*
interval of columns is known in closed form, so the best interval is found by search (`intervals.py`, `metric.py`);
then the rows likewise. After each sweep over the blocks the intervals are trimmed to a budget that falls to its
target over the first half of the sweeps, and at the end widened to it again (`spend.py`). It is faster and better than
AdamW on Gaudi masks (`gradient.py`): docs/fitting.md has the figures.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from gblr.fitting.blocks import Blocks
from gblr.fitting.graphs import captured
from gblr.fitting.intervals import best_interval, interval_mask, of_block
from gblr.fitting.metric import Metric, Prepared
from gblr.fitting.solve import factor_of, never_waits
from gblr.fitting.spend import trim, widen

_RAMP = 0.5  # share of the sweeps in which the budget falls; 0.3 to 0.7 made no difference
_PRICE_POWER = 0.5  # how the price follows the cost: 0 to 1 made little difference, as trimming does the exact part
_FINAL_REFITS = 2


def descend(
    weight: Float[Tensor, "b out in"],
    metric: Metric,
    blocks: Blocks,
    budget: Float[Tensor, " b"],
    price: Float[Tensor, " b"],
    sweeps: int,
    align: int = 1,
    on_sweep: Callable[[], None] = lambda: None,
) -> Blocks:
    """Improves `blocks` and brings their cost to `budget`. Blocks that are dead are seeded from the residual."""
    price = price.clone()
    state = _State(blocks.clone(), torch.empty_like(weight), price)
    visit = _Visits(state, metric, align)
    start_budget = budget
    for sweep in range(sweeps):
        blocks, worth = state.blocks, state.worth
        torch.sub(weight, blocks.product(), out=state.residual)
        _seed_dead(blocks, state.residual)
        visit.all_blocks()
        cost = blocks.cost()
        if sweep == 0:
            start_budget = torch.maximum(cost.to(budget), budget)
        part = min(1.0, (sweep + 1) / (_RAMP * sweeps))
        target = budget + (1 - part) ** 2 * (start_budget - budget)
        blocks.copy_(trim(blocks, worth, target, align))
        price *= (cost / target).clamp(0.5, 2.0) ** _PRICE_POWER
        on_sweep()
    settled = refit(weight, metric, state.blocks, 1)
    return refit(weight, metric, widen(weight, metric, settled, budget, align), _FINAL_REFITS)


def refit(weight: Tensor, metric: Metric, blocks: Blocks, sweeps: int) -> Blocks:
    """Contents alone: the intervals stay as they are."""
    state = _State(blocks.clone(), weight - blocks.product(), None)
    visit = _Visits(state, metric, 1, metric.prepare(blocks.col_start, blocks.col_size))
    for _ in range(sweeps):
        visit.all_blocks()
    return state.blocks


@dataclass
class _State:
    """What a visit of a block reads and overwrites. `worth` says what each row and column of each block adds."""

    blocks: Blocks
    residual: Float[Tensor, "b out in"]
    price: Float[Tensor, " b"] | None  # per element; None keeps the intervals as they are

    def __post_init__(self) -> None:
        self.worth = torch.zeros_like(self.blocks.u[:, :, 0]), torch.zeros_like(self.blocks.v[:, :, 0])

    def clone(self) -> "_State":
        return _State(self.blocks.clone(), self.residual.clone(), None if self.price is None else self.price.clone())


class _Visits:
    """One block after the other. On a GPU a visit is a hundred kernels of a few microseconds, far less than it takes to
    launch them: they are captured once as a CUDA graph, which reads from the device whose turn it is.
    """

    def __init__(self, state: _State, metric: Metric, align: int, prepared: Prepared | None = None):
        self.state, self.metric, self.align, self.prepared = state, metric, align, prepared
        self.num_blocks = state.blocks.u.shape[1]
        can_be = never_waits(state.blocks.block_rank, state.residual.device)
        can_be = can_be and (prepared is None or prepared.knows_turns)
        self.graph = self._captured() if can_be and self.num_blocks > 2 else None

    def all_blocks(self) -> None:
        for part in self.state.worth:
            part.zero_()
        if self.graph is None:
            for k in range(self.num_blocks):
                self._update(self.state, k)
            return
        self.turn.zero_()
        for _ in range(self.num_blocks):
            self.graph.replay()

    def _update(self, state: _State, k: int | Tensor) -> None:
        _update(state, k, self.metric, self.align, self.prepared)

    def _captured(self) -> Any:
        self.turn = torch.zeros(1, dtype=torch.long, device=self.state.residual.device)

        def visit() -> None:
            self._update(self.state, self.turn)
            self.turn.add_(1)

        # once before: kernels are loaded and work spaces made
        return captured(visit, lambda: self._update(self.state.clone(), self.turn), self.turn.device)


def _update(state: _State, k: int | Tensor, metric: Metric, align: int, prepared: Prepared | None = None) -> None:
    """Gives block k its best columns for its rows, then its best rows for those columns; intervals that are `prepared`
    stay.

    A tensor of one number, for graphs, says k on the device.
    """
    blocks, residual, price = state.blocks, state.residual, state.price
    u, v = of_block(blocks.u, k), of_block(blocks.v, k)  # (b, r, out), (b, r, in)
    target = _add_(residual, u, v)  # what block k has to explain
    factor = factor_of(u, u)
    wanted = factor.divide(u @ target)
    if prepared is not None:
        content = prepared.restrict(wanted, k)
        col_worth = content.square().sum(1)
    else:
        assert price is not None
        content, start, size, col_worth = metric.project(wanted, price * blocks.block_rank, align)
        _put(blocks.col_start, k, start)
        _put(blocks.col_size, k, size)
    v = factor.divide(content, transposed=True)

    weighted = metric.times(v)
    factor = factor_of(weighted, v)
    wanted = factor.divide((target @ weighted.mT).mT)  # weighted @ target.mT is slower for a single row
    row_worth = wanted.square().sum(1)
    if prepared is None:
        assert price is not None
        start, size = best_interval(row_worth, price * blocks.block_rank, align)
        _put(blocks.row_start, k, start)
        _put(blocks.row_size, k, size)
    row_size = of_block(blocks.row_size, k)
    inside = interval_mask(of_block(blocks.row_start, k), row_size, wanted.shape[-1])
    u = factor.divide(wanted * inside[:, None], transposed=True)

    live = ((row_size > 0) & (of_block(blocks.col_size, k) > 0))[:, None, None]
    u, v = u * live, v * live
    for place, value in ((blocks.u, u), (blocks.v, v), (state.worth[0], row_worth), (state.worth[1], col_worth)):
        _put(place, k, value)
    _add_(target, u, v, -1)


def _put(of_blocks: Tensor, k: int | Tensor, value: Tensor) -> None:
    if isinstance(k, int):
        of_blocks[:, k] = value
    else:
        of_blocks.index_copy_(1, k, value[:, None])


def _add_(
    to: Float[Tensor, "b out in"], u: Float[Tensor, "b r out"], v: Float[Tensor, "b r in"], sign: int = 1
) -> Tensor:
    """Adds u^T v in place."""
    return to.addcmul_(u.mT, v, value=sign) if u.shape[1] == 1 else to.baddbmm_(u.mT, v, alpha=sign)


def _seed_dead(blocks: Blocks, residual: Tensor) -> None:
    """Points the rows of dead blocks at the rows that are explained worst, each block at others, so that they can
    live.
    """
    dead = ~blocks.live  # (b, k)
    if not bool(dead.any()):
        return
    worst = residual.square().sum(2).argsort(1, descending=True)  # (b, out)
    turn = (dead.cumsum(1) - 1).clamp(min=0)[:, :, None] * blocks.block_rank
    index = (turn + torch.arange(blocks.block_rank, device=dead.device)) % worst.shape[1]  # (b, k, r)
    rows = worst.gather(1, index.flatten(1)).view_as(index)
    seed = torch.zeros_like(blocks.u).scatter_(3, rows[..., None], 1.0)
    blocks.u.copy_(torch.where(dead[:, :, None, None], seed, blocks.u))
    blocks.v.masked_fill_(dead[:, :, None, None], 0.0)

"""Structure and content by block coordinate descent: each block in turn gets its best intervals and contents, exactly.

Minimises ||W - sum_k u_k^T v_k||^2 + price * cost. With the other blocks fixed and u_k given, the best v_k on *any*
interval of columns is known in closed form, so the best interval is found by search (`intervals.py`, `metric.py`);
then the rows likewise. After each sweep over the blocks the intervals are trimmed to a budget that falls to its
target over the first half of the sweeps. It is faster and better than AdamW on Gaudi masks (`gradient.py`):
docs/fitting.md has the figures.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from gblr.fitting.blocks import Blocks
from gblr.fitting.intervals import best_interval, interval_mask
from gblr.fitting.metric import Metric

_JITTER = 1e-6  # of the mean diagonal: keeps a block whose rows have become dependent solvable
_RAMP = 0.5  # share of the sweeps in which the budget falls; 0.3 to 0.7 made no difference
_PRICE_POWER = 0.5  # how the price follows the cost: 0 to 1 made little difference, as trimming does the exact part
_BISECTIONS = 20
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
    """Improves `blocks` and brings their cost down to `budget`. Blocks that are dead are seeded from the residual."""
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
    return refit(weight, metric, state.blocks, _FINAL_REFITS)


def refit(weight: Tensor, metric: Metric, blocks: Blocks, sweeps: int) -> Blocks:
    """Contents alone: the intervals stay as they are."""
    state = _State(blocks.clone(), weight - blocks.product(), None)
    longest = blocks.col_size.amax(0).tolist()  # once: a look at each visit would make a GPU wait every time
    for _ in range(sweeps):
        for k, length in enumerate(longest):
            _update(state, k, metric, 1, length)
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
    """One block after the other. On a GPU a visit to a block of rank 1 is some forty kernels of a few microseconds, far
    less than it takes to launch them: they are captured once as a CUDA graph, which reads from the device whose turn it
    is.
    """

    def __init__(self, state: _State, metric: Metric, align: int):
        self.state, self.metric, self.align = state, metric, align
        self.num_blocks = state.blocks.u.shape[1]
        captures = state.residual.is_cuda and state.blocks.block_rank == 1
        self.graph = self._captured() if captures and self.num_blocks > 1 else None

    def all_blocks(self) -> None:
        for part in self.state.worth:
            part.zero_()
        if self.graph is None:
            for k in range(self.num_blocks):
                _update(self.state, k, self.metric, self.align)
            return
        self.turn.zero_()
        for _ in range(self.num_blocks):
            self.graph.replay()

    def _captured(self) -> Any:
        device = self.state.residual.device
        self.turn = torch.zeros(1, dtype=torch.long, device=device)
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):  # kernels are loaded and work spaces made before the capture
            _update(self.state.clone(), self.turn, self.metric, self.align)
        torch.cuda.current_stream(device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            _update(self.state, self.turn, self.metric, self.align)
            self.turn += 1
        return graph


def trim(blocks: Blocks, worth: tuple[Tensor, Tensor], budget: Float[Tensor, " b"], align: int) -> Blocks:
    """Shortens the intervals, where their contents matter least, until the cost is at most `budget`.

    `worth` says for rows and for columns what the error loses by each element of each block, (b, k, out) and (b, k,
    in). Each interval keeps its best part at the one price per element that meets the budget, found by bisection.
    """
    inside = (
        interval_mask(blocks.row_start, blocks.row_size, blocks.u.shape[-1]),
        interval_mask(blocks.col_start, blocks.col_size, blocks.v.shape[-1]),
    )
    row_worth, col_worth = (w * i / blocks.block_rank for w, i in zip(worth, inside, strict=True))

    def at(price: Tensor) -> Blocks:
        prices = price[:, None].expand(blocks.live.shape)
        row_start, row_size = best_interval(row_worth, prices, align)
        col_start, col_size = best_interval(col_worth, prices, align)
        return Blocks(blocks.u, blocks.v, row_start, row_size, col_start, col_size)

    low, high = torch.zeros_like(budget), torch.maximum(row_worth.amax((1, 2)), col_worth.amax((1, 2))).to(budget) * 2
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        over = at(middle).cost() > budget
        low, high = torch.where(over, middle, low), torch.where(over, high, middle)
    return blocks.where(blocks.cost() <= budget, at(high)).masked()


def element_worth(blocks: Blocks, metric: Metric) -> tuple[Float[Tensor, "b k out"], Float[Tensor, "b k in"]]:
    """Of contents as they stand: u_i^T (V G V^T) u_i for rows, exactly; v_j^T (U U^T) v_j G_jj for columns."""
    weighted = metric.times(blocks.v.flatten(1, 2)).view_as(blocks.v)
    rows = torch.einsum("bkrm,bkrs,bksm->bkm", blocks.u, weighted @ blocks.v.mT, blocks.u)
    cols = torch.einsum("bkrn,bkrs,bksn->bkn", blocks.v, blocks.u @ blocks.u.mT, blocks.v)
    return rows, cols * metric.importance


def _update(state: _State, k: int | Tensor, metric: Metric, align: int, longest: int = 0) -> None:
    """Gives block k its best columns for its rows, then its best rows for those columns.

    A tensor of one number, for graphs, says k on the device. `longest` is that of the block's intervals of columns, for
    intervals that stay.
    """
    blocks, residual, price = state.blocks, state.residual, state.price
    u, v = _at(blocks.u, k), _at(blocks.v, k)  # (b, r, out), (b, r, in)
    target = _add_(residual, u, v)  # what block k has to explain
    factor = _factor(u, u)
    wanted = _divide(factor, u @ target)
    if price is None:
        content = metric.restrict(wanted, _at(blocks.col_start, k), _at(blocks.col_size, k), longest)
        col_worth = content.square().sum(1)
    else:
        content, start, size, col_worth = metric.project(wanted, price * blocks.block_rank, align)
        _put(blocks.col_start, k, start)
        _put(blocks.col_size, k, size)
    v = _divide(factor, content, transposed=True)

    weighted = metric.times(v)
    factor = _factor(weighted, v)
    wanted = _divide(factor, (target @ weighted.mT).mT)  # weighted @ target.mT is slower for a single row
    row_worth = wanted.square().sum(1)
    if price is not None:
        start, size = best_interval(row_worth, price * blocks.block_rank, align)
        _put(blocks.row_start, k, start)
        _put(blocks.row_size, k, size)
    row_size = _at(blocks.row_size, k)
    inside = interval_mask(_at(blocks.row_start, k), row_size, wanted.shape[-1])
    u = _divide(factor, wanted * inside[:, None], transposed=True)

    live = ((row_size > 0) & (_at(blocks.col_size, k) > 0))[:, None, None]
    u, v = u * live, v * live
    for place, value in ((blocks.u, u), (blocks.v, v), (state.worth[0], row_worth), (state.worth[1], col_worth)):
        _put(place, k, value)
    _add_(target, u, v, -1)


def _at(of_blocks: Tensor, k: int | Tensor) -> Tensor:
    return of_blocks[:, k] if isinstance(k, int) else of_blocks.index_select(1, k)[:, 0]


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


def _factor(a: Float[Tensor, "b r n"], b: Float[Tensor, "b r n"]) -> Float[Tensor, "b r r"]:
    """Cholesky factor of a b^T, symmetric and positive up to rounding; in float64, as rows may be nearly dependent.

    Whether there is one is not asked, for which a GPU would have to wait: NaN in a fit makes another one the best.
    """
    if a.shape[1] == 1:
        return (a * b).sum(2, keepdim=True).clamp(min=1e-30).sqrt()
    gram = a.double() @ b.double().mT
    gram = (gram + gram.mT) / 2
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    jitter = _JITTER * diagonal.mean(-1, keepdim=True).clamp(min=0) + 1e-30
    factor, _ = torch.linalg.cholesky_ex(gram + torch.diag_embed(jitter.expand_as(diagonal)))
    return factor.to(a.dtype)


def _divide(factor: Float[Tensor, "b r r"], x: Float[Tensor, "b r n"], transposed: bool = False) -> Tensor:
    """factor^-1 x, or factor^-T x, for a lower triangular factor; no LAPACK for rank 1, where a call costs most of
    it.
    """
    if factor.shape[1] == 1:
        return x / factor
    return torch.linalg.solve_triangular(factor.mT if transposed else factor, x, upper=transposed)


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

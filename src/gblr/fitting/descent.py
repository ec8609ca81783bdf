"""Structure and content by block coordinate descent: each block in turn gets its best intervals and contents, exactly.

Minimises ||W - sum_k u_k^T v_k||^2 + price * cost. With the other blocks fixed and u_k given, the best v_k on *any*
interval of columns is known in closed form, so the best interval is found by search (`intervals.py`, `metric.py`);
then the rows likewise. After each sweep over the blocks the intervals are trimmed to a budget that falls to its
target over the first half of the sweeps. It is faster and better than AdamW on Gaudi masks (`gradient.py`):
docs/fitting.md has the figures.
"""

from collections.abc import Callable

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
    blocks = blocks.clone()
    start_budget = budget
    for sweep in range(sweeps):
        residual = weight - blocks.product()
        _seed_dead(blocks, residual)
        worth = torch.zeros_like(blocks.u[:, :, 0]), torch.zeros_like(blocks.v[:, :, 0])
        for k in range(blocks.u.shape[1]):
            residual, worth[0][:, k], worth[1][:, k] = _update(blocks, k, residual, metric, price, align)
        cost = blocks.cost()
        if sweep == 0:
            start_budget = torch.maximum(cost.to(budget), budget)
        part = min(1.0, (sweep + 1) / (_RAMP * sweeps))
        target = budget + (1 - part) ** 2 * (start_budget - budget)
        blocks = trim(blocks, worth, target, align)
        price = price * (cost / target).clamp(0.5, 2.0) ** _PRICE_POWER
        on_sweep()
    return refit(weight, metric, blocks, _FINAL_REFITS)


def refit(weight: Tensor, metric: Metric, blocks: Blocks, sweeps: int) -> Blocks:
    """Contents alone: the intervals stay as they are."""
    blocks = blocks.clone()
    residual = weight - blocks.product()
    for _ in range(sweeps):
        for k in range(blocks.u.shape[1]):
            residual, _, _ = _update(blocks, k, residual, metric, None, 1)
    return blocks


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


def _update(
    blocks: Blocks, k: int, residual: Tensor, metric: Metric, price: Tensor | None, align: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gives block k its best columns for its rows, then its best rows for those columns.

    Returns the new residual (the old one is overwritten) and the worth of each row and column. Without a `price` the
    intervals stay as they are.
    """
    u, v = blocks.u[:, k], blocks.v[:, k]  # (b, r, out), (b, r, in)
    target = _add_(residual, u, v)  # what block k has to explain
    factor = _factor(u, u)
    wanted = _divide(factor, u @ target)
    if price is None:
        content = metric.restrict(wanted, blocks.col_start[:, k], blocks.col_size[:, k])
        col_worth = content.square().sum(1)
    else:
        content, start, size, col_worth = metric.project(wanted, price * blocks.block_rank, align)
        blocks.col_start[:, k], blocks.col_size[:, k] = start, size
    v = _divide(factor, content, transposed=True)

    weighted = metric.times(v)
    factor = _factor(weighted, v)
    wanted = _divide(factor, (target @ weighted.mT).mT)  # weighted @ target.mT is slower for a single row
    row_worth = wanted.square().sum(1)
    if price is not None:
        start, size = best_interval(row_worth, price * blocks.block_rank, align)
        blocks.row_start[:, k], blocks.row_size[:, k] = start, size
    inside = interval_mask(blocks.row_start[:, k], blocks.row_size[:, k], wanted.shape[-1])
    u = _divide(factor, wanted * inside[:, None], transposed=True)

    live = blocks.live[:, k, None, None]
    u, v = u * live, v * live
    blocks.u[:, k], blocks.v[:, k] = u, v
    return _add_(target, u, v, -1), row_worth, col_worth


def _add_(
    to: Float[Tensor, "b out in"], u: Float[Tensor, "b r out"], v: Float[Tensor, "b r in"], sign: int = 1
) -> Tensor:
    """Adds u^T v in place."""
    return to.addcmul_(u.mT, v, value=sign) if u.shape[1] == 1 else to.baddbmm_(u.mT, v, alpha=sign)


def _factor(a: Float[Tensor, "b r n"], b: Float[Tensor, "b r n"]) -> Float[Tensor, "b r r"]:
    """Cholesky factor of a b^T, symmetric and positive up to rounding; in float64, as rows may be nearly dependent."""
    if a.shape[1] == 1:
        return (a * b).sum(2, keepdim=True).clamp(min=1e-30).sqrt()
    gram = a.double() @ b.double().mT
    gram = (gram + gram.mT) / 2
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    jitter = _JITTER * diagonal.mean(-1, keepdim=True).clamp(min=0) + 1e-30
    return torch.linalg.cholesky(gram + torch.diag_embed(jitter.expand_as(diagonal))).to(a.dtype)


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

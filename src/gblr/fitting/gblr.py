"""A trained weight as a GBLR matrix: a start (Algorithm 2, SVD or full), then refinement; never worse than the SVD."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from gblr.fitting.allocate import Choice, choices_from
from gblr.fitting.blocks import Blocks
from gblr.fitting.config import GaudiConfig
from gblr.fitting.correlation import correlation_start
from gblr.fitting.descent import descend, refit
from gblr.fitting.fit import fit_batch, num_ticks, rank_choices
from gblr.fitting.gauge import (
    Sides,
    even_block,
    triangular_blocks,
    triangular_cost,
    triangular_rank,
    turned_blocks,
)
from gblr.fitting.gradient import refine_by_gradient
from gblr.fitting.metric import Metric, make_metric
from gblr.fitting.spend import element_worth, trim
from gblr.fitting.svd import balance, squared_error, weighted_svd
from gblr.fitting.threads import Tick, shared_out
from gblr.matrices.base import StructuredMatrix
from gblr.matrices.gblr import GBLRMatrix

_SWEEPS = (
    12  # 24 gain another 0.6 % of error on MiniLM for twice the time; fewer, larger blocks are cheap: twice as many
)
_REFIT_SWEEPS = 8  # on MiniLM the error of 24 from scratch; 4 leave 1 % more
_GRADIENT_STEPS = 300
# The SVD start has this many times the rank that the budget affords: blocks shrink, so more of them fit.
_EXTRA_RANK = 2.0
_TRIANGULAR_GROWTH = 10.0  # two triangular factors of trained weights are many times larger than their product


@num_ticks.register
def _(config: GaudiConfig) -> int:
    return _num_steps(config)


def _num_steps(config: GaudiConfig) -> int:
    if config.refine == "none":
        return 0
    if config.steps is not None:
        return config.steps
    if config.refine == "gradient":
        return _GRADIENT_STEPS
    return _SWEEPS if config.block_rank == 1 else 2 * _SWEEPS


@fit_batch.register
def _(
    config: GaudiConfig,
    weight: Float[Tensor, "b out in"],
    gram: Float[Tensor, "b in in"] | None,
    budget: Float[Tensor, " b"],
    tick: Tick = lambda: None,
) -> list[StructuredMatrix]:
    steps, config = _num_steps(config), config.for_shape(weight.shape[1], weight.shape[2])
    check_budget(config, weight, budget)
    return list(_fit(config, _Wanted(weight, gram, budget), steps, tick))


@rank_choices.register
def _(config: GaudiConfig, shape: tuple[int, int]) -> list[Choice]:
    """Rank 1, then whole blocks: in triangular form, where a rank costs the less the higher it is."""
    config = config.for_shape(*shape)
    r, align = config.block_rank, config.align
    most = min(shape) // r
    blocks = range(1, min(config.num_blocks or most, most) + 1)
    if config.refine == "descent" and _can_be_triangular(config, shape):
        sides = _triangular_sides(config)
        whole = [Choice(r * count, triangular_cost(r * count, shape, r, align, sides)) for count in blocks]
    else:
        whole = [Choice(r * count, r * count * sum(shape)) for count in blocks]
    choices = [Choice(1, sum(shape)), *(choice for choice in whole if choice.rank > 1)]
    return choices_from(_smallest(config), choices)


def refit_batch(
    config: GaudiConfig,
    weight: Float[Tensor, "b out in"],
    gram: Float[Tensor, "b in in"] | None,
    budget: Float[Tensor, " b"],
    start: Blocks,
) -> list[GBLRMatrix]:
    """As `fit_batch`, from blocks that were fitted to nearly this weight: a few sweeps are enough then."""
    return _fit(config, _Wanted(weight, gram, budget, start), _REFIT_SWEEPS)


@dataclass(frozen=True)
class _Wanted:
    """Matrices of one shape to fit, and where their blocks start if that is known."""

    weight: Float[Tensor, "b out in"]
    gram: Float[Tensor, "b in in"] | None
    budget: Float[Tensor, " b"]
    start: Blocks | None = None

    def __getitem__(self, some: slice) -> "_Wanted":
        gram = None if self.gram is None else self.gram[some]
        return _Wanted(self.weight[some], gram, self.budget[some], None if self.start is None else self.start[some])


def _fit(config: GaudiConfig, wanted: _Wanted, steps: int, tick: Tick = lambda: None) -> list[GBLRMatrix]:
    if config.refine == "gradient":
        return _fit_together(config, wanted, steps, tick)  # its noise is drawn for all at once
    return shared_out(lambda share, tick: _fit_together(config, wanted[share], steps, tick), wanted.weight, tick)


def _fit_together(config: GaudiConfig, wanted: _Wanted, steps: int, tick: Tick) -> list[GBLRMatrix]:
    weight, gram, budget = wanted.weight, wanted.gram, wanted.budget
    u, s, v = weighted_svd(weight, gram)
    metric = make_metric(gram, config.align)
    rank = (budget / (weight.shape[1] + weight.shape[2])).long()
    blocks = _start(config, weight, u, v, rank, budget) if wanted.start is None else wanted.start
    last = (rank - 1).clamp(0, s.shape[1] - 1)
    price = s.gather(1, last[:, None]).squeeze(1).square() / (weight.shape[1] + weight.shape[2])
    if config.refine == "gradient":
        blocks = refine_by_gradient(weight, metric, blocks, budget, steps, config.align, tick)
    elif config.refine == "descent" and steps > 0:
        blocks = descend(weight, metric, blocks, budget, price, steps, config.align, tick)
    else:
        blocks = trim(blocks, element_worth(blocks, metric), budget, config.align)
    svd = _svd_blocks(config, u, v, budget)
    candidates = [svd, blocks]
    if config.refine == "descent":
        aligned = _can_be_triangular(config, (weight.shape[1], weight.shape[2]))
        low_rank = _triangular_blocks(config, u, v, budget) if aligned else svd
        candidates += [low_rank, _with_rest(config, weight, metric, low_rank, u, v, budget, steps)]
    blocks = _best(weight, gram, candidates, budget, config.max_growth)
    blocks.u, blocks.v = even_block(blocks.u, blocks.v)
    return blocks.to_matrices()


def check_budget(config: GaudiConfig, weight: Tensor, budget: Tensor) -> None:
    """At least one block of the smallest size must fit."""
    smallest = _smallest(config)
    if bool((budget < smallest).any()):
        dense = weight.shape[1] * weight.shape[2]
        raise ValueError(
            f"`relative_cost` is too small for a {weight.shape[1]} x {weight.shape[2]} weight: one block of rank "
            f"{config.block_rank} and width {config.align} takes {smallest / dense:.4f} of the dense cost. "
            "Raise `relative_cost`, or lower `block_rank` or `align`."
        )


def _smallest(config: GaudiConfig) -> int:
    """Multiplications of one block, as narrow as blocks may be."""
    return 2 * config.align * config.block_rank


def _start(config: GaudiConfig, weight: Tensor, u: Tensor, v: Tensor, rank: Tensor, budget: Tensor) -> Blocks:
    r = config.block_rank
    most = _most_blocks(config, u, v)
    wanted = (_EXTRA_RANK * rank / r).ceil().long().clamp(1, most)
    num_blocks = int(wanted.max()) if config.init == "low_rank" else most
    blocks_u, blocks_v = (_as_blocks(side, num_blocks, r) for side in balance(u, v))
    if config.init == "correlation":
        ratio, std = config.threshold_ratio, config.smoothing_std
        return correlation_start(weight, blocks_u, blocks_v, budget, std, ratio, config.align)
    num_live = wanted if config.init == "low_rank" else torch.full_like(wanted, most)
    return Blocks.full(blocks_u, blocks_v, num_live)


def _most_blocks(config: GaudiConfig, u: Tensor, v: Tensor) -> int:
    return config.num_blocks or max(1, min(u.shape[2], v.shape[2]) // config.block_rank)


def _as_blocks(rows: Float[Tensor, "b q n"], num_blocks: int, block_rank: int) -> Float[Tensor, "b k r n"]:
    """Singular vectors in order, `block_rank` to a block; zeros where there are not enough."""
    missing = max(0, num_blocks * block_rank - rows.shape[1])
    rows = torch.nn.functional.pad(rows, (0, 0, 0, missing))
    return rows[:, : num_blocks * block_rank].unflatten(1, (num_blocks, block_rank))


def _svd_blocks(config: GaudiConfig, u: Tensor, v: Tensor, budget: Tensor) -> Blocks:
    """The truncated SVD, which is a GBLR matrix of full blocks."""
    r = config.block_rank
    num_live = (budget / (r * (u.shape[2] + v.shape[2]))).long().clamp(max=_most_blocks(config, u, v))
    num_blocks = max(1, int(num_live.max()))
    return Blocks.full(_as_blocks(u, num_blocks, r), _as_blocks(v, num_blocks, r), num_live)


def _triangular_blocks(config: GaudiConfig, u: Tensor, v: Tensor, budget: Tensor) -> Blocks:
    """A truncated SVD of higher rank, which the zeros of its triangular factors pay for."""
    r, align, sides = config.block_rank, config.align, _triangular_sides(config)
    shape, most = (u.shape[2], v.shape[2]), _most_blocks(config, u, v) * r
    ranks = [min(most, triangular_rank(b, shape, r, align, sides)) for b in budget.tolist()]
    rank, num_blocks = torch.tensor(ranks, device=u.device), max(1, max(ranks) // r)
    if sides == 1:
        blocks = turned_blocks(u, v, rank, r, align, num_blocks)
    else:
        keep = (torch.arange(u.shape[1], device=u.device) < rank[:, None])[:, :, None]
        blocks = triangular_blocks((u * keep).double().mT @ v.double(), rank, r, align, num_blocks)
    return Blocks(blocks.u.to(u.dtype), blocks.v.to(v.dtype), **blocks.intervals())


def _triangular_sides(config: GaudiConfig) -> Sides:
    """One, if factors may hardly be larger than their product."""
    return 2 if config.max_growth >= _TRIANGULAR_GROWTH else 1


def _can_be_triangular(config: GaudiConfig, shape: tuple[int, int]) -> bool:
    return all(n % config.align == 0 for n in shape)


def _with_rest(
    config: GaudiConfig, weight: Tensor, metric: Metric, blocks: Blocks, u: Tensor, v: Tensor, budget: Tensor,
    steps: int,
) -> Blocks:  # fmt: skip
    """What the budget leaves over, spent on one more block, of the intervals that explain most of what is missing.

    It would be less than a whole block of the next singular vectors, which is much for blocks of a high rank.
    """
    r, smallest = config.block_rank, 2 * config.align * config.block_rank
    num_live = blocks.live.sum(1)
    index = (r * num_live[:, None] + torch.arange(r, device=u.device)).clamp(max=u.shape[1] - 1)
    next_u, next_v = (side.gather(1, index[:, :, None].expand(-1, -1, side.shape[2]))[:, None] for side in (u, v))
    start = Blocks.full(next_u, next_v, torch.ones_like(index[:, 0]))
    rest = budget - blocks.cost()
    possible = (rest >= smallest) & (num_live < _most_blocks(config, u, v))
    missing = weight - blocks.product()
    # At no price: that of the others is too high for what is left, and trimming alone meets the budget.
    free = weight.new_zeros(len(weight))
    found = descend(missing, metric, start, rest.clamp(min=smallest), free, steps, config.align)
    whole = blocks.beside(found.where(possible, Blocks.full(next_u, next_v, torch.zeros_like(num_live))))
    return refit(weight, metric, whole, 1)


def _best(weight: Tensor, gram: Tensor | None, candidates: list[Blocks], budget: Tensor, max_growth: float) -> Blocks:
    """For each matrix the candidate of the lowest error, among those within the budget and of sound factors.

    The first, the SVD, always is. Blocks that are much larger than the weight and cancel each other would be right in
    float32, but lost in bfloat16 and hard to train on.
    """
    num_blocks = max(blocks.u.shape[1] for blocks in candidates)
    best, lowest = candidates[0].padded(num_blocks), torch.full_like(budget, torch.inf, dtype=torch.float64)
    size = weight.square().sum((1, 2)).clamp(min=1e-30)
    for i, blocks in enumerate(candidates):
        error = squared_error(weight - blocks.product(), gram)
        growth = ((blocks.u @ blocks.u.mT) * (blocks.v @ blocks.v.mT)).sum((1, 2, 3)) / size  # of whole blocks
        allowed = (blocks.cost() <= budget) & ((growth <= max_growth**2) | (i == 0))
        error = torch.where(allowed, error, torch.inf)
        best = blocks.padded(num_blocks).where(error < lowest, best)
        lowest = torch.minimum(error, lowest)
    return best

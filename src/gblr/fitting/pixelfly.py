"""Pixelfly: dense tiles on a butterfly, low rank for the rest; each part is fitted exactly to what the other leaves.

The tiles of tile row i, at the columns S_i of its support, that come nearest to a residual R are R_i where the error is
plain, and R_i G[:, S_i] G[S_i, S_i]^-1 where it is weighted by inputs: tiles then make up for what is missing beside
them.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from gblr.fitting.config import PixelflyConfig
from gblr.fitting.fit import fit_batch, num_ticks
from gblr.fitting.plan import divisors, groups, refuse, whole_mults
from gblr.fitting.svd import balance, weighted_svd
from gblr.fitting.threads import Tick
from gblr.matrices.base import StructuredMatrix
from gblr.matrices.pixelfly import PixelflyMatrix, butterfly_support


@dataclass(frozen=True)
class PixelflyPlan:
    """Tiles of out / grid[0] x in / grid[1], the butterfly up to `max_stride`, and the rank of the low-rank part."""

    grid: tuple[int, int]
    max_stride: int
    rank: int


def pixelfly_plan(shape: tuple[int, int], mults: int, tile: int = 32, low_rank_share: float = 0.3) -> PixelflyPlan:
    """The largest tiles, up to `tile`, whose diagonal fits in the share of the butterfly, then the largest stride that
    does, then the rank that the rest pays for.

    Where not even single elements on the diagonal fit in that share they may use all of the budget.

    >>> pixelfly_plan((384, 384), mults=44236)
    PixelflyPlan(grid=(12, 12), max_stride=2, rank=25)
    """
    share = (1 - low_rank_share) * mults
    for grid in _grids(shape, tile):
        if _butterfly_cost(shape, grid, 1) <= share:
            break
    else:
        if (smallest := _butterfly_cost(shape, grid, 1)) > mults:
            refuse("Pixelfly", shape, smallest, mults)
    strides = [2**k for k in range(min(grid).bit_length() + 1)]
    stride = max((s for s in strides if _butterfly_cost(shape, grid, s) <= share), default=1)
    left = mults - _butterfly_cost(shape, grid, stride)
    return PixelflyPlan(grid, stride, min(left // sum(shape), *shape))


def _grids(shape: tuple[int, int], tile: int) -> Iterable[tuple[int, int]]:
    """Grids whose tiles are the largest divisors of both axes not above `tile`, then `tile` - 1, and so on."""
    sizes = [divisors(axis) for axis in shape]
    for limit in range(tile, 0, -1):
        rows, cols = (axis // max(d for d in ds if d <= limit) for axis, ds in zip(shape, sizes, strict=True))
        yield rows, cols


def _butterfly_cost(shape: tuple[int, int], grid: tuple[int, int], max_stride: int) -> int:
    num_tiles = len(butterfly_support(grid, max_stride)[0])
    return num_tiles * (shape[0] // grid[0]) * (shape[1] // grid[1])


@fit_batch.register
def _fit_pixelfly(
    config: PixelflyConfig,
    weight: Float[Tensor, "b out in"],
    gram: Float[Tensor, "b in in"] | None,
    budget: Float[Tensor, " b"],
    tick: Tick = lambda: None,
) -> list[StructuredMatrix]:
    shape = (weight.shape[1], weight.shape[2])
    mults = whole_mults(budget)
    plans = groups([pixelfly_plan(shape, m, config.tile, config.low_rank_share) for m in mults])
    fits = [
        _Alternation(weight[members], None if gram is None else gram[members], plan) for plan, members in plans.items()
    ]
    for _ in range(config.steps):
        for part in fits:
            part.step()
        tick()
    fitted = {
        index: matrix
        for part, members in zip(fits, plans.values(), strict=True)
        for index, matrix in zip(members, part.matrices(), strict=True)
    }
    return [fitted[index] for index in range(len(weight))]


@num_ticks.register
def _num_ticks(config: PixelflyConfig) -> int:
    return config.steps


class _Alternation:
    """W = B + u^T v, B and u^T v in turn."""

    def __init__(self, weight: Float[Tensor, "b out in"], gram: Float[Tensor, "b in in"] | None, plan: PixelflyPlan):
        self.weight, self.gram, self.plan = weight, gram, plan
        self.rows, self.cols = (side.to(weight.device) for side in butterfly_support(plan.grid, plan.max_stride))
        self.blocks = weight.new_zeros(len(weight), len(self.rows), *self._tile())
        self.u, self.v = (weight.new_zeros(len(weight), plan.rank, axis) for axis in weight.shape[1:])
        if gram is not None:
            self.columns, self.valid = self._support_columns()
            self.factor = torch.linalg.cholesky(self._support_gram(gram))

    def _tile(self) -> tuple[int, int]:
        return self.weight.shape[1] // self.plan.grid[0], self.weight.shape[2] // self.plan.grid[1]

    def _support_columns(self) -> tuple[Tensor, Tensor]:
        """Columns of W under the support of each tile row, (tile rows, n), padded; and which of them are real."""
        support = torch.zeros(self.plan.grid, dtype=torch.bool, device=self.rows.device)
        support[self.rows, self.cols] = True
        width = int(support.sum(1).max())
        tiles = support.int().argsort(dim=1, descending=True, stable=True)[:, :width]
        inside = torch.arange(self._tile()[1], device=tiles.device)
        columns = (tiles[..., None] * len(inside) + inside).flatten(1)
        return columns, support.gather(1, tiles).repeat_interleave(len(inside), dim=1)

    def _support_gram(self, gram: Tensor) -> Float[Tensor, "b rows n n"]:
        """G[S_i, S_i] of every tile row, the identity where it is padded."""
        both = self.valid[:, :, None] & self.valid[:, None, :]
        part = gram[:, self.columns[:, :, None], self.columns[:, None, :]].double() * both
        return part + torch.diag_embed((~self.valid).double())

    def step(self) -> None:
        self._fit_blocks(self.weight - self.u.mT @ self.v)
        if self.plan.rank > 0:
            u, _, v = weighted_svd(self.weight - self._butterfly(), self.gram)
            self.u, self.v = balance(u[:, : self.plan.rank], v[:, : self.plan.rank])

    def _fit_blocks(self, residual: Float[Tensor, "b out in"]) -> None:
        if self.gram is not None:
            pull = (residual @ self.gram).unflatten(1, (self.plan.grid[0], -1))  # (b, rows, tile_out, in)
            columns = self.columns[:, None].expand(*pull.shape[:3], -1)
            right = pull.gather(3, columns).double() * self.valid[:, None]
            best = torch.cholesky_solve(right.mT, self.factor).mT * self.valid[:, None]
            residual = torch.zeros_like(pull).scatter_add(3, columns, best.to(pull.dtype)).flatten(1, 2)
        tiles = residual.unflatten(2, (self.plan.grid[1], -1)).unflatten(1, (self.plan.grid[0], -1)).transpose(2, 3)
        self.blocks = tiles[:, self.rows, self.cols]

    def _butterfly(self) -> Float[Tensor, "b out in"]:
        tiles = self.blocks.new_zeros(len(self.weight), *self.plan.grid, *self._tile())
        tiles[:, self.rows, self.cols] = self.blocks
        return tiles.transpose(2, 3).flatten(3, 4).flatten(1, 2)

    def matrices(self) -> list[PixelflyMatrix]:
        parts = zip(self.blocks, self.u, self.v, strict=True)
        return [
            PixelflyMatrix(blocks, self.rows, self.cols, u.clone(), v.clone(), self.plan.grid) for blocks, u, v in parts
        ]

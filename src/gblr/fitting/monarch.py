r"""Monarch: every tile of the weight has low rank, so the projection is one truncated SVD per tile.

With inputs the error tr(E G E^T) couples the tiles of one tile row. Let H = E G be taken with tile j of the fit set to
0. Of all matrices A* = H_j G_jj^-1 would be the best tile, and a tile A leaves tr((A - A*) G_jj (A - A*)^T) more than
it does: the tile of rank r to find is U^T V near to A*, weighted by G_jj. Least squares for U, then for V, twice, from
where they are: one tile column after the other, and no step can raise the error. A weighted SVD would be the best tile
of that visit, but the next sweep moves A* anyway: both end at the same errors, and a GPU takes one eigenvalue problem
after the other.
"""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from gblr.fitting.allocate import Choice
from gblr.fitting.config import MonarchConfig
from gblr.fitting.fit import fit_batch, num_ticks, rank_choices
from gblr.fitting.plan import divisors, groups, refuse, whole_mults
from gblr.fitting.svd import balance, weighted_svd
from gblr.fitting.threads import Tick
from gblr.matrices.base import StructuredMatrix
from gblr.matrices.monarch import MonarchMatrix

_TURNS = 2  # of least squares in a visit: more gain nothing, as the next sweep moves the goal
_RIDGE = 1e-10


def monarch_num_blocks(shape: tuple[int, int], mults: int) -> int:
    """The fewest blocks, hence the dearest matrix, whose min(out, in) (out + in) / num_blocks is within `mults`.

    >>> monarch_num_blocks((384, 384), mults=44236)  # 2 / 7 of dense would do; 7 does not divide 384
    8
    """
    cost = min(shape) * sum(shape)
    choices = divisors(math.gcd(*shape))
    for num_blocks in choices:
        if cost // num_blocks <= mults:
            return num_blocks
    refuse("Monarch", shape, cost // choices[-1], mults)


@rank_choices.register
def _(config: MonarchConfig, shape: tuple[int, int]) -> list[Choice]:
    """Those that exist, each taken for low rank of its cost."""
    inner = min(shape)
    steps = [inner // num_blocks for num_blocks in reversed(divisors(math.gcd(*shape)))]
    return [Choice(rank, rank * sum(shape)) for rank in steps]


@fit_batch.register
def _fit_monarch(
    config: MonarchConfig,
    weight: Float[Tensor, "b out in"],
    gram: Float[Tensor, "b in in"] | None,
    budget: Float[Tensor, " b"],
    tick: Tick = lambda: None,
) -> list[StructuredMatrix]:
    shape = (weight.shape[1], weight.shape[2])
    plans = groups([monarch_num_blocks(shape, mults) for mults in whole_mults(budget)])
    projections = {
        num_blocks: _Projection(weight[members], None if gram is None else gram[members], num_blocks)
        for num_blocks, members in plans.items()
    }
    for _ in range(config.steps):
        for projection in projections.values():
            projection.sweep()
        tick()
    fitted = {
        index: matrix
        for num_blocks, members in plans.items()
        for index, matrix in zip(members, projections[num_blocks].matrices(), strict=True)
    }
    return [fitted[index] for index in range(len(weight))]


@num_ticks.register
def _num_ticks(config: MonarchConfig) -> int:
    return config.steps


class _Projection:
    """Factors of every tile, padded with zeros to the largest rank: `u` (b, i, j, r, s_out), `v` (b, i, j, r, s_in)."""

    def __init__(self, weight: Float[Tensor, "b out in"], gram: Float[Tensor, "b in in"] | None, num_blocks: int):
        self.weight, self.gram, self.num_blocks = weight, gram, num_blocks
        self.mask = _tile_ranks(min(weight.shape[1:]) // num_blocks, num_blocks, weight.device)
        tiles = weight.unflatten(2, (num_blocks, -1)).unflatten(1, (num_blocks, -1)).transpose(2, 3)
        rank, batch = self.mask.shape[-1], tiles.shape[:-2]
        u, _, v = weighted_svd(tiles.flatten(0, -3), None)
        u, v = balance(u[:, :rank], v[:, :rank])
        self.u, self.v = (side.unflatten(0, batch) * self.mask[..., None] for side in (u, v))
        if gram is not None:  # tile (j, j) of G, (b, j, s_in, s_in)
            blocks = gram.unflatten(2, (num_blocks, -1)).unflatten(1, (num_blocks, -1))
            self.diagonal = blocks.diagonal(dim1=1, dim2=3).movedim(-1, 1).double().contiguous()
            self.factor = torch.linalg.cholesky(self.diagonal)
            self._wake_dead()

    def _wake_dead(self) -> None:
        """Terms of tiles of lower rank get some v, and u = 0: other tiles may ask for what the weight has not there."""
        noise = torch.randn(self.v.shape, generator=torch.Generator().manual_seed(0)).to(self.v)
        dead = self.mask[..., None] & (self.v == 0).all(-1, keepdim=True)
        self.u, self.v = self.u.masked_fill(dead, 0), torch.where(dead, noise, self.v)

    def sweep(self) -> None:
        """Every tile column in turn; without inputs the first projection is already the best."""
        if self.gram is None:
            return
        size = self.gram.shape[-1] // self.num_blocks
        error = self.weight - (self.u.mT @ self.v).transpose(2, 3).flatten(3, 4).flatten(1, 2)
        for j in range(self.num_blocks):
            columns = slice(j * size, (j + 1) * size)
            before = self.u[:, :, j].mT @ self.v[:, :, j]  # (b, i, s_out, s_in)
            # A* G_jj = H_j = E G_j + the tile itself times G_jj, E being the present error
            pull = (error @ self.gram[:, :, columns]).unflatten(1, (self.num_blocks, -1)).double()
            pull += before.double() @ self.diagonal[:, j, None]
            self._improve(j, pull)
            after = self.u[:, :, j].mT @ self.v[:, :, j]
            error[:, :, columns] += (before - after).flatten(1, 2)

    def _improve(self, j: int, pull: Float[Tensor, "b i s_out s_in"]) -> None:
        """Factors of tile column j, nearer to the best tiles A*, of which `pull` is A* G_jj."""
        wanted = torch.cholesky_solve(pull.flatten(1, 2).mT, self.factor[:, j]).mT.unflatten(1, (self.num_blocks, -1))
        mask = self.mask[:, j, :, None]
        v = self.v[:, :, j].double()
        for _ in range(_TURNS):
            u = mask * _solve(v @ self.diagonal[:, j, None] @ v.mT, v @ pull.mT, self.mask[:, j])
            v = mask * _solve(u @ u.mT, u @ wanted, self.mask[:, j])
        self.u[:, :, j], self.v[:, :, j] = (side.to(self.u.dtype) for side in balance(u, v))

    def matrices(self) -> list[MonarchMatrix]:
        """Left block i holds the u of tile row i in a row, right block j the v of tile column j."""
        left = self.u[:, self.mask].unflatten(1, (self.num_blocks, -1)).mT.contiguous()
        # `mask` is symmetric in i and j
        right = self.v.transpose(1, 2)[:, self.mask].unflatten(1, (self.num_blocks, -1))
        return [MonarchMatrix(*blocks) for blocks in zip(left, right, strict=True)]


def _solve(
    normal: Float[Tensor, "b i r r"], right: Float[Tensor, "b i r n"], alive: Bool[Tensor, "i r"]
) -> Float[Tensor, "b i r n"]:
    """Least squares by normal equations; terms that a tile has not got, or that say what others say, stay small."""
    mean = normal.diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True)
    ridge = torch.where(alive, _RIDGE * mean + torch.finfo(mean.dtype).tiny, 1.0)
    return torch.cholesky_solve(right, torch.linalg.cholesky(normal + torch.diag_embed(ridge)))


def _tile_ranks(inner_block: int, num_blocks: int, device: torch.device) -> Bool[Tensor, "i j r"]:
    """Which rank-1 terms tile (i, j) has, as `monarch_permutation` shares them out."""
    share, extra = divmod(inner_block, num_blocks)
    i = torch.arange(num_blocks, device=device)
    rank = share + ((i[:, None] + i) % num_blocks < extra).long()
    return torch.arange(share + (extra > 0), device=device) < rank[..., None]

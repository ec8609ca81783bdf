r"""BLAST: tile (i, j) is U_i diag(s_ij) V_j^T; alternating least squares in s, V and U, started from the truncated SVD.

With E the error and G the Gram matrix of inputs (or I), each of the three problems is solved exactly, one tile column j
after the other, as a step along its preconditioned gradient:

    s_ij += (U_i^T U_i * V_j^T G_jj V_j)^-1 diag(U_i^T (E G)_ij V_j)
    V_j  += [(sum_i U_i^T U_i * s_ij s_ij^T)^-1 (sum_i diag(s_ij) U_i^T (E G)_ij) G_jj^-1]^T
    U_i  += (E G)_i Z_i (Z_i^T G Z_i)^-1,    tile j of Z_i being V_j diag(s_ij)

Between sweeps the factors are extrapolated along their last change (Nesterov), and a matrix whose error grew goes back
and starts its momentum anew: so no fit ends above the low-rank matrix of the same rank, which is where it starts
(s = 1). On MiniLM's weights extrapolation saves about two thirds of the sweeps. The problem has local minima: of random
BLAST matrices about two in three are found again exactly.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from gblr.fitting.allocate import Choice, choices_from
from gblr.fitting.config import BlastConfig
from gblr.fitting.fit import fit_batch, num_ticks, rank_choices
from gblr.fitting.plan import divisors, refuse, whole_mults
from gblr.fitting.svd import balance, squared_error, weighted_svd
from gblr.fitting.threads import Tick
from gblr.matrices.base import StructuredMatrix
from gblr.matrices.blast import BlastMatrix

_JITTER = 1e-6  # of each diagonal entry: the systems are nearly singular where factors have become dependent


def blast_num_tiles(shape: tuple[int, int], num_tiles: int) -> int:
    """The largest number of tiles a side, up to `num_tiles`, that divides both axes.

    >>> blast_num_tiles((12, 18), 4)
    3
    """
    return max(d for d in divisors(math.gcd(*shape)) if d <= num_tiles)


def _per_rank(shape: tuple[int, int], num_tiles: int) -> int:
    return sum(shape) + num_tiles**2


@rank_choices.register
def _(config: BlastConfig, shape: tuple[int, int]) -> list[Choice]:
    """Those of low rank, which it contains, from the least that it can cost on."""
    choices = [Choice(rank, rank * sum(shape)) for rank in range(1, min(shape) + 1)]
    return choices_from(_per_rank(shape, blast_num_tiles(shape, config.num_tiles)), choices)


@fit_batch.register
def _fit_blast(
    config: BlastConfig,
    weight: Float[Tensor, "b out in"],
    gram: Float[Tensor, "b in in"] | None,
    budget: Float[Tensor, " b"],
    tick: Tick = lambda: None,
) -> list[StructuredMatrix]:
    shape, mults = (weight.shape[1], weight.shape[2]), whole_mults(budget)
    num_tiles = blast_num_tiles(shape, config.num_tiles)
    per_rank = _per_rank(shape, num_tiles)
    ranks = [min(m // per_rank, *shape) for m in mults]
    if min(ranks) == 0:
        refuse("BLAST", shape, per_rank, min(mults), " or lower `num_tiles`" if num_tiles > 1 else "")
    problem = _Problem(weight, gram, num_tiles)
    factors = problem.start(torch.tensor(ranks, device=weight.device))
    factors = _accelerated(problem, factors, config.steps, tick, config.dtype)
    return [
        BlastMatrix(*(side[i, ..., :rank].to(weight.dtype).clone() for side in (factors.u, factors.v, factors.s)))
        for i, rank in enumerate(ranks)
    ]


@num_ticks.register
def _num_ticks(config: BlastConfig) -> int:
    return config.steps


@dataclass(frozen=True)
class _Factors:
    """In float64, as their small Gram matrices have to be; lower ranks of a batch are padded with zeros, which stay."""

    u: Float[Tensor, "b i tile_out r"]
    v: Float[Tensor, "b j tile_in r"]
    s: Float[Tensor, "b i j r"]

    def extrapolated(self, before: "_Factors", by: Float[Tensor, " b"]) -> "_Factors":
        step = by[:, None, None, None]
        return _Factors(*(x + step * (x - y) for x, y in zip(vars(self).values(), vars(before).values(), strict=True)))

    def rounded(self, dtype: torch.dtype) -> "_Factors":
        return _Factors(*(x.to(dtype).double() for x in vars(self).values()))

    def where(self, condition: Tensor, other: "_Factors") -> "_Factors":
        pick = condition[:, None, None, None]
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return _Factors(*(torch.where(pick, x, y) for x, y in pairs))


def _accelerated(
    problem: "_Problem", now: _Factors, steps: int, tick: Tick, dtype: torch.dtype | None = None
) -> _Factors:
    """The last factors, which have the lowest error; with a `dtype` those whose error is the lowest once rounded."""
    before, error = now, problem.error(now)
    best, lowest = now, error if dtype is None else problem.error(now.rounded(dtype))
    age = torch.zeros_like(error)  # sweeps since the momentum began anew, for each matrix of the batch
    for _ in range(steps):
        tried = problem.sweep(now.extrapolated(before, age / (age + 2)))
        new_error = problem.error(tried)
        good = new_error <= error
        before, now = now, tried.where(good, now)
        error, age = torch.where(good, new_error, error), torch.where(good, age + 1, 0)
        if dtype is not None:
            rounded = problem.error(now.rounded(dtype))
            better = rounded < lowest
            best, lowest = now.where(better, best), torch.where(better, rounded, lowest)
        tick()
    return now if dtype is None else best


class _Problem:
    def __init__(self, weight: Float[Tensor, "b out in"], gram: Float[Tensor, "b in in"] | None, num_tiles: int):
        self.weight, self.gram, self.num_tiles = weight, gram, num_tiles
        if gram is not None:  # (b, j, k, tile_in, tile_in)
            self.gram_tiles = self._tiles(gram.double())
            self.gram_factor = torch.linalg.cholesky(self.gram_tiles.diagonal(dim1=1, dim2=2).movedim(-1, 1))

    def _tiles(self, matrix: Float[Tensor, "b m n"]) -> Float[Tensor, "b i j tm tn"]:
        n = self.num_tiles
        return matrix.unflatten(2, (n, -1)).unflatten(1, (n, -1)).transpose(2, 3)

    def start(self, ranks: Tensor) -> _Factors:
        u, _, v = weighted_svd(self.weight, self.gram)
        most = int(ranks.max())
        u, v = balance(u[:, :most].double(), v[:, :most].double())
        kept = (torch.arange(most, device=ranks.device) < ranks[:, None]).double()  # (b, r)
        u, v = (x.mT.unflatten(1, (self.num_tiles, -1)) * kept[:, None, None] for x in (u, v))
        return _Factors(u, v, kept[:, None, None].expand(-1, self.num_tiles, self.num_tiles, -1))

    def _error_matrix(self, f: _Factors) -> Float[Tensor, "b out in"]:
        u, v = ((f.u[:, :, None] * f.s[:, :, :, None]).to(self.weight.dtype), f.v.to(self.weight.dtype))
        return self.weight - (u @ v[:, None].mT).transpose(2, 3).flatten(3, 4).flatten(1, 2)

    def error(self, f: _Factors) -> Float[Tensor, " b"]:
        return squared_error(self._error_matrix(f), self.gram)

    def _pull(self, f: _Factors, j: slice = slice(None)) -> Float[Tensor, "b i j tile_out tile_in"]:
        """E G in tiles, of the tile columns `j`."""
        error = self._error_matrix(f)
        if self.gram is None:
            return self._tiles(error)[:, :, j]
        columns = self.gram.unflatten(2, (self.num_tiles, -1))[:, :, j]  # (b, in, j, tile_in)
        pull = (error @ columns.flatten(2)).unflatten(1, (self.num_tiles, -1))
        return pull.unflatten(3, columns.shape[2:]).transpose(2, 3)

    def sweep(self, f: _Factors) -> _Factors:
        columns = [slice(None)] if self.gram is None else [slice(j, j + 1) for j in range(self.num_tiles)]
        for j in columns:  # inputs couple the tile columns: then one at a time
            f = self._update_s(f, j)
        for j in columns:
            f = self._update_v(f, j)
        return self._update_u(f)

    def _update_s(self, f: _Factors, j: slice) -> _Factors:
        v = f.v[:, j]
        pull = self._pull(f, j)
        gradient = (f.u[:, :, None] * _product(pull, v[:, None])).sum(-2)  # (b, i, j, r)
        system = (f.u.mT @ f.u)[:, :, None] * (v.mT @ self._times_own_gram(v, j))[:, None]
        s = f.s.clone()
        s[:, :, j] += _solve(system, gradient[..., None])[..., 0]
        return _Factors(f.u, f.v, s)

    def _update_v(self, f: _Factors, j: slice) -> _Factors:
        s = f.s[:, :, j]
        pull = self._pull(f, j)
        gradient = (s[..., None] * _product(pull.mT, f.u[:, :, None]).mT).sum(1)  # (b, j, r, tile_in)
        system = ((f.u.mT @ f.u)[:, :, None] * s[..., None] * s[..., None, :]).sum(1)
        step = _solve(system, gradient).mT
        if self.gram is not None:
            step = torch.cholesky_solve(step, self.gram_factor[:, j])
        v = f.v.clone()
        v[:, j] += step
        return _Factors(f.u, v, f.s)

    def _update_u(self, f: _Factors) -> _Factors:
        z = (f.v[:, None] * f.s[:, :, :, None]).flatten(2, 3)  # (b, i, in, r)
        gram_z = z if self.gram is None else _product(self.gram[:, None], z)
        pull = self._pull(f).transpose(2, 3).flatten(3, 4)  # (b, i, tile_out, in)
        return _Factors(f.u + _solve(z.mT @ gram_z, _product(pull, z).mT).mT, f.v, f.s)

    def _times_own_gram(self, v: Float[Tensor, "b j tile_in r"], j: slice) -> Float[Tensor, "b j tile_in r"]:
        return v if self.gram is None else self.gram_tiles[:, j, j].diagonal(dim1=1, dim2=2).movedim(-1, 1) @ v


def _product(large: Tensor, factor: Tensor) -> Tensor:
    """In the dtype of the weight, where nearly all the work is; the result in that of the factors."""
    return (large @ factor.to(large.dtype)).to(factor.dtype)


def _solve(system: Float[Tensor, "*k r r"], right: Float[Tensor, "*k r n"]) -> Float[Tensor, "*k r n"]:
    diagonal = system.diagonal(dim1=-2, dim2=-1)
    ridge = torch.where(diagonal > 0, _JITTER * diagonal, 1.0)
    return torch.cholesky_solve(right, torch.linalg.cholesky(system + torch.diag_embed(ridge)))

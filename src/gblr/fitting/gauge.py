"""The same low-rank matrix at a lower cost: factors of triangular support, whose rows are intervals.

u^T v = (T u)^T (T^-T v) for every invertible T, so r^2 of the r (m + n) numbers of a rank-r factorization are free.
Gaussian elimination spends them on zeros. Each step takes its pivot at a corner of what is left, so one row and one
column at an end drop out: the supports are nested intervals, and rank r costs r (m + n - r + 1) as a GBLR matrix, not
r (m + n). Of the four corners that one is taken whose block is the smallest, which keeps the factors well scaled.

Still they are tens of times larger than their product on real weights, and cancel: such factors do not bear training.
An orthogonal T only turns them. It makes one of the factors triangular, for r (m + n - (r - 1) / 2).
"""

import bisect
import itertools
import math
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gblr.fitting.blocks import Blocks
from gblr.fitting.svd import balance

Sides = Literal[1, 2]
_LEAST_PIVOT = 1e-10  # smallest over largest singular value


def triangular_cost(rank: int, shape: tuple[int, int], block_rank: int, align: int, sides: Sides = 2) -> int:
    """Multiplications of the form of that rank, a multiple of `block_rank`, with one triangular factor or with two.

    Supports shrink once for every group of ranks that are eliminated together.

    >>> triangular_cost(3, (10, 8), 1, 1)  # r (m + n - r + 1)
    48
    """
    group = math.lcm(block_rank, align)
    whole = rank // group
    saved = group * group * whole * (whole - 1) // 2 + group * whole * (rank - whole * group)
    return rank * sum(shape) - sides * saved


def triangular_rank(budget: float, shape: tuple[int, int], block_rank: int, align: int, sides: Sides = 2) -> int:
    """The largest rank, in whole blocks, whose form costs at most `budget`; 0 if none does."""
    ranks = range(0, min(shape) + 1, block_rank)

    def cost(rank: int) -> int:
        return triangular_cost(rank, shape, block_rank, align, sides)

    return ranks[bisect.bisect_right(ranks, budget, key=cost) - 1]


def turned_blocks(
    u: Float[Tensor, "b q out"], v: Float[Tensor, "b q in"], rank: Int[Tensor, " b"], block_rank: int, align: int,
    num_blocks: int,
) -> Blocks:  # fmt: skip
    """The product of the first `rank` rows of `u` and `v`, in whole blocks that are orthogonal to each other: as large
    together as it is. Each begins below those rows that the ones before it need alone.
    """
    batch, q, out_features = len(u), num_blocks * block_rank, u.shape[2]
    missing = max(0, q - u.shape[1])
    u, v = (torch.nn.functional.pad(side[:, :q].double(), (0, 0, 0, missing)) for side in (u, v))
    keep = torch.arange(q, device=u.device) < rank[:, None]
    basis, mixing = torch.linalg.qr((v * keep[..., None]).mT)  # v^T = basis mixing
    left = (u * keep[..., None]).mT @ mixing.mT  # (b, out, q)
    turn = torch.linalg.qr(left[:, :q].mT)[0]  # makes the first q rows lower triangular
    u, v = (left @ turn).mT, (basis @ turn).mT
    group = math.lcm(block_rank, align)
    first = torch.arange(num_blocks, device=u.device) * block_rank
    live = first < rank[:, None]
    start = (first // group * group).expand(batch, num_blocks) * live
    row_size, col_size = (out_features - start) * live, v.shape[2] * live
    u, v = (side.unflatten(1, (num_blocks, block_rank)) for side in (u, v))
    return Blocks(u, v, start, row_size, torch.zeros_like(start), col_size).masked()


def triangular_blocks(
    matrix: Float[Tensor, "b out in"], rank: Int[Tensor, " b"], block_rank: int, align: int, num_blocks: int
) -> Blocks:
    """Matrices of the given ranks, in whole blocks, as blocks of nested intervals; the others of the `num_blocks` are
    dead.

    A block of rank r is eliminated at once, by a pivot of r x r numbers: staircases instead of triangles. So are groups
    of aligned ones, whose intervals are the same.
    """
    batch, (out_features, in_features) = len(matrix), matrix.shape[1:]
    left = matrix.double().clone()
    group = math.lcm(block_rank, align)
    u, v = (left.new_zeros(batch, num_blocks, block_rank, n) for n in (out_features, in_features))
    bounds = torch.zeros(4, batch, num_blocks, dtype=torch.long, device=left.device)  # starts and sizes, rows first
    low = torch.zeros(2, batch, dtype=torch.long, device=left.device)  # what is left, moving with each block
    high = torch.tensor([[out_features], [in_features]], device=left.device).repeat(1, batch)
    start, end = low, high  # the same, moving once per group
    first = torch.zeros_like(low, dtype=torch.bool)  # which end the present group is taken from, for rows and columns
    for block in range(int(rank.max()) // block_rank):
        if block * block_rank % group == 0:
            start, end = low, high
            first = _best_corner(left, low, high, block_rank)
        live = block * block_rank < rank
        rows, cols = (_at_end(low[i], high[i], first[i], block_rank) for i in range(2))
        one_u, one_v = _through_pivot(left, rows, cols)
        u[:, block], v[:, block] = one_u * live[:, None, None], one_v * live[:, None, None]
        left -= u[:, block].mT @ v[:, block]
        bounds[:, :, block] = torch.stack([start[0], end[0] - start[0], start[1], end[1] - start[1]]) * live
        low, high = low + block_rank * first, high - block_rank * (~first).long()
    u, v = u.to(matrix.dtype), v.to(matrix.dtype)
    return Blocks(u, v, bounds[0] % out_features, bounds[1], bounds[2] % in_features, bounds[3]).masked()


def _at_end(
    low: Int[Tensor, " b"], high: Int[Tensor, " b"], first: Bool[Tensor, "*#ways #b"], count: int
) -> Int[Tensor, "*ways b count"]:
    """The first so many of what is left, or the last."""
    return torch.where(first, low, high - count)[..., None] + torch.arange(count, device=low.device)


def _cross(
    left: Float[Tensor, "b m n"], rows: Int[Tensor, "*ways b r"], cols: Int[Tensor, "*ways b r"]
) -> tuple[Float[Tensor, "*ways b m r"], Float[Tensor, "*ways b r r"], Float[Tensor, "*ways b r n"]]:
    """Whole columns, pivot and whole rows at these places."""
    batch = torch.arange(len(left), device=left.device)[:, None]
    pivot = left[batch[:, :, None], rows[..., :, None], cols[..., None, :]]
    return left.mT[batch, cols].mT, pivot, left[batch, rows]


def _inverse(pivot: Float[Tensor, "*b r r"]) -> tuple[Float[Tensor, "*b r r"], Bool[Tensor, "*b"]]:
    """And whether there is one."""
    if pivot.shape[-1] == 1:
        sound = pivot[..., 0, 0] != 0
        return torch.where(sound[..., None, None], 1 / pivot, 0.0), sound
    a, s, b = torch.linalg.svd(pivot)
    sound = s[..., -1] > _LEAST_PIVOT * s[..., 0]
    return torch.where(sound[..., None, None], (b.mT / s[..., None, :]) @ a.mT, 0.0), sound


def _through_pivot(left: Tensor, rows: Tensor, cols: Tensor) -> tuple[Float[Tensor, "b r m"], Float[Tensor, "b r n"]]:
    """The block whose subtraction clears these rows and columns."""
    columns, pivot, whole_rows = _cross(left, rows, cols)
    return even_block((columns @ _inverse(pivot)[0]).mT, whole_rows)


def even_block(u: Float[Tensor, "*b r m"], v: Float[Tensor, "*b r n"]) -> tuple[Tensor, Tensor]:
    """The same product of factors whose rows are orthogonal, and of equal norm in both: none cancels another."""
    if u.shape[-2] == 1:
        return balance(u, v)
    (basis_u, r_u), (basis_v, r_v) = (torch.linalg.qr(side.mT) for side in (u, v))
    a, s, b = torch.linalg.svd(r_u @ r_v.mT)
    root = s.sqrt()[..., None, :]
    return (basis_u @ (a * root)).mT, (basis_v @ (b.mT * root)).mT


def _best_corner(left: Tensor, low: Int[Tensor, "2 b"], high: Int[Tensor, "2 b"], block_rank: int) -> Tensor:
    """(2, b) bool: whether the corner to take is at the first rows, and at the first columns.

    The one whose block is the smallest: factors that grow and cancel would not bear rounding.
    """
    ways = torch.tensor(list(itertools.product((True, False), repeat=2)), device=left.device)  # (4, 2)
    rows, cols = (_at_end(low[i], high[i], ways[:, i, None], block_rank) for i in range(2))  # (4, b, r)
    columns, pivot, whole_rows = _cross(left, rows, cols)
    inverse, sound = _inverse(pivot)
    product = inverse.mT @ (columns.mT @ columns) @ inverse @ (whole_rows @ whole_rows.mT)
    sizes = torch.where(sound, product.diagonal(dim1=-2, dim2=-1).sum(-1), torch.inf)  # (4, b), squared
    return ways[sizes.argmin(0)].T

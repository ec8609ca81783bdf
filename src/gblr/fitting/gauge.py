"""The same low-rank matrix at a lower cost: factors of triangular support, whose rows are intervals.

u^T v = (T u)^T (T^-T v) for every invertible T, so r^2 of the r (m + n) numbers of a rank-r factorization are free.
Gaussian elimination spends them on zeros. Each step takes its pivot at a corner of what is left, so one row and one
column at an end drop out: the supports are nested intervals, and rank r costs r (m + n - r + 1) as a GBLR matrix, not
r (m + n). The corner with the largest pivot of the four is taken, which keeps the factors well scaled.
"""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gblr.fitting.blocks import Blocks


def triangular_rank(budget: float, shape: tuple[int, int], block_rank: int, align: int) -> int:
    """The largest rank, in whole blocks, whose triangular form costs at most `budget`; 0 if none does."""
    group = math.lcm(block_rank, align)
    rank, cost = 0, 0
    while rank + block_rank <= min(shape):
        cost += block_rank * (sum(shape) - 2 * (rank // group * group))
        if cost > budget:
            break
        rank += block_rank
    return rank


def triangular_blocks(
    matrix: Float[Tensor, "b out in"], rank: Int[Tensor, " b"], block_rank: int, align: int, num_blocks: int
) -> Blocks:
    """Matrices of the given ranks as blocks of nested intervals; the others of the `num_blocks` blocks are dead.

    Blocks of rank above 1, or aligned ones, give up a corner per group of components: staircases instead of triangles.
    """
    batch, (out_features, in_features) = torch.arange(len(matrix), device=matrix.device), matrix.shape[1:]
    left = matrix.double().clone()
    group, most = math.lcm(block_rank, align), int(rank.max())
    size = num_blocks * block_rank
    u, v = (left.new_zeros(len(left), size, n) for n in (out_features, in_features))
    bounds = torch.zeros(
        4, len(left), size, dtype=torch.long, device=left.device
    )  # row start, size, column start, size
    start = torch.zeros(2, len(left), dtype=torch.long, device=left.device)
    end = torch.tensor([[out_features], [in_features]], device=left.device).repeat(1, len(left))
    low, high = start.clone(), end.clone()  # of the single components; start and end move once per group
    first = torch.zeros_like(start, dtype=torch.bool)  # which end the present group is taken from, for rows and columns
    for k in range(most):
        if k % group == 0:
            start, end = low.clone(), high.clone()
            first = _best_corner(left, start, end)
        row, col = (torch.where(first[i], low[i], high[i] - 1) for i in range(2))
        pivot = left[batch, row, col]
        usable = (pivot.abs() > 0) & (k < rank)
        scale = pivot.abs().clamp(min=1e-300).sqrt()
        u[:, k] = left[batch, :, col] / (pivot.sign() * scale)[:, None] * usable[:, None]
        v[:, k] = left[batch, row] / scale[:, None] * usable[:, None]
        left -= u[:, k, :, None] * v[:, k, None]
        bounds[:, :, k] = torch.stack([start[0], end[0] - start[0], start[1], end[1] - start[1]]) * (k < rank)
        low, high = low + first, high - (~first).long()
    bounds = bounds[:, :, ::block_rank]
    shape = (num_blocks, block_rank)
    u, v = (side.to(matrix.dtype).unflatten(1, shape) for side in (u, v))
    return Blocks(u, v, bounds[0] % out_features, bounds[1], bounds[2] % in_features, bounds[3]).masked()


def _best_corner(left: Tensor, start: Int[Tensor, "2 b"], end: Int[Tensor, "2 b"]) -> Tensor:
    """(2, b) bool: whether the largest of the four corner entries is at the first row, and at the first column."""
    batch = torch.arange(len(left), device=left.device)
    sides = [(start, True), (end - 1, False)]
    corners = [(row[0], col[1], top, at_left) for row, top in sides for col, at_left in sides]
    size = torch.stack([left[batch, row, col].abs() for row, col, _, _ in corners])  # (4, b)
    best = size.argmax(0)
    top, at_left = (torch.tensor([corner[i] for corner in corners], device=left.device)[best] for i in (2, 3))
    return torch.stack([top, at_left])

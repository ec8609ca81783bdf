"""Algorithm 2 of the paper: where the blocks start, read off the correlations of columns and rows of a trained
weight.
"""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gblr.fitting.blocks import Blocks


def correlation_start(
    weight: Float[Tensor, "b out in"],
    u: Float[Tensor, "b k r out"],
    v: Float[Tensor, "b k r in"],
    budget: Float[Tensor, " b"],
    smoothing_std: float,
    threshold_ratio: float,
    align: int,
) -> Blocks:
    """Intervals from Gram rows of W, largest first, until the budget is reached; contents `u`, `v` from the SVD.

    Block k: the columns that correlate with the k-th strongest column, then, of W on those columns, the rows that
    correlate with the strongest row. Blocks from the one that would exceed the budget on are dead.
    """
    num_blocks, block_rank = u.shape[1], u.shape[2]
    columns = weight.mT @ weight  # (b, in, in)
    order = columns.norm(dim=2).argsort(1, descending=True)[:, torch.arange(num_blocks) % weight.shape[2]]
    strongest = columns.gather(1, order[:, :, None].expand(-1, -1, weight.shape[2]))  # (b, k, in)
    col_start, col_size = mask_params(strongest.abs(), smoothing_std, threshold_ratio, align)
    row_start, row_size = torch.zeros_like(col_start), torch.zeros_like(col_size)
    spent = torch.zeros_like(budget)
    for k in range(num_blocks):
        row = _strongest_gram_row(_columns(weight, col_start[:, k], col_size[:, k]))
        row_start[:, k], row_size[:, k] = mask_params(row.abs(), smoothing_std, threshold_ratio, align)
        spent = spent + block_rank * (row_size[:, k] + col_size[:, k])
        if bool((spent > budget).all()):
            break
    total = block_rank * (row_size + col_size).cumsum(1)
    keep = (total <= budget[:, None]) & (row_size > 0)
    return Blocks(u, v, row_start, row_size * keep, col_start, col_size * keep).masked()


def _columns(weight: Float[Tensor, "b out in"], start: Int[Tensor, " b"], size: Int[Tensor, " b"]) -> Tensor:
    """(b, out, longest): the columns of the interval alone, zeros behind the shorter ones."""
    step = torch.arange(max(1, int(size.max())), device=weight.device)
    index = (start[:, None] + step) % weight.shape[2]
    inside = step < size[:, None]
    return weight.gather(2, index[:, None].expand(-1, weight.shape[1], -1)) * inside[:, None]


def _strongest_gram_row(part: Float[Tensor, "b out w"]) -> Float[Tensor, "b out"]:
    """The row of A A^T with the largest norm, for A = `part`; no out x out matrix is formed."""
    norms = ((part @ (part.mT @ part)) * part).sum(2)  # squared norm of row i of A A^T is a_i (A^T A) a_i^T
    strongest = part.gather(1, norms.argmax(1)[:, None, None].expand(-1, 1, part.shape[2]))  # (b, 1, w)
    return (part @ strongest.mT).squeeze(2)


def mask_params(
    row: Float[Tensor, "*k length"], smoothing_std: float, threshold_ratio: float, align: int = 1
) -> tuple[Int[Tensor, "*k"], Int[Tensor, "*k"]]:
    """Eq. 12: smooth by a Gaussian of std gamma (cyclic), keep what is at least tau = ratio * max; the longest cyclic
    run.

    >>> mask_params(torch.tensor([1.0, 0.0, 0.2, 1.0, 1.0, 0.9]), smoothing_std=0.1, threshold_ratio=0.8)
    (tensor(3), tensor(4))
    """
    length = row.shape[-1]
    frequency = torch.fft.rfftfreq(length, device=row.device, dtype=row.dtype)
    smoothing = torch.exp(-2 * (math.pi * smoothing_std * frequency) ** 2)
    smooth = torch.fft.irfft(torch.fft.rfft(row) * smoothing, n=length)
    start, size = longest_run(smooth >= threshold_ratio * smooth.amax(-1, keepdim=True))
    if align > 1:
        size = (size.div(align).round().clamp(min=1) * align).long().clamp(max=length)
        start = (start.div(align).round() * align).long()
        if length % align:  # runs that wrap would not end on a multiple
            start = torch.minimum(start, (length - size) // align * align)
        start = start % length
    return start, size


def longest_run(inside: Tensor) -> tuple[Int[Tensor, "*k"], Int[Tensor, "*k"]]:
    """Start and size of the longest cyclic run of True in each row; size 0 where there is none."""
    length = inside.shape[-1]
    position = torch.arange(2 * length, device=inside.device)
    twice = torch.cat([inside, inside], dim=-1)
    last_false = torch.where(twice, -1, position).cummax(-1).values
    run = (position - last_false).clamp(max=length)[..., length:]  # of True elements that end here
    size, end = run.max(-1)
    return (end - size + 1) % length, size

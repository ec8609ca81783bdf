"""The cost of blocks brought to a budget: from above by `trim`, from below by `widen`, where it changes the error
least and most.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gblr.fitting.blocks import Blocks
from gblr.fitting.intervals import best_interval, best_window, interval_mask
from gblr.fitting.metric import Metric
from gblr.fitting.room import room
from gblr.fitting.solve import factor_of

_BITS = 20  # of a price
_AT_ONCE = 5  # of them in one round on a GPU, where many prices take as long as one
# Of what is left, in each round. The last ones take all of it: several, as each may reach the end of an axis.
_SHARES = (0.5, 0.5, 0.5, 0.5, 1.0, 1.0, 1.0, 1.0)
_LEAST_GAIN = 1e-10  # of the weight's size: a matrix that is met up to rounding needs no more


def trim(blocks: Blocks, worth: tuple[Tensor, Tensor], budget: Float[Tensor, " b"], align: int) -> Blocks:
    """Shortens the intervals, where their contents matter least, until the cost is at most `budget`.

    `worth` says for rows and for columns what the error loses by each element of each block, (b, k, out) and (b, k,
    in). Each interval keeps its best part at the one price per element that meets the budget, found by halving. Where
    none would be kept at that price, the best block is shortened to the budget.
    """
    inside = (
        interval_mask(blocks.row_start, blocks.row_size, blocks.u.shape[-1]),
        interval_mask(blocks.col_start, blocks.col_size, blocks.v.shape[-1]),
    )
    row_worth, col_worth = (w * i / blocks.block_rank for w, i in zip(worth, inside, strict=True))

    def at(prices: Float[Tensor, "b p"]) -> list[Int[Tensor, "b p k"]]:
        num = prices.shape[1]
        each = prices[:, :, None].expand(-1, -1, blocks.live.shape[1])
        sides = (worth[:, None].expand(-1, num, -1, -1) for worth in (row_worth, col_worth))
        return [found for side in sides for found in best_interval(side, each, align)]

    low, high = torch.zeros_like(budget), torch.maximum(row_worth.amax((1, 2)), col_worth.amax((1, 2))).to(budget) * 2
    bits = _bits_at_once(row_worth.numel() + col_worth.numel(), low.device)
    share = torch.arange(1, 1 << bits, device=low.device) / (1 << bits)
    for _ in range(_BITS // bits):
        prices = low[:, None] + (high - low)[:, None] * share
        _, row_size, _, col_size = at(prices)
        cost = blocks.block_rank * ((row_size + col_size) * ((row_size > 0) & (col_size > 0))).sum(-1)  # (b, p)
        above = ((cost > budget[:, None]) * torch.arange(1, 1 << bits, device=low.device)).amax(1, keepdim=True)
        edges = torch.cat([low[:, None], prices, high[:, None]], 1)
        low, high = edges.gather(1, above)[:, 0], edges.gather(1, above + 1)[:, 0]
    found = Blocks(blocks.u, blocks.v, *(side[:, 0] for side in at(high[:, None])))
    found = found.where(found.cost() > 0, _best_block(blocks, (row_worth, col_worth), budget, align))
    return blocks.where(blocks.cost() <= budget, found).masked()


def _bits_at_once(numel: int, device: torch.device) -> int:
    return _AT_ONCE if device.type == "cuda" and numel << _AT_ONCE <= room(device) else 1


def _best_block(blocks: Blocks, worth: tuple[Tensor, Tensor], budget: Tensor, align: int) -> Blocks:
    """The block of most worth alone, both sides shortened alike to what the budget affords; dead if that is none."""
    total = ((worth[0].sum(-1) + worth[1].sum(-1)) * blocks.live).double()  # (b, k)
    most, best = total.max(1, keepdim=True)
    step = blocks.block_rank * align
    row_size, col_size = (size.gather(1, best)[:, 0] for size in (blocks.row_size, blocks.col_size))
    afforded = (budget / step + 1e-6).long()
    share = (budget / (blocks.block_rank * (row_size + col_size)).clamp(min=1)).clamp(max=1)
    rows = torch.minimum((share * row_size / align).long().clamp(min=1), afforded - 1)
    cols = torch.minimum((col_size // align).clamp(min=1), afforded - rows)
    sides = []
    for gain, count in zip(worth, (rows, cols), strict=True):
        start, size = best_window(gain.gather(1, best[..., None].expand(-1, -1, gain.shape[-1]))[:, 0], count, align)
        size = size * (most[:, 0] > 0) * (afforded > 1)
        sides += [torch.zeros_like(blocks.row_size).scatter(1, best, side[:, None]) for side in (start, size)]
    return Blocks(blocks.u, blocks.v, *sides)


def element_worth(blocks: Blocks, metric: Metric) -> tuple[Float[Tensor, "b k out"], Float[Tensor, "b k in"]]:
    """Of contents as they stand: u_i^T (V G V^T) u_i for rows, exactly; v_j^T (U U^T) v_j G_jj for columns."""
    weighted = metric.times(blocks.v.flatten(1, 2)).view_as(blocks.v)
    rows = torch.einsum("bkrm,bkrs,bksm->bkm", blocks.u, weighted @ blocks.v.mT, blocks.u)
    cols = torch.einsum("bkrn,bkrs,bksn->bkn", blocks.v, blocks.u @ blocks.u.mT, blocks.v)
    return rows, cols * metric.importance


def widen(weight: Float[Tensor, "b out in"], metric: Metric, blocks: Blocks, budget: Tensor, align: int) -> Blocks:
    """Lengthens intervals until no step of `align` elements fits into the budget, where the error will fall most.

    Trimming ends below its budget, as a price one step lower would take several runs of elements at once. Contents are
    zero where blocks are new: `refit` fills them. Dead blocks stay dead, and nothing grows that would not gain.
    """
    lengths = weight.shape[1:]
    gains = [_running_sums(gain, align) for gain in _gains(weight, metric, blocks)]
    starts, sizes = [blocks.row_start, blocks.col_start], [blocks.row_size, blocks.col_size]
    least = _LEAST_GAIN * (metric.times(weight) * weight).sum((1, 2))
    for share in _SHARES:
        left = budget.double() - Blocks(blocks.u, blocks.v, starts[0], sizes[0], starts[1], sizes[1]).cost()
        cells = (left / (blocks.block_rank * align) + 1e-6).floor().clamp(min=0)
        cells = (share * cells).ceil().long()
        ways = [_extensions(*side, cells, align) for side in zip(gains, starts, sizes, lengths, strict=True)]
        gain = torch.stack([gain for gain, _ in ways], 1)  # (b, side, k, end)
        best, index = gain.flatten(1).max(1)
        chosen = torch.zeros_like(gain.flatten(1), dtype=torch.bool).scatter(1, index[:, None], True).view_as(gain)
        chosen &= (best > least)[:, None, None, None]
        for i, (_, count) in enumerate(ways):
            grown = align * count * chosen[:, i]  # (b, k, end)
            starts[i] = (starts[i] - grown[..., 1]) % lengths[i]
            sizes[i] = sizes[i] + grown.sum(-1)
    return Blocks(blocks.u, blocks.v, starts[0], sizes[0], starts[1], sizes[1])


def _gains(weight: Tensor, metric: Metric, blocks: Blocks) -> tuple[Float[Tensor, "b k out"], Float[Tensor, "b k in"]]:
    """What the squared error loses by each row and column that a block does not have, if it is added alone; zero for
    those that it has, and of dead blocks.
    """
    residual, found = weight - blocks.product(), []
    sides = (
        (metric.times(blocks.v.flatten(1, 2)).view_as(blocks.v), blocks.v, residual),
        (blocks.u, blocks.u, metric.times(residual).mT),
    )
    for left, right, missing in sides:
        factor = factor_of(left.flatten(0, 1), right.flatten(0, 1))
        wanted = (missing @ left.flatten(1, 2).mT).mT  # (b, k r, out or in)
        found.append(factor.divide(wanted.reshape(-1, blocks.block_rank, wanted.shape[-1])).square().sum(1))
    rows, cols = (gain.view(*blocks.live.shape, -1) for gain in found)
    outside = (
        ~interval_mask(blocks.row_start, blocks.row_size, rows.shape[-1]) & blocks.live[..., None],
        ~interval_mask(blocks.col_start, blocks.col_size, cols.shape[-1]) & blocks.live[..., None],
    )
    return rows * outside[0], cols / metric.importance * outside[1]


def _running_sums(gain: Float[Tensor, "b k n"], align: int) -> Float[Tensor, "b k cells"]:
    """Over cells of `align` elements, twice around the axis, from 0."""
    num_cells = gain.shape[-1] // align
    cells = gain[..., : num_cells * align].unflatten(-1, (num_cells, align)).sum(-1)
    return torch.nn.functional.pad(torch.cat([cells, cells], -1).double().cumsum(-1), (1, 0))


def _extensions(
    gains: Float[Tensor, "b k cells"], start: Int[Tensor, "b k"], size: Int[Tensor, "b k"], length: int,
    cells: Int[Tensor, " b"], align: int,
) -> tuple[Float[Tensor, "b k 2"], Int[Tensor, "b k 2"]]:  # fmt: skip
    """Gain and length, in cells of `align`, of lengthening each interval by at most `cells`: after its end, and before
    its start.

    Where `align` does not divide the axis, intervals do not wrap.
    """
    num_cells = length // align
    first, last = start // align, (start + size) // align
    room = num_cells - size // align
    space = torch.stack([room, room] if num_cells * align == length else [num_cells - last, first], -1)
    space = space.clamp(min=0) * ((size > 0) & (size < length))[..., None]
    count = torch.minimum(space, cells[:, None, None])
    begin = torch.stack([last % max(1, num_cells), first + num_cells - count[..., 1]], -1)
    return gains.gather(-1, begin + count) - gains.gather(-1, begin), count

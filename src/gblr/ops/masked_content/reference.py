"""Forward and backward of mask * content in plain torch, on any device, a few blocks at a time.

With E(s) and D(s) the samples of S and S' (`gblr.ops.step`) shifted by s:

    mask = E(l) - E(l + w),   d mask / dw = D(l + w),   d mask / dl = D(l + w) - D(l)

Blocks are taken in chunks through the same few buffers, so that no temporary grows to the size of the whole mask.
Contents come as (blocks, block_rank, length), widths and locations as (blocks,).
"""

from typing import Protocol

import torch
from torch import Tensor

from gblr.ops.step import phase_factor, real_rows, sliding_rows

# Four chunks keep every temporary below a quarter of the mask. Smaller ones were slower: at 768 x 768 on a CPU,
# chunks of 2^15 elements took 1.5 times as long, 2^17 as long (the calls' own overhead eats what the cache gives).
_NUM_CHUNKS = 4


def forward(content: Tensor, width: Tensor, location: Tensor, table: Tensor) -> Tensor:
    out = torch.empty(content.shape, dtype=content.dtype, device=content.device)
    if not content.numel():
        return out  # no FFT of nothing
    size = _chunk_size(content, table)
    rows = _rows(table, width, location, content.shape[-1], size)
    for i, (o, c) in enumerate(zip(out.split(size), content.split(size), strict=True)):
        torch.mul(c, rows.mask(i).unsqueeze(1), out=o)
    return out


def backward(
    grad: Tensor,
    content: Tensor,
    width: Tensor,
    location: Tensor,
    table: Tensor,
    need_content: bool,
    need_structure: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of content, width and location; one that is not needed comes back empty."""
    grad_content = content.new_empty(content.shape if need_content else (0,))
    at_rise, at_fall = (table.new_zeros(width.shape if need_structure else (0,)) for _ in range(2))
    if not content.numel():
        return grad_content, at_fall.to(width.dtype), at_rise.to(width.dtype)
    size = _chunk_size(content, table)
    rows = _rows(table, width, location, content.shape[-1], size)
    for i, (g, c) in enumerate(zip(grad.split(size), content.split(size), strict=True)):
        blocks = slice(i * size, i * size + len(g))
        if need_content:
            torch.mul(g, rows.mask(i).unsqueeze(1), out=grad_content[blocks])
        if need_structure:
            upstream = _rank_dot(g.to(table.dtype), c.to(table.dtype))
            torch.sum(rows.slope_at_fall(i).mul_(upstream), -1, out=at_fall[blocks])
            torch.sum(rows.slope_at_rise(i).mul_(upstream), -1, out=at_rise[blocks])
    return grad_content, at_fall.to(width.dtype), location_gradient(at_fall, at_rise, width, content.shape[-1])


def location_gradient(at_fall: Tensor, at_rise: Tensor, width: Tensor, length: int) -> Tensor:
    """Their difference; exactly 0 where a block covers the whole axis, since moving it changes nothing.

    The two sums differ by rounding alone there, and an optimizer that normalises would make steps of that noise.
    """
    if not at_fall.numel():
        return at_rise.to(width.dtype)
    return torch.where(width >= length, 0.0, at_fall - at_rise).to(width.dtype)


def _rank_dot(a: Tensor, b: Tensor) -> Tensor:
    """Sum over block_rank of a * b: (blocks, block_rank, length) -> (blocks, length)."""
    total = a[:, 0] * b[:, 0]
    for r in range(1, a.shape[1]):  # one row at a time: einsum would copy both, and is slower
        total.addcmul_(a[:, r], b[:, r])
    return total


def _chunk_size(content: Tensor, table: Tensor) -> int:
    # a spectrum is complex and has several at work at once: half the size keeps their sum below one mask too
    num_chunks = _NUM_CHUNKS if table.dim() == 2 else 2 * _NUM_CHUNKS
    return max(1, -(-len(content) // num_chunks))


class Rows(Protocol):
    """Rows of the chunk `i` of blocks, (blocks of the chunk, length); the next call may overwrite what one returned."""

    def mask(self, i: int) -> Tensor: ...
    def slope_at_rise(self, i: int) -> Tensor: ...
    def slope_at_fall(self, i: int) -> Tensor: ...


def _rows(table: Tensor, width: Tensor, location: Tensor, length: int, size: int) -> Rows:
    kind = WholeRows if table.dim() == 2 else RealRows
    return kind(table, width, location, length, size)


class WholeRows:
    """Whole widths and locations: rows are runs of the table."""

    def __init__(self, table: Tensor, width: Tensor, location: Tensor, length: int, size: int):
        self.value, self.slope = sliding_rows(table[0]), sliding_rows(table[1])
        start = 2 * length - location.remainder(length).long()
        self.rise, self.fall = start.split(size), (start - width.long()).split(size)
        self.buffers = table.new_empty(2, min(size, len(width)), length)

    def _take(self, source: Tensor, index: Tensor, buffer: int) -> Tensor:
        return torch.index_select(source, 0, index, out=self.buffers[buffer, : len(index)])

    def mask(self, i: int) -> Tensor:
        return self._take(self.value, self.rise[i], 0).sub_(self._take(self.value, self.fall[i], 1))

    def slope_at_rise(self, i: int) -> Tensor:
        return self._take(self.slope, self.rise[i], 0)

    def slope_at_fall(self, i: int) -> Tensor:
        return self._take(self.slope, self.fall[i], 0)


class RealRows:
    """Real widths and locations: rows are inverse FFTs of the shifted spectrum."""

    def __init__(self, table: Tensor, width: Tensor, location: Tensor, length: int, size: int):
        self.value, self.slope, self.length = table[0], table[1], length
        self.width, self.location = width.to(table.dtype).split(size), location.to(table.dtype).split(size)

    def _rise(self, i: int) -> Tensor:
        return phase_factor(self.location[i], self.length)

    def _fall(self, i: int) -> Tensor:  # a phase for l + w itself would lose digits in float32
        return self._rise(i) * phase_factor(self.width[i], self.length)

    def mask(self, i: int) -> Tensor:
        steps = real_rows(self.value, self._rise(i) - self._fall(i), self.length)
        return steps + self.width[i][:, None] / self.length

    def slope_at_rise(self, i: int) -> Tensor:
        return real_rows(self.slope, self._rise(i), self.length) + 1 / self.length

    def slope_at_fall(self, i: int) -> Tensor:
        return real_rows(self.slope, self._fall(i), self.length) + 1 / self.length

"""Forward and backward of mask * content on a GPU, one kernel each, for whole widths and locations.

The samples of S that a mask needs are one run of its table (`gblr.ops.step`), so both kernels read table, content and
gradient in order, and no mask is written. One program owns a row of the content in the backward: its two sums for
width and location need no atomics, so gradients are the same at every run.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gblr.ops.masked_content.reference import location_gradient

_MAX_TILE = 1024  # elements of a row at a time; most axes fit into one to three


@triton.jit
def _row_starts(width_ptr, location_ptr, block, length):
    """Where the runs for l and for l + w begin in the table."""
    # In whole numbers: a quotient in float32 may be off for large locations, and lead out of the table.
    location = tl.load(location_ptr + block).to(tl.int32) % length  # of either sign, as in C
    location = tl.where(location < 0, location + length, location)
    rise = 2 * length - location
    return rise, rise - tl.load(width_ptr + block).to(tl.int32)


@triton.jit
def _masked_content_fwd_kernel(
    content_ptr, width_ptr, location_ptr, table_ptr, out_ptr, length, block_rank, TILE: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    rise, fall = _row_starts(width_ptr, location_ptr, row // block_rank, length)
    j = tl.program_id(1) * TILE + tl.arange(0, TILE)  # [TILE]
    inside = j < length
    mask = tl.load(table_ptr + rise + j, inside) - tl.load(table_ptr + fall + j, inside)
    at = row.to(tl.int64) * length + j
    content = tl.load(content_ptr + at, inside).to(tl.float32)
    tl.store(out_ptr + at, (content * mask).to(out_ptr.dtype.element_ty), inside)


@triton.jit
def _masked_content_bwd_kernel(
    grad_ptr, content_ptr, width_ptr, location_ptr, table_ptr, grad_content_ptr, first_ptr, second_ptr,
    length, block_rank, NEED_CONTENT: tl.constexpr, NEED_STRUCTURE: tl.constexpr, FINISH: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """First and second are the sums at the falling and at the rising end; or, with FINISH, the gradients of width and
    location, as `location_gradient` defines the latter.
    """
    row = tl.program_id(0)
    rise, fall = _row_starts(width_ptr, location_ptr, row // block_rank, length)
    slope_ptr = table_ptr + 3 * length
    sum_fall = tl.zeros([TILE], tl.float32)
    sum_rise = tl.zeros([TILE], tl.float32)
    for begin in range(0, length, TILE):
        j = begin + tl.arange(0, TILE)
        inside = j < length
        at = row.to(tl.int64) * length + j
        grad = tl.load(grad_ptr + at, inside, other=0.0).to(tl.float32)
        if NEED_CONTENT:
            mask = tl.load(table_ptr + rise + j, inside) - tl.load(table_ptr + fall + j, inside)
            tl.store(grad_content_ptr + at, (grad * mask).to(grad_content_ptr.dtype.element_ty), inside)
        if NEED_STRUCTURE:
            upstream = grad * tl.load(content_ptr + at, inside, other=0.0).to(tl.float32)
            sum_fall += upstream * tl.load(slope_ptr + fall + j, inside, other=0.0)
            sum_rise += upstream * tl.load(slope_ptr + rise + j, inside, other=0.0)
    if NEED_STRUCTURE:
        at_fall, at_rise = tl.sum(sum_fall), tl.sum(sum_rise)
        if FINISH:  # no kernels for a few numbers
            at_rise = tl.where(tl.load(width_ptr + row) >= length, 0.0, at_fall - at_rise)
        tl.store(first_ptr + row, at_fall)
        tl.store(second_ptr + row, at_rise)


def forward(
    content: Tensor, width: Tensor, location: Tensor, table: Tensor, dtype: torch.dtype | None = None
) -> Tensor:
    """In `dtype`, that of the content if not given: a product in half precision then needs no cast."""
    content = content.contiguous()
    out = torch.empty_like(content, dtype=dtype)
    blocks, block_rank, length = content.shape
    if out.numel():
        tile = _tile(length)
        _masked_content_fwd_kernel[(blocks * block_rank, triton.cdiv(length, tile))](
            content, width.contiguous(), location.contiguous(), table.contiguous(), out, length, block_rank, TILE=tile
        )
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
    blocks, block_rank, length = content.shape
    grad_content = torch.empty(content.shape if need_content else (0,), dtype=content.dtype, device=content.device)
    sums = torch.empty(2, blocks if need_structure else 0, block_rank, dtype=table.dtype, device=table.device)
    if content.numel() and (need_content or need_structure):
        _masked_content_bwd_kernel[(blocks * block_rank,)](
            grad.contiguous(), content.contiguous(), width.contiguous(), location.contiguous(), table.contiguous(),
            grad_content, sums[0], sums[1], length, block_rank,
            NEED_CONTENT=need_content, NEED_STRUCTURE=need_structure, FINISH=block_rank == 1, TILE=_tile(length),
        )  # fmt: skip
        if block_rank == 1:
            grad_width, grad_location = sums[..., 0]
            return grad_content, grad_width.to(width.dtype), grad_location.to(width.dtype)
    else:
        sums.zero_()
    at_fall, at_rise = sums.sum(-1)
    return grad_content, at_fall.to(width.dtype), location_gradient(at_fall, at_rise, width, length)


def _tile(length: int) -> int:
    return min(_MAX_TILE, triton.next_power_of_2(length))

"""Fractions to elements and back on a GPU, one kernel each way."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 256
# Added and taken away again, it leaves a float32 below 2^22 rounded to the nearest whole number, halves to even ones.
_ROUNDER = tl.constexpr(1.5 * 2**23)


@triton.jit
def _nearest_multiple(value, align, length):
    last = (length // align) * align  # the largest multiple on the axis
    nearest = ((tl.div_rn(value, align.to(tl.float32)) + _ROUNDER) - _ROUNDER) * align
    return tl.where(value > (last + length) * 0.5, length.to(tl.float32), tl.minimum(nearest, last.to(tl.float32)))


@triton.jit
def _elements_fwd_kernel(width_ptr, location_ptr, out_ptr, blocks, rows, cols, align, TILE: tl.constexpr):
    side = tl.program_id(0)  # 0: rows, 1: columns
    k = tl.program_id(1) * TILE + tl.arange(0, TILE)  # [TILE]
    inside = k < blocks
    length = tl.where(side == 0, rows, cols)
    align += 0 * length  # a number of the kernel's: Triton hands an argument of 1 over as a constant
    at = side * blocks + k
    width = tl.minimum(tl.maximum(tl.load(width_ptr + at, inside), 0.0), 1.0) * length
    location = tl.load(location_ptr + at, inside)
    location = (location - tl.floor(location)) * length  # the axis is a circle
    tl.store(out_ptr + at, _nearest_multiple(width, align, length), inside)
    tl.store(out_ptr + 2 * blocks + at, _nearest_multiple(location, align, length), inside)


@triton.jit
def _elements_bwd_kernel(
    grad_ptr, width_ptr, grad_width_ptr, grad_location_ptr, blocks, rows, cols, TILE: tl.constexpr
):
    side = tl.program_id(0)
    k = tl.program_id(1) * TILE + tl.arange(0, TILE)  # [TILE]
    inside = k < blocks
    length = tl.where(side == 0, rows, cols)
    at = side * blocks + k
    width = tl.load(width_ptr + at, inside)
    grad_width = tl.load(grad_ptr + at, inside) * length
    tl.store(grad_width_ptr + at, tl.where((width >= 0) & (width <= 1), grad_width, 0.0), inside)
    tl.store(grad_location_ptr + at, tl.load(grad_ptr + 2 * blocks + at, inside) * length, inside)


def forward(width: Tensor, location: Tensor, rows: int, cols: int, align: int) -> Tensor:
    blocks = width.shape[-1]
    out = torch.empty(4, blocks, dtype=width.dtype, device=width.device)
    if blocks:
        _elements_fwd_kernel[(2, triton.cdiv(blocks, _TILE))](
            width.contiguous(), location.contiguous(), out, blocks, rows, cols, align, TILE=_TILE
        )
    return out


def backward(grad: Tensor, width: Tensor, rows: int, cols: int) -> tuple[Tensor, Tensor]:
    blocks = width.shape[-1]
    grad_width, grad_location = (torch.empty(2, blocks, dtype=width.dtype, device=width.device) for _ in range(2))
    if blocks:
        _elements_bwd_kernel[(2, triton.cdiv(blocks, _TILE))](
            grad.contiguous(), width.contiguous(), grad_width, grad_location, blocks, rows, cols, TILE=_TILE
        )
    return grad_width, grad_location

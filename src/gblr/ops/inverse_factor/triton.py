"""Inverse Cholesky factors of small symmetric matrices on a GPU: one launch, which can be captured in a CUDA graph.
LAPACK's counterparts there wait for the device.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

MAX_SIZE = 32  # a program holds two such matrices in float64


@triton.jit
def _inverse_factor_kernel(gram_ptr, out_ptr, size, jitter, SIZE: tl.constexpr):
    """Elimination on [A | 1]: what turns A into the transposed factor turns 1 into the factor's inverse."""
    i = tl.arange(0, SIZE)
    row, col = i[:, None], i[None, :]
    inside = (row < size) & (col < size)
    begin = tl.program_id(0).to(tl.int64) * size * size
    a = tl.load(gram_ptr + begin + row * size + col, inside, other=0.0)  # [SIZE, SIZE], float64
    a = (a + tl.load(gram_ptr + begin + col * size + row, inside, other=0.0)) / 2
    trace = tl.sum(tl.sum(tl.where(row == col, a, 0.0), axis=1), axis=0)
    a += tl.where(row == col, jitter * tl.maximum(trace, 0.0) / size + 1e-30, 0.0)
    a = tl.where(inside, a, tl.where(row == col, 1.0, 0.0))
    x = tl.where(row == col, 1.0, 0.0) + tl.zeros([SIZE, SIZE], tl.float64)
    for k in range(SIZE):
        column = tl.sum(tl.where(col == k, a, 0.0), axis=1)  # [SIZE]
        scale = 1 / tl.sqrt(tl.sum(tl.where(i == k, column, 0.0), axis=0))
        solved = tl.sum(tl.where(row == k, x, 0.0), axis=0) * scale  # [SIZE]
        factor = tl.where(i > k, column * scale, 0.0)
        a -= factor[:, None] * (column * scale)[None, :]
        x = tl.where(row == k, solved[None, :], x - factor[:, None] * solved[None, :])
    tl.store(out_ptr + begin + row * size + col, x.to(out_ptr.dtype.element_ty), inside)


def inverse_factor(gram: Float[Tensor, "b r r"], jitter: float, dtype: torch.dtype) -> Float[Tensor, "b r r"]:
    """Of gram + jitter * its mean diagonal; NaN where that is not positive."""
    size = gram.shape[-1]
    gram = gram.contiguous()
    out = torch.empty_like(gram, dtype=dtype)
    padded = triton.next_power_of_2(size)
    _inverse_factor_kernel[(len(gram),)](gram, out, size, jitter, SIZE=padded, num_warps=1 if padded <= 16 else 4)
    return out

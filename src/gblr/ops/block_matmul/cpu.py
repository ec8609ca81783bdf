"""The product of packed blocks on a CPU: calls into the compiled kernels (plan.cpp, block_matmul.cpp)."""

import ctypes
import functools
from ctypes import POINTER, byref, c_int, c_int32, c_int64, c_void_p

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gblr.ops.native import cpu_library

DTYPES = {torch.float32: 4, torch.bfloat16: 2}
_NUM_VALUES = 7  # place in the plan's header (plan.h)


@functools.cache
def _functions() -> ctypes.CDLL | None:
    library = cpu_library()
    return None if library is None else declare(library)


def declare(library: ctypes.CDLL) -> ctypes.CDLL:
    library.gblr_plan_make.argtypes = [c_int32, c_int32, c_int32, c_int32, c_void_p, POINTER(c_int64)]
    library.gblr_plan_make.restype = c_void_p
    library.gblr_plan_take.argtypes = [c_void_p, c_void_p]
    library.gblr_pack.argtypes = [c_void_p, c_int, c_void_p, c_void_p, c_void_p]
    library.gblr_unpack.argtypes = [c_void_p, c_int, c_void_p, c_void_p, c_void_p]
    library.gblr_block_matmul.argtypes = [*[c_void_p, c_int], *[c_void_p] * 4, c_int64, c_int]
    for name in ("gblr_plan_take", "gblr_pack", "gblr_unpack", "gblr_block_matmul"):
        getattr(library, name).restype = None
    return library


def available() -> bool:
    """Whether the kernels were built and run here; where not, a warning says why, once."""
    return _functions() is not None


def make_plan(structure: Int[Tensor, "num_blocks 4"], block_rank: int, shape: tuple[int, int]) -> Int[Tensor, " plan"]:
    """The layout for blocks with the given row width, row location, column width, column location."""
    library = _functions()
    assert library is not None
    structure = structure.to("cpu", torch.int32).contiguous()
    size = c_int64()
    handle = library.gblr_plan_make(
        shape[0], shape[1], len(structure), block_rank, structure.data_ptr(), byref(size)
    )
    if not size.value:
        raise ValueError(f"a matrix of {shape[0]} x {shape[1]} with these blocks is too large for the CPU kernels.")
    plan = torch.empty(size.value, dtype=torch.int32)
    library.gblr_plan_take(handle, plan.data_ptr())
    return plan


def pack(u: Float[Tensor, " row_total"], v: Float[Tensor, " col_total"], plan: Tensor) -> Float[Tensor, " values"]:
    """Cropped contents in the order of the plan, with its padding."""
    values = torch.empty(int(plan[_NUM_VALUES]), dtype=u.dtype)
    u, v = u.contiguous(), v.contiguous()
    _functions().gblr_pack(plan.data_ptr(), DTYPES[u.dtype], u.data_ptr(), v.data_ptr(), values.data_ptr())
    return values


def unpack(values: Tensor, plan: Tensor, num_u: int, num_v: int) -> tuple[Tensor, Tensor]:
    """The way back: cropped contents without padding."""
    values = values.contiguous()
    u, v = values.new_empty(num_u), values.new_empty(num_v)
    _functions().gblr_unpack(plan.data_ptr(), DTYPES[u.dtype], values.data_ptr(), u.data_ptr(), v.data_ptr())
    return u, v


def block_matmul(
    x: Float[Tensor, "*b in"], values: Tensor, plan: Tensor, bias: Tensor | None, out_features: int
) -> Float[Tensor, "*b out"]:
    x = x.contiguous()
    y = x.new_empty(*x.shape[:-1], out_features)
    tokens = y.numel() // max(1, out_features)
    _functions().gblr_block_matmul(
        plan.data_ptr(), x.element_size(), values.data_ptr(), x.data_ptr(), None if bias is None else bias.data_ptr(),
        y.data_ptr(), tokens, torch.get_num_threads(),
    )  # fmt: skip
    return y

"""The product of packed blocks on a CPU: calls into the compiled kernels (plan.cpp, block_matmul.cpp)."""

import ctypes
import functools
from ctypes import POINTER, byref, c_int, c_int32, c_int64, c_void_p

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gblr.ops.native import cpu_library

BYTES = {torch.float32: 4, torch.bfloat16: 2}  # the dtypes that the kernels know
_NUM_VALUES = 7  # place in the plan's header (plan.h)
_CROPPED, _SPREAD = 0, 1  # how u and v lie (plan.cpp)


@functools.cache
def _library() -> ctypes.CDLL | None:
    library = cpu_library()
    return None if library is None else declare(library)


def declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """Tells ctypes what the functions take."""
    pointer = c_void_p
    library.gblr_plan_make.argtypes = [c_int32, c_int32, c_int32, c_int32, pointer, POINTER(c_int64)]
    library.gblr_plan_make.restype = pointer
    library.gblr_plan_take.argtypes = [pointer, pointer]
    library.gblr_plan_take.restype = None
    library.gblr_gather.argtypes = [pointer, c_int, c_int, *[pointer] * 3, *[c_int64] * 3]
    library.gblr_scatter.argtypes = library.gblr_gather.argtypes
    library.gblr_bound_matmul.argtypes = [pointer, c_int, *[pointer] * 4, c_int64, c_int]
    library.gblr_bound_matmul.restype = None
    library.gblr_block_matmul.argtypes = [pointer, c_int, *[pointer] * 4, *[c_int64] * 4, c_int]
    return library


def library() -> ctypes.CDLL:
    found = _library()
    if found is None:
        raise RuntimeError("the compiled CPU kernels are not there; `gblr.ops.native.cpu_kernels()` says why.")
    return found


def available() -> bool:
    """Whether the kernels were built and run here; where not, a warning says why, once."""
    return _library() is not None


def make_plan(structure: Int[Tensor, "num_blocks 4"], block_rank: int, shape: tuple[int, int]) -> Int[Tensor, " plan"]:
    """The layout for blocks of the given row width, row location, column width and column location."""
    for name, side, length in (("row", structure[:, 0], shape[0]), ("column", structure[:, 2], shape[1])):
        if side.numel() and not (0 <= int(side.min()) and int(side.max()) <= length):
            raise ValueError(f"{name} widths must lie in 0 .. {length}; got {int(side.min())} .. {int(side.max())}.")
    structure = structure.to("cpu", torch.int32).contiguous()
    size, sizes = c_int64(), (shape[0], shape[1], len(structure), block_rank)
    handle = library().gblr_plan_make(*sizes, structure.data_ptr(), byref(size))
    if not size.value:
        raise ValueError(f"blocks of {shape[0]} x {shape[1]} have more numbers than the CPU kernels can index (2^31).")
    plan = torch.empty(size.value, dtype=torch.int32, device="cpu")
    library().gblr_plan_take(handle, plan.data_ptr())
    return plan


def num_values(plan: Int[Tensor, " plan"]) -> int:
    """Numbers that the layout holds, its padding included."""
    return int(plan[_NUM_VALUES])


def gather(u: Tensor, v: Tensor, plan: Tensor, size: int) -> Float[Tensor, " size"]:
    """Contents in the order of the plan, padding 0: cropped ones (1-D), or factors (2-D)."""
    if u.dtype != v.dtype:
        raise RuntimeError(f"`u` and `v` must have the same dtype; got {u.dtype} and {v.dtype}.")
    u, v = u.contiguous(), v.contiguous()
    values = u.new_empty(size)
    layout = _SPREAD if u.dim() == 2 else _CROPPED
    pointers = u.data_ptr(), v.data_ptr(), values.data_ptr()
    sizes = u.numel(), v.numel(), size
    status = library().gblr_gather(_address(plan), _bytes(u.dtype), layout, *pointers, *sizes)
    _check(status, u, v, values)
    return values


def crop(values: Tensor, plan: Tensor, num_u: int, num_v: int) -> tuple[Tensor, Tensor]:
    """Back to cropped contents."""
    return _scatter(values, plan, _CROPPED, values.new_empty(num_u), values.new_empty(num_v))


def spread(values: Tensor, plan: Tensor, num_lines: int, out: int, in_: int) -> tuple[Tensor, Tensor]:
    """To factors with zeros outside the blocks: (lines, out) and (lines, in)."""
    return _scatter(values, plan, _SPREAD, values.new_zeros(num_lines, out), values.new_zeros(num_lines, in_))


def _scatter(values: Tensor, plan: Tensor, layout: int, u: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    values = values.contiguous()
    pointers = values.data_ptr(), u.data_ptr(), v.data_ptr()
    sizes = u.numel(), v.numel(), values.numel()
    status = library().gblr_scatter(_address(plan), _bytes(values.dtype), layout, *pointers, *sizes)
    _check(status, u, v, values)
    return u, v


def _bytes(dtype: torch.dtype) -> int:
    if dtype not in BYTES:
        raise RuntimeError(f"the packed kernels know float32 and bfloat16, not {dtype}.")
    return BYTES[dtype]


def _address(plan: Tensor) -> int:
    if plan.dtype != torch.int32 or not plan.is_cpu or not plan.is_contiguous() or plan.numel() <= _NUM_VALUES:
        raise RuntimeError(f"`plan` must be what `plan_blocks` gives; got {plan.dtype} of shape {tuple(plan.shape)}.")
    return plan.data_ptr()


def _check(status: int, u: Tensor, v: Tensor, values: Tensor) -> None:
    if status:
        sizes = f"{u.numel()} numbers of u, {v.numel()} of v and {values.numel()} values"
        raise RuntimeError(f"{sizes} do not fit the plan: it was made for other blocks.")


def block_matmul(
    x: Float[Tensor, "*b in"], values: Tensor, plan: Tensor, bias: Tensor | None, out_features: int, num_lines: int
) -> Float[Tensor, "*b out"]:
    if x.dtype != values.dtype or (bias is not None and bias.dtype != x.dtype):
        others = f"{values.dtype} values" + ("" if bias is None else f" and a {bias.dtype} bias")
        raise RuntimeError(f"`x` must have the dtype of the layer; got {x.dtype} with {others}.")
    if not x.dim() or (bias is not None and bias.shape != (out_features,)):
        bias_shape = None if bias is None else tuple(bias.shape)
        raise RuntimeError(f"`x` must be (..., in), `bias` ({out_features},); got {tuple(x.shape)} and {bias_shape}.")
    x, values, bias = x.contiguous(), values.contiguous(), None if bias is None else bias.contiguous()
    y = x.new_empty((*x.shape[:-1], out_features))
    status = library().gblr_block_matmul(
        _address(plan), _bytes(x.dtype), values.data_ptr(), x.data_ptr(), None if bias is None else bias.data_ptr(),
        y.data_ptr(), x.shape[-1], out_features, values.numel(), y.numel() // max(1, out_features),
        torch.get_num_threads(),
    )  # fmt: skip
    if status:
        raise RuntimeError(
            f"`x` of {x.shape[-1]} columns, {out_features} outputs and {values.numel()} values do not fit the plan."
        )
    return y


class BoundMatmul:
    """`block_matmul` for one set of values, with its pointers at hand: the shortest way for a call in plain inference.

    Neither dispatcher nor checks: the caller sees to a contiguous-or-not CPU `x` of the right dtype and last axis, and
    to a bias that `takes` is true for.
    """

    def __init__(self, values: Tensor, plan: Tensor, in_features: int, out_features: int):
        self._tensors = values, plan  # kept alive with their pointers
        self._fixed = plan.data_ptr(), BYTES[values.dtype], values.data_ptr()
        self._run = library().gblr_bound_matmul
        self.dtype, self.in_features, self.out_features = values.dtype, in_features, out_features

    def takes(self, bias: Tensor) -> bool:
        return bias.dtype == self.dtype and bias.numel() == self.out_features and bias.is_cpu and bias.is_contiguous()

    def __call__(self, x: Float[Tensor, "*b in"], bias: Tensor | None) -> Float[Tensor, "*b out"]:
        x = x.contiguous()
        sizes = x.shape
        if len(sizes) == 2:  # half the time of sizes in a tuple
            y = x.new_empty(sizes[0], self.out_features)
        else:
            y = x.new_empty((*sizes[:-1], self.out_features))
        self._run(
            *self._fixed, x.data_ptr(), None if bias is None else bias.data_ptr(), y.data_ptr(),
            x.numel() // self.in_features, torch.get_num_threads(),
        )  # fmt: skip
        return y

"""Forward and backward of mask * content on a CPU by compiled kernels (cpu.cpp), for whole widths and locations."""

import ctypes
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from gblr.ops.masked_content import reference
from gblr.ops.native import cpu_library

_POINTER, _SIZE, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
_SIZES = [_SIZE, _SIZE, _SIZE, _INT]  # blocks, block_rank, length; threads


def can_run(content: Tensor, width: Tensor, location: Tensor, table: Tensor) -> bool:
    """Whether the kernels know these dtypes; the rest makes sure that no pointer leads astray."""
    return (
        (content.dtype is torch.float32 or content.dtype is torch.bfloat16)
        and table.dtype is width.dtype is location.dtype is torch.float32
        and table.dim() == 2
        and table.shape[1] == 3 * content.shape[-1]
        and content.is_cpu
        and width.is_cpu
        and location.is_cpu
        and table.is_cpu
    )


@functools.cache
def kernels() -> "Kernels | None":
    """Those of the library that runs here; None where there is none, which the library says once."""
    library = cpu_library()
    return None if library is None else Kernels(library)


class Kernels:
    """`forward` and `backward` of one library, to be called like those of `reference`."""

    def __init__(self, library: ctypes.CDLL):
        self._forward = library.gblr_masked_content_forward
        self._forward.argtypes = [_INT, *[_POINTER] * 5, *_SIZES]
        self._backward = library.gblr_masked_content_backward
        self._backward.argtypes = [_INT, *[_POINTER] * 8, *_SIZES]

    def forward(self, content: Tensor, width: Tensor, location: Tensor, table: Tensor) -> Tensor:
        if not content.numel():
            return reference.forward(content, width, location, table)
        out = _unwritten(content)
        _call(self._forward, (content, width, location, table), (out,))
        return out

    def backward(
        self,
        grad: Tensor,
        content: Tensor,
        width: Tensor,
        location: Tensor,
        table: Tensor,
        need_content: bool,
        need_structure: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of content, width and location; one that is not needed comes back empty."""
        if not content.numel() or grad.dtype is not content.dtype:
            return reference.backward(grad, content, width, location, table, need_content, need_structure)
        if not need_structure:
            grad_content = self.forward(grad, width, location, table) if need_content else content.new_empty(0)
            return grad_content, width.new_empty(0), width.new_empty(0)
        grad_content = _unwritten(content) if need_content else content.new_empty(0)  # whose pointer is null
        gradients = grad_content, _unwritten(width), _unwritten(width)
        _call(self._backward, (grad, content, width, location, table), gradients)
        return gradients


def _unwritten(like: Tensor) -> Tensor:
    return torch.empty_like(like, memory_format=torch.contiguous_format)


def _call(kernel: Callable[..., int], inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> None:
    """`inputs` begin with a (blocks, block_rank, length)."""
    tensors = [t.contiguous() for t in inputs]  # a list, so that copies live until the kernel returns
    pointers = [t.data_ptr() for t in (*tensors, *outputs)]
    if not kernel(inputs[0].dtype is torch.bfloat16, *pointers, *inputs[0].shape, torch.get_num_threads()):
        raise ValueError(
            f"`width` must lie in [0, {inputs[0].shape[-1]}] and `location` be finite; that is not so for every block."
        )

"""Registers mask * content as the operator `gblr::masked_content`, so that compile, export and vmap see one node.

`Library` is used instead of the `custom_op` decorator, which costs several times more per call.
"""

from typing import Any

import torch
from torch import Tensor

from gblr.ops.backend import triton_module
from gblr.ops.masked_content import cpu, reference
from gblr.ops.second_order import refuse_second

_LIBRARY = torch.library.Library("gblr", "FRAGMENT")
_LIBRARY.define(
    "masked_content(Tensor content, Tensor width, Tensor location, Tensor table, ScalarType? dtype=None) -> Tensor"
)
_LIBRARY.define(
    "masked_content_backward(Tensor grad, Tensor content, Tensor width, Tensor location, Tensor table, "
    "bool need_content, bool need_structure) -> (Tensor, Tensor, Tensor)"
)


def _implementation(content: Tensor, width: Tensor, location: Tensor, table: Tensor) -> Any:
    """Kernels for whole widths and locations in single precision, on a GPU or a CPU; plain torch for all else."""
    if content.is_cuda and table.dim() == 2 and table.dtype == torch.float32:
        return triton_module("gblr.ops.masked_content.triton") or reference
    if cpu.can_run(content, width, location, table):
        return cpu.kernels() or reference
    return reference


def _is_in_blocks(content: Tensor, width: Tensor) -> bool:
    """Whether the content is (blocks, block_rank, length) as it comes, as in layers: views that change nothing would
    take longer than the mask of a small one.
    """
    return content.dim() == 3 and width.dim() == 1 and content.shape[0] == width.shape[0]


def _as_blocks(content: Tensor, width: Tensor) -> Tensor:
    """(*k, length) or (*k, block_rank, length) -> (blocks, block_rank, length)."""
    block_rank = content.shape[-2] if content.dim() == width.dim() + 2 else 1
    return content.reshape(width.numel(), block_rank, content.shape[-1])


def _forward(
    content: Tensor, width: Tensor, location: Tensor, table: Tensor, dtype: torch.dtype | None = None
) -> Tensor:
    if _is_in_blocks(content, width):
        return _in_dtype(content, width, location, table, dtype)
    out = _in_dtype(_as_blocks(content, width), width.reshape(-1), location.reshape(-1), table, dtype)
    return out.reshape(content.shape)


def _in_dtype(content: Tensor, width: Tensor, location: Tensor, table: Tensor, dtype: torch.dtype | None) -> Tensor:
    """The GPU's kernel writes another dtype at no cost; elsewhere it is a cast."""
    kernels = _implementation(content, width, location, table)
    if dtype is None or dtype == content.dtype:
        return kernels.forward(content, width, location, table)
    if content.is_cuda and kernels is not reference:
        return kernels.forward(content, width, location, table, dtype)
    return kernels.forward(content, width, location, table).to(dtype)


def _backward(
    grad: Tensor,
    content: Tensor,
    width: Tensor,
    location: Tensor,
    table: Tensor,
    need_content: bool,
    need_structure: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    kernels = _implementation(content, width, location, table)
    if grad.dtype != content.dtype and not (content.is_cuda and kernels is not reference):
        grad = grad.to(content.dtype)
    if _is_in_blocks(content, width):
        return kernels.backward(grad, content, width, location, table, need_content, need_structure)
    grad_content, grad_width, grad_location = kernels.backward(
        _as_blocks(grad, width), _as_blocks(content, width), width.reshape(-1), location.reshape(-1), table,
        need_content, need_structure,
    )  # fmt: skip
    if need_content:
        grad_content = grad_content.reshape(content.shape)
    if need_structure:
        grad_width, grad_location = grad_width.reshape(width.shape), grad_location.reshape(width.shape)
    return grad_content, grad_width, grad_location


def _fake_forward(
    content: Tensor, width: Tensor, location: Tensor, table: Tensor, dtype: torch.dtype | None = None
) -> Tensor:
    return content.new_empty(content.shape, dtype=content.dtype if dtype is None else dtype)


def _fake_backward(
    grad: Tensor,
    content: Tensor,
    width: Tensor,
    location: Tensor,
    table: Tensor,
    need_content: bool,
    need_structure: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    structure = width.shape if need_structure else (0,)
    return (
        content.new_empty(content.shape if need_content else (0,)),
        width.new_empty(structure),
        width.new_empty(structure),
    )


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    content, width, location, table, _ = inputs
    ctx.save_for_backward(content, width, location)
    ctx.table = table  # shared by every call at this sigma, so it is no memory of this node's


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    content, width, location = ctx.saved_tensors
    need_content, need_width, need_location, *_ = ctx.needs_input_grad
    grads = torch.ops.gblr.masked_content_backward(
        grad, content, width, location, ctx.table, need_content, need_width or need_location
    )
    needed = (need_content, need_width, need_location)
    return (*(g if need else None for g, need in zip(grads, needed, strict=True)), None, None)


def _batched(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
    """vmap: blocks are independent of each other, so a mapped axis is one more leading axis of blocks."""
    content, width, location, table = (
        arg.movedim(dim, 0) if dim is not None else arg.expand(info.batch_size, *arg.shape)
        for arg, dim in zip(args[:4], in_dims[:4], strict=True)
    )
    if in_dims[3] is not None:
        raise NotImplementedError(
            "masked_content cannot be mapped over its table (over sigma); loop over sigma instead."
        )
    return torch.ops.gblr.masked_content(content, width, location, table[0], *args[4:]), 0


_LIBRARY.impl("masked_content", _forward, "CompositeExplicitAutograd")
_LIBRARY.impl("masked_content_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("gblr::masked_content", _fake_forward, lib=_LIBRARY)
torch.library.register_fake("gblr::masked_content_backward", _fake_backward, lib=_LIBRARY)
torch.library.register_autograd("gblr::masked_content", _gradients, setup_context=_keep_inputs, lib=_LIBRARY)
torch.library.register_autograd("gblr::masked_content_backward", refuse_second, lib=_LIBRARY)
torch.library.register_vmap("gblr::masked_content", _batched, lib=_LIBRARY)

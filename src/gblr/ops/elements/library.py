"""Registers the rounding of structure as the operator `gblr::elements`, with its gradient."""

from typing import Any

import torch
from torch import Tensor

from gblr.ops.backend import triton_module
from gblr.ops.elements import reference
from gblr.ops.second_order import refuse_second

_LIBRARY = torch.library.Library("gblr", "FRAGMENT")
_LIBRARY.define("elements(Tensor width, Tensor location, int rows, int cols, int align) -> Tensor")
_LIBRARY.define("elements_backward(Tensor grad, Tensor width, int rows, int cols) -> (Tensor, Tensor)")


def _implementation(width: Tensor) -> Any:
    if width.is_cuda and width.dtype is torch.float32 and width.dim() == 2:
        return triton_module("gblr.ops.elements.triton") or reference
    return reference


def _forward(width: Tensor, location: Tensor, rows: int, cols: int, align: int) -> Tensor:
    return _implementation(width).forward(width, location, rows, cols, align)


def _backward(grad: Tensor, width: Tensor, rows: int, cols: int) -> tuple[Tensor, Tensor]:
    return _implementation(width).backward(grad, width, rows, cols)


def _fake_forward(width: Tensor, location: Tensor, rows: int, cols: int, align: int) -> Tensor:
    return width.new_empty(*width.shape[:-2], 4, width.shape[-1])


def _fake_backward(grad: Tensor, width: Tensor, rows: int, cols: int) -> tuple[Tensor, Tensor]:
    return width.new_empty(width.shape), width.new_empty(width.shape)


def _keep_width(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    width, _, ctx.rows, ctx.cols, _ = inputs
    ctx.save_for_backward(width)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    grads = torch.ops.gblr.elements_backward(grad, *ctx.saved_tensors, ctx.rows, ctx.cols)
    return (*(g if need else None for g, need in zip(grads, ctx.needs_input_grad, strict=False)), None, None, None)


_LIBRARY.impl("elements", _forward, "CompositeExplicitAutograd")
_LIBRARY.impl("elements_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("gblr::elements", _fake_forward, lib=_LIBRARY)
torch.library.register_fake("gblr::elements_backward", _fake_backward, lib=_LIBRARY)
torch.library.register_autograd("gblr::elements", _gradients, setup_context=_keep_width, lib=_LIBRARY)
torch.library.register_autograd("gblr::elements_backward", refuse_second, lib=_LIBRARY)

"""Registers the product over tiles (`tiling.py`) as `gblr::tile_matmul`: Triton kernels on a GPU, else plain torch.

Plain torch is the definition that the kernels are judged by, and what lets the operator be tried without a GPU.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gblr.ops.backend import triton_module
from gblr.ops.block_matmul.tiling import Sizes, pack, spread
from gblr.ops.checks import is_plain_eager

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ACTIVATIONS = ("", "relu", "silu", "gelu", "gelu_tanh")
_KERNELS = "gblr.ops.block_matmul.triton"
_LEAST_CAPABILITY = (8, 0)

_LIBRARY = torch.library.Library("gblr", "FRAGMENT")
_LIBRARY.define(
    "tile_matmul(Tensor x, Tensor values, Tensor index, Tensor? bias, SymInt[] sizes, str activation) -> Tensor"
)


@functools.cache
def reason_against(device: torch.device) -> str | None:
    """Why the kernels cannot run on that device; None where they can."""
    if device.type != "cuda":
        return f"there are no packed kernels for {device.type}"
    if torch.version.hip is not None:
        return "the packed GPU kernels were never run on AMD's GPUs"
    if torch.cuda.get_device_capability(device) < _LEAST_CAPABILITY:
        return f"the packed GPU kernels need an Ampere GPU or newer; this one is {torch.cuda.get_device_name(device)}"
    return None if triton_module(_KERNELS) is not None else "triton cannot be imported"


def tile_matmul(
    x: Tensor, values: Tensor, index: Tensor, bias: Tensor | None, sizes: Sizes, activation: str = ""
) -> Tensor:
    """activation(W x + bias), differentiable in x, values and bias; `index` and `sizes` are `tile_blocks`'s."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"`activation` must be one of {ACTIVATIONS}; got {activation!r}.")
    if x.is_cuda and not torch.compiler.is_compiling() and not torch.is_grad_enabled() and is_plain_eager():
        return _on_gpu(x, values, index, bias, sizes, activation)  # without the dispatcher's time
    return torch.ops.gblr.tile_matmul(x, values, index, bias, list(sizes), activation)


def _check(x: Tensor, values: Tensor, index: Tensor, bias: Tensor | None, sizes: Sizes) -> None:
    tensors = [x, values] if bias is None else [x, values, bias]
    if len({(t.dtype, t.device) for t in tensors}) > 1 or index.device != x.device:
        found = ", ".join(f"{t.dtype} on {t.device}" for t in tensors)
        raise RuntimeError(f"`x`, values and bias must have one dtype and one device with the index; got {found}.")
    bias_fits = bias is None or bias.shape == (sizes.out_features,)
    if not x.dim() or x.shape[-1] != sizes.in_features or not bias_fits:
        raise RuntimeError(
            f"`x` must be (..., {sizes.in_features}) and `bias` ({sizes.out_features},); got {tuple(x.shape)} and "
            f"{None if bias is None else tuple(bias.shape)}."
        )
    if values.numel() != sizes.num_values or index.numel() != sum(sizes.parts):
        raise RuntimeError(
            f"{values.numel()} values and an index of {index.numel()} do not fit the layout: it is for other blocks."
        )


def _on_gpu(
    x: Tensor, values: Tensor, index: Tensor, bias: Tensor | None, sizes: Sequence[int], activation: str
) -> Tensor:
    layout = Sizes(*sizes)
    _check(x, values, index, bias, layout)
    kernels = triton_module(_KERNELS)
    if kernels is None:
        raise RuntimeError("the packed GPU kernels need triton, which cannot be imported.")
    flat = x.reshape(-1, layout.in_features)
    y = kernels.tile_matmul(flat, values.contiguous(), index, bias, layout, activation)
    return y.reshape(*x.shape[:-1], layout.out_features)


def _plain(x: Tensor, values: Tensor, index: Tensor, bias: Tensor | None, sizes: list[int], activation: str) -> Tensor:
    layout = Sizes(*sizes)
    _check(x, values, index, bias, layout)
    u, v = spread(values, index, layout)
    return _activated(functional.linear(functional.linear(x, v), u.T, bias), activation)


def _activated(y: Tensor, activation: str) -> Tensor:
    if activation == "gelu_tanh":
        return functional.gelu(y, approximate="tanh")
    return getattr(functional, activation)(y) if activation else y


def _fake(x: Tensor, values: Tensor, index: Tensor, bias: Tensor | None, sizes: list[int], activation: str) -> Tensor:
    return x.new_empty((*x.shape[:-1], sizes[0]))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, values, index, bias, ctx.sizes, ctx.activation = inputs
    ctx.save_for_backward(x, values, index, bias if ctx.activation else None)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """By the two factors of W = u^T v: what training costs follows their size, not the blocks'."""
    x, values, index, bias = ctx.saved_tensors
    sizes = Sizes(*ctx.sizes)
    need_x, need_values, _, need_bias, *_ = ctx.needs_input_grad
    u, v = spread(values, index, sizes)
    tokens = x.reshape(-1, sizes.in_features)
    flat = grad.reshape(-1, sizes.out_features)
    if ctx.activation:
        flat = _through(ctx.activation, functional.linear(tokens @ v.T, u.T, bias), flat)
    grad_x = grad_values = None
    grad_z = flat @ u.T  # (tokens, lines)
    if need_x:
        grad_x = (grad_z @ v).reshape(x.shape)
    if need_values:
        grad_values = pack((tokens @ v.T).T @ flat, grad_z.T @ tokens, index, sizes)
    return grad_x, grad_values, None, flat.sum(0) if need_bias else None, None, None


def _through(activation: str, y: Tensor, grad: Tensor) -> Tensor:
    """The gradient before the activation, whose input is made again."""
    with torch.enable_grad():
        y = y.detach().requires_grad_()
        return torch.autograd.grad(_activated(y, activation), y, grad)[0]


_LIBRARY.impl("tile_matmul", _on_gpu, "CUDA")
_LIBRARY.impl("tile_matmul", _plain, "CPU")
torch.library.register_fake("gblr::tile_matmul", _fake, lib=_LIBRARY)
torch.library.register_autograd("gblr::tile_matmul", _gradients, setup_context=_keep, lib=_LIBRARY)

"""Registers the product of packed blocks as `gblr::block_matmul`, so that compile, export and autograd see one node.

`Library` is used instead of the `custom_op` decorator, which costs several times more per call. `gblr::pack_blocks`
makes the kernel's values of cropped contents, differentiably.
"""

from typing import Any

import torch
from torch import Tensor

from gblr.ops.block_matmul import cpu

_LIBRARY = torch.library.Library("gblr", "FRAGMENT")
_LIBRARY.define(
    "block_matmul(Tensor x, Tensor values, Tensor plan, Tensor? bias, SymInt out_features, SymInt num_lines) -> Tensor"
)
_LIBRARY.define("pack_blocks(Tensor u, Tensor v, Tensor plan, SymInt size) -> Tensor")
_LIBRARY.define("crop_blocks(Tensor values, Tensor plan, SymInt num_u, SymInt num_v) -> (Tensor, Tensor)")
_LIBRARY.define(
    "spread_blocks(Tensor values, Tensor plan, SymInt num_lines, SymInt out_features, SymInt in_features) "
    "-> (Tensor, Tensor)"
)

for _name, _function in {
    "block_matmul": cpu.block_matmul,
    "pack_blocks": cpu.gather,
    "crop_blocks": cpu.crop,
    "spread_blocks": cpu.spread,
}.items():
    _LIBRARY.impl(_name, _function, "CPU")


def _fake_block_matmul(
    x: Tensor, values: Tensor, plan: Tensor, bias: Tensor | None, out_features: int, num_lines: int
) -> Tensor:
    return x.new_empty((*x.shape[:-1], out_features))


def _fake_pack_blocks(u: Tensor, v: Tensor, plan: Tensor, size: int) -> Tensor:
    return u.new_empty(size)


def _fake_crop_blocks(values: Tensor, plan: Tensor, num_u: int, num_v: int) -> tuple[Tensor, Tensor]:
    return values.new_empty(num_u), values.new_empty(num_v)


def _fake_spread_blocks(
    values: Tensor, plan: Tensor, num_lines: int, out_features: int, in_features: int
) -> tuple[Tensor, Tensor]:
    return values.new_empty(num_lines, out_features), values.new_empty(num_lines, in_features)


for _name, _fake in (
    ("block_matmul", _fake_block_matmul),
    ("pack_blocks", _fake_pack_blocks),
    ("crop_blocks", _fake_crop_blocks),
    ("spread_blocks", _fake_spread_blocks),
):
    torch.library.register_fake(f"gblr::{_name}", _fake, lib=_LIBRARY)


def _keep_product(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, values, plan, _, ctx.out_features, ctx.num_lines = inputs
    ctx.save_for_backward(x, values, plan)


def _product_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """By the two factors of W = u^T v: training a packed layer costs what its factors cost."""
    x, values, plan = ctx.saved_tensors
    need_x, need_values, _, need_bias, *_ = ctx.needs_input_grad
    grad_x = grad_values = grad_bias = None
    flat = grad.reshape(-1, ctx.out_features)
    if need_x or need_values:
        u, v = torch.ops.gblr.spread_blocks(values, plan, ctx.num_lines, ctx.out_features, x.shape[-1])
        grad_z = flat @ u.T  # (tokens, lines)
        if need_x:
            grad_x = (grad_z @ v).reshape(x.shape)
        if need_values:
            tokens = x.reshape(-1, x.shape[-1])
            grad_u, grad_v = (tokens @ v.T).T @ flat, grad_z.T @ tokens
            grad_values = torch.ops.gblr.pack_blocks(grad_u, grad_v, plan, values.shape[0])
    if need_bias:
        grad_bias = flat.sum(0)
    return grad_x, grad_values, None, grad_bias, None, None


def _keep_packing(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    u, v, plan, _ = inputs
    ctx.save_for_backward(plan)
    ctx.shapes = u.shape, v.shape


def _packing_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (plan,) = ctx.saved_tensors
    u, v = ctx.shapes
    if len(u) == 2:
        return *torch.ops.gblr.spread_blocks(grad, plan, u[0], u[1], v[1]), None, None
    return *torch.ops.gblr.crop_blocks(grad, plan, u[0], v[0]), None, None


def _keep_unpacking(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    values, plan, *ctx.others = inputs
    ctx.save_for_backward(plan)
    ctx.size = values.shape[0]


def _unpacking_gradients(ctx: Any, grad_u: Tensor, grad_v: Tensor) -> tuple[Tensor | None, ...]:
    (plan,) = ctx.saved_tensors
    return torch.ops.gblr.pack_blocks(grad_u, grad_v, plan, ctx.size), None, *(None for _ in ctx.others)


for _name, _keep, _gradients in (
    ("block_matmul", _keep_product, _product_gradients),
    ("pack_blocks", _keep_packing, _packing_gradients),
    ("crop_blocks", _keep_unpacking, _unpacking_gradients),  # with the next one, for gradients of gradients
    ("spread_blocks", _keep_unpacking, _unpacking_gradients),
):
    torch.library.register_autograd(f"gblr::{_name}", _gradients, setup_context=_keep, lib=_LIBRARY)

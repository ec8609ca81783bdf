"""Baselines trained by their composed weight: W from its factors once a step, then one dense product.

Training sees tens of thousands of tokens a step, and a GPU then takes longer for many small products than for one large
one: W costs next to nothing beside it. The result is the same; costs are counted on the factors all the same.
"""

import types
from typing import Any

import torch
from torch import Tensor, nn

from gblr.layers.structured import StructuredLinear
from gblr.matrices.blast import BlastMatrix
from gblr.matrices.monarch import MonarchMatrix, monarch_permutation
from gblr.matrices.pixelfly import PixelflyMatrix


def compose_(model: nn.Module) -> None:
    """Gives the Monarch, Pixelfly and BLAST layers of `model` that route; others keep their own."""
    for module in model.modules():
        if not isinstance(module, StructuredLinear) or type(module._template) not in _WEIGHTS:
            continue
        if isinstance(module.matrix, MonarchMatrix):  # a buffer: made within a graph, it would be copied from the host
            index = monarch_permutation(module.matrix.num_blocks, module.matrix.left.shape[2])
            module.register_buffer("permutation", index.to(module.matrix.left.device), persistent=False)
        module.forward = types.MethodType(_forward, module)  # type: ignore[method-assign]


def _forward(layer: Any, x: Tensor) -> Tensor:
    return nn.functional.linear(x, _WEIGHTS[type(layer._template)](layer), layer.bias)


def _monarch(layer: Any) -> Tensor:
    return _block_diagonal(layer.left) @ _block_diagonal(layer.right)[layer.permutation]


def _block_diagonal(blocks: Tensor) -> Tensor:
    """`torch.block_diag(*blocks)` without a copy for each block."""
    num, rows, cols = blocks.shape
    apart = torch.eye(num, device=blocks.device, dtype=blocks.dtype)[:, None, :, None]
    return (blocks[:, :, None] * apart).view(num * rows, num * cols)


def _pixelfly(layer: Any) -> Tensor:
    """No two tiles have the same place, so that none is added to another."""
    tiles = layer.blocks.new_zeros(*layer._template.grid, *layer.blocks.shape[1:])
    tiles = tiles.index_put((layer.block_row, layer.block_col), layer.blocks)
    return tiles.transpose(1, 2).reshape(layer._template.shape) + layer.u.T @ layer.v


def _blast(layer: Any) -> Tensor:
    """Tile (i, j) is u_i diag(s_ij) v_j^T: all u with all s at first, which are few."""
    scaled = layer.u[:, :, None] * layer.s[:, None]  # (i, o, j, r)
    rows, cols = layer._template.shape
    return torch.einsum("iojr,jnr->iojn", scaled, layer.v).reshape(rows, cols)


_WEIGHTS: dict[type[Any], Any] = {MonarchMatrix: _monarch, PixelflyMatrix: _pixelfly, BlastMatrix: _blast}

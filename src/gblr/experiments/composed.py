"""Baselines trained by their composed weight: W from its factors once a step, then one dense product.

Training sees tens of thousands of tokens a step, and a GPU then takes longer for many small products than for one large
one: W costs next to nothing beside it. The result is the same; costs are counted on the factors all the same.
"""

import types
from typing import Any

from torch import Tensor, nn

from gblr.layers.structured import StructuredLinear
from gblr.matrices.blast import BlastMatrix
from gblr.matrices.monarch import MonarchMatrix
from gblr.matrices.pixelfly import PixelflyMatrix


def compose_(model: nn.Module) -> None:
    """Gives the Monarch, Pixelfly and BLAST layers of `model` that route; others keep their own."""
    for module in model.modules():
        if isinstance(module, StructuredLinear) and isinstance(
            module.matrix, MonarchMatrix | PixelflyMatrix | BlastMatrix
        ):
            module.forward = types.MethodType(_forward, module)  # type: ignore[method-assign]


def _forward(layer: Any, x: Tensor) -> Tensor:
    matrix = layer.matrix
    weight = _pixelfly(matrix) if isinstance(matrix, PixelflyMatrix) else matrix.to_dense()
    return nn.functional.linear(x, weight, layer.bias)


def _pixelfly(matrix: PixelflyMatrix) -> Tensor:
    """As `to_dense`, but tiles are put, not added: those of a fit have places of their own, and additions at places
    known only when they run are slow on a GPU."""
    tiles = matrix.blocks.new_zeros(*matrix.grid, *matrix.blocks.shape[1:])
    tiles = tiles.index_put((matrix.block_row, matrix.block_col), matrix.blocks)
    return tiles.transpose(1, 2).reshape(matrix.shape) + matrix.u.T @ matrix.v

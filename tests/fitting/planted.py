"""Weights with known structure, and errors, for the tests of GBLR fits."""

import torch
from torch import Tensor

from gblr.matrices.base import StructuredMatrix
from gblr.matrices.gblr import GBLRMatrix


def planted_blocks(
    out_features: int, in_features: int, generator: torch.Generator, num_blocks: int = 4, size: int = 8
) -> GBLRMatrix:
    """Dense square blocks along the diagonal: of full rank as a whole, cheap as blocks."""
    blocks = [torch.randn(size, size, generator=generator) for _ in range(num_blocks)]
    starts = [size * k for k in range(num_blocks)]
    return GBLRMatrix.from_block_sparse(blocks, starts, starts, (out_features, in_features))


def planted(out_features: int, in_features: int, generator: torch.Generator) -> Tensor:
    """Two strong blocks of rank 2 in a sea of noise."""
    weight = 0.05 * torch.randn(out_features, in_features, generator=generator)
    for row, col in ((0, 4), (10, 12)):
        u, v = torch.randn(2, 7, generator=generator), torch.randn(2, 6, generator=generator)
        weight[row : row + 6, col : col + 6] += (u[:, :6].T @ v)[: out_features - row, : in_features - col]
    return weight


def relative_error(matrix: StructuredMatrix, weight: Tensor) -> float:
    return float((matrix.to_dense().double() - weight.double()).norm() / weight.double().norm())

"""Eq. 4 and Definition 1: a product costs the sum of the widths, 2 K times their average."""

import pytest
import torch

from gblr.matrices.gblr import GBLRMatrix
from gblr.matrices.structure import Structure
from tests.matrices.plain import Meter, gblr_loop, randn


@pytest.mark.parametrize("block_rank", [1, 3])
def test_a_product_costs_two_k_average_widths_per_rank(block_rank, generator):
    num_blocks, out_features, in_features = 6, 11, 8

    def draw(low, high):
        return torch.randint(low, high, (num_blocks,), generator=generator)

    structure = Structure(
        draw(1, out_features + 1), draw(0, out_features), draw(1, in_features + 1), draw(0, in_features)
    )
    matrix = GBLRMatrix(
        structure,
        randn(num_blocks, block_rank, out_features, generator=generator),
        randn(num_blocks, block_rank, in_features, generator=generator),
    )
    widths = structure.row_width.tolist() + structure.col_width.tolist()
    assert structure.average_width == pytest.approx(sum(widths) / (2 * num_blocks))
    assert matrix.num_mults == block_rank * sum(widths) == block_rank * 2 * num_blocks * structure.average_width
    meter = Meter()
    gblr_loop(matrix, randn(in_features, generator=generator).tolist(), meter)
    assert meter.num_mults == matrix.num_mults


def test_a_dead_block_costs_less_than_equation_4_says():
    """Our count leaves out blocks with one width of 0: nothing has to be multiplied."""
    structure = Structure(*(torch.tensor(values) for values in ([3, 0], [0, 0], [2, 4], [0, 0])))
    assert GBLRMatrix(structure, torch.ones(2, 1, 5), torch.ones(2, 1, 5)).num_mults == 3 + 2

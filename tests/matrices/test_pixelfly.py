import pytest
import torch

from gblr.matrices.pixelfly import PixelflyMatrix, butterfly_support
from tests.helpers import raises_value_error


@pytest.mark.parametrize("size", [1, 2, 4, 8, 6])
@pytest.mark.parametrize("max_stride", [1, 2, 3, 4, 8, 16])
def test_the_support_is_the_diagonal_and_power_of_two_strides_below_the_largest(size, max_stride):
    strides = {0, *(2**e for e in range(6) if 2**e < max_stride)}
    expected = [(i, j) for i in range(size) for j in range(size) if i ^ j in strides]
    rows, cols = butterfly_support((size, size), max_stride)
    assert list(zip(rows.tolist(), cols.tolist(), strict=True)) == expected


@pytest.mark.parametrize("grid", [(4, 8), (8, 4), (4, 12), (3, 5)])
def test_on_a_rectangular_grid_the_pattern_is_stretched_along_the_longer_side(grid):
    rows, cols = butterfly_support(grid, 2)
    dense = torch.zeros(grid, dtype=torch.bool)
    dense[rows, cols] = True
    side = min(grid)
    square = torch.zeros(side, side, dtype=torch.bool)
    square[butterfly_support((side, side), 2)] = True
    for i in range(grid[0]):
        for j in range(grid[1]):
            assert dense[i, j] == square[i * side // grid[0], j * side // grid[1]]


def test_tiles_that_share_a_place_add_up():
    place = torch.tensor([0, 0])
    zero = torch.zeros(1, 2)
    matrix = PixelflyMatrix(torch.ones(2, 2, 2), place, place, zero, zero, grid=(1, 1))
    assert torch.equal(matrix.to_dense(), torch.full((2, 2), 2.0))
    assert torch.equal(matrix.matmul(torch.ones(2)), torch.full((2,), 4.0))


def test_shapes_that_do_not_fit_the_grid_are_refused():
    blocks, place = torch.ones(1, 2, 2), torch.tensor([0])
    with raises_value_error("`u`", "`v`", "(rank, 4)", (1, 5)):
        PixelflyMatrix(blocks, place, place, torch.ones(1, 5), torch.ones(1, 4), grid=(2, 2))
    with raises_value_error("`block_row`", "`block_col`", 1, (2,)):
        PixelflyMatrix(blocks, torch.tensor([0, 1]), place, torch.ones(1, 4), torch.ones(1, 4), grid=(2, 2))
    with raises_value_error("`blocks`", (2, 2)):
        PixelflyMatrix(torch.ones(2, 2), place, place, torch.ones(1, 4), torch.ones(1, 4), grid=(2, 2))
    with raises_value_error("`max_stride`", 1, 0):
        butterfly_support((2, 2), 0)

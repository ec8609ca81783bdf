"""Special to GBLR matrices; Theorem 1's constructors are in tests/paper/test_theorem_1.py, the rest in the contract."""

import math

import pytest
import torch

from gblr.matrices.gblr import GBLRMatrix
from gblr.matrices.structure import Structure
from gblr.ops.masks import boxcar_mask
from tests.helpers import assert_close, raises_value_error
from tests.matrices.plain import randn, random_gblr


def one_block(row_width, row_location, col_width, col_location, dtype=torch.long) -> Structure:
    return Structure(*(torch.tensor([v], dtype=dtype) for v in (row_width, row_location, col_width, col_location)))


def test_a_block_that_wraps_around_both_axes_sits_in_the_four_corners():
    matrix = GBLRMatrix(one_block(2, 3, 2, 2), torch.ones(1, 1, 4), torch.ones(1, 1, 3))
    expected = torch.zeros(4, 3)
    expected[[0, 0, 3, 3], [0, 2, 0, 2]] = 1
    assert torch.equal(matrix.to_dense(), expected)


def test_blocks_that_overlap_add_up(generator):
    matrix = random_gblr(8, 6, generator)
    total = torch.zeros(8, 6, dtype=torch.float64)
    for k in range(matrix.num_blocks):
        alone = Structure(*(value[k : k + 1] for value in vars(matrix.structure).values()))
        total += GBLRMatrix(alone, matrix.u[k : k + 1], matrix.v[k : k + 1]).to_dense()
    assert_close(matrix.to_dense(), total)


def test_content_outside_the_masks_has_no_effect(generator):
    matrix = random_gblr(8, 6, generator)
    factors = matrix.masked_factors()
    u, v = (f.reshape(c.shape) for f, c in zip(factors, (matrix.u, matrix.v), strict=True))
    noisy = GBLRMatrix(
        matrix.structure, torch.where(u == 0, 99.0, matrix.u), torch.where(v == 0, -99.0, matrix.v)
    )  # fmt: skip
    assert_close(noisy.to_dense(), matrix.to_dense())


@pytest.mark.parametrize("stray", [math.nan, math.inf])
def test_content_outside_the_masks_may_be_no_number(stray, generator):
    matrix = random_gblr(8, 6, generator)
    s, x = matrix.structure, torch.randn(5, 6, dtype=torch.float64, generator=generator)
    u, v = (content.clone() for content in (matrix.u, matrix.v))
    u[boxcar_mask(s.row_width, s.row_location, 8)[:, None].expand_as(u) == 0] = stray
    v[boxcar_mask(s.col_width, s.col_location, 6)[:, None].expand_as(v) == 0] = stray
    v[~s.live] = stray  # all of a dead block is outside
    noisy = GBLRMatrix(s, u.requires_grad_(), v.requires_grad_())
    assert torch.equal(noisy.to_dense(), matrix.to_dense())
    assert torch.equal(noisy.matmul(x), matrix.matmul(x))
    noisy.matmul(x).sum().backward()
    assert u.grad.isfinite().all() and v.grad.isfinite().all()


def test_a_block_with_one_width_of_zero_costs_and_adds_nothing():
    matrix = GBLRMatrix(one_block(0, 1, 5, 0), torch.ones(1, 2, 6), torch.ones(1, 2, 5))
    assert matrix.num_mults == matrix.num_params == 0
    assert not matrix.to_dense().any()


def test_a_matrix_without_blocks_is_zero():
    nothing = torch.zeros(0, dtype=torch.long)
    matrix = GBLRMatrix(Structure(*[nothing] * 4), torch.zeros(0, 1, 4), torch.zeros(0, 1, 3))
    assert matrix.num_mults == 0
    assert torch.equal(matrix.matmul(torch.ones(2, 3)), torch.zeros(2, 4))


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int8, torch.int16, torch.long, torch.float16, torch.bfloat16, torch.float32]
)
def test_costs_are_exact_whatever_dtype_holds_the_structure(dtype):
    width = torch.full((301,), 120, dtype=dtype)
    matrix = GBLRMatrix(Structure(width, width, width, width), torch.zeros(301, 1, 200), torch.zeros(301, 1, 200))
    assert matrix.num_mults == 301 * 240


def test_costs_beyond_the_whole_numbers_of_float32_are_exact():
    width = torch.full((5001,), 4095.0)
    content = torch.zeros(1).expand(5001, 1, 4096)
    assert GBLRMatrix(Structure(width, width, width, width), content, content).num_mults == 5001 * 8190


def test_a_float_structure_gives_the_same_matrix_as_an_integer_one(generator):
    matrix = random_gblr(8, 6, generator)
    as_float = Structure(*(value.float() for value in vars(matrix.structure).values()))
    assert torch.equal(GBLRMatrix(as_float, matrix.u, matrix.v).to_dense(), matrix.to_dense())


def test_another_dtype_for_the_contents_leaves_a_float_structure_exact(generator):
    structure = one_block(301, 2, 301, 2, dtype=torch.float32)
    matrix = GBLRMatrix(structure, randn(1, 1, 400, generator=generator), randn(1, 1, 400, generator=generator))
    assert matrix.to(torch.bfloat16).num_mults == matrix.num_mults


def test_widths_over_the_axis_are_refused():
    u, v = torch.ones(1, 1, 4), torch.ones(1, 1, 3)
    with raises_value_error("`row_width`", 4, 5):
        GBLRMatrix(one_block(5, 0, 1, 0), u, v)
    with raises_value_error("`col_width`", 3, 4):
        GBLRMatrix(one_block(1, 0, 4, 0), u, v)


def test_shapes_that_do_not_agree_are_refused():
    structure = one_block(1, 0, 1, 0)
    with raises_value_error("`u`", "(num_blocks, block_rank, out_features)", (1, 4)):
        GBLRMatrix(structure, torch.ones(1, 4), torch.ones(1, 1, 3))
    with raises_value_error("`v`", "(num_blocks, block_rank, in_features)", (3,)):
        GBLRMatrix(structure, torch.ones(1, 1, 4), torch.ones(3))
    with raises_value_error("`structure`", "`u`", "`v`", 1, (2, 1, 4), (2, 1, 3)):
        GBLRMatrix(structure, torch.ones(2, 1, 4), torch.ones(2, 1, 3))
    with raises_value_error("`u`", "`v`", (1, 2, 4), (1, 1, 3)):
        GBLRMatrix(structure, torch.ones(1, 2, 4), torch.ones(1, 1, 3))


def test_constructors_refuse_what_they_cannot_place():
    block = torch.ones(2, 2)
    with raises_value_error("`blocks`", "`row_starts`", "`col_starts`", 1, 2):
        GBLRMatrix.from_block_sparse([block], [0, 1], [0], (4, 4))
    with raises_value_error("`blocks`", "empty"):
        GBLRMatrix.from_block_sparse([], [], [], (4, 4))
    with raises_value_error((5, 2), (4, 4)):
        GBLRMatrix.from_block_sparse([torch.ones(5, 2)], [0], [0], (4, 4))
    with raises_value_error("`u`", "`v`", (2, 2, 1, 3), (2, 1, 1, 3)):
        GBLRMatrix.from_block_low_rank(torch.ones(2, 2, 1, 3), torch.ones(2, 1, 1, 3))
    with raises_value_error("`u`", "(rank, out_features)", (3,)):
        GBLRMatrix.from_low_rank(torch.ones(3), torch.ones(1, 3))

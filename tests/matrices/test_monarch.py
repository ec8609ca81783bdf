import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gblr.layers.structured import StructuredLinear
from gblr.matrices.monarch import MonarchMatrix, monarch_permutation
from tests.helpers import raises_value_error
from tests.matrices.plain import randn
from tests.shape_hook import shapes_unchecked


@given(num_blocks=st.integers(1, 7), inner_block=st.integers(1, 20))
def test_the_permutation_is_one_and_undoes_itself(num_blocks, inner_block):
    p = monarch_permutation(num_blocks, inner_block)
    assert sorted(p.tolist()) == list(range(num_blocks * inner_block))
    assert torch.equal(p[p], torch.arange(len(p)))


@given(num_blocks=st.integers(1, 5), inner_block=st.integers(1, 20))
def test_the_permutation_spreads_every_right_block_evenly_over_the_left_blocks(num_blocks, inner_block):
    source = monarch_permutation(num_blocks, inner_block) // inner_block  # right block of each inner value
    for left in source.reshape(num_blocks, inner_block):
        counts = left.bincount(minlength=num_blocks)
        assert counts.max() - counts.min() <= 1


def test_equal_shares_are_the_transposition_of_the_monarch_paper():
    expected = torch.arange(36).reshape(3, 3, 4).transpose(0, 1).flatten()
    assert torch.equal(monarch_permutation(3, 12), expected)


@pytest.mark.parametrize(("out_features", "in_features"), [(12, 8), (8, 12), (8, 8)])
def test_tiles_have_rank_inner_over_blocks_squared(out_features, in_features, generator):
    num_blocks, inner = 2, 8
    left = randn(num_blocks, out_features // num_blocks, inner // num_blocks, generator=generator)
    right = randn(num_blocks, inner // num_blocks, in_features // num_blocks, generator=generator)
    matrix = MonarchMatrix(left, right)
    tiles = matrix.to_dense().unflatten(0, (num_blocks, -1)).unflatten(2, (num_blocks, -1)).transpose(1, 2)
    assert torch.linalg.matrix_rank(tiles).tolist() == [[2, 2], [2, 2]]
    assert matrix.num_mults == inner * (out_features + in_features) // num_blocks


def test_factors_that_do_not_agree_are_refused():
    with raises_value_error("`left`", "`right`", (2, 3, 4), (2, 5, 3)):
        MonarchMatrix(torch.ones(2, 3, 4), torch.ones(2, 5, 3))
    with raises_value_error("`left`", "`right`", (2, 3, 4), (3, 4, 3)):
        MonarchMatrix(torch.ones(2, 3, 4), torch.ones(3, 4, 3))
    with raises_value_error("`left`", (3, 4)):
        MonarchMatrix(torch.ones(3, 4), torch.ones(3, 4, 3))


def test_a_layer_can_be_traced(generator):
    """torch.jit.trace hands sizes over as tensors."""
    matrix = MonarchMatrix(randn(3, 5, 4, generator=generator), randn(3, 4, 6, generator=generator))
    x = randn(2, matrix.shape[1], generator=generator)
    with shapes_unchecked(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(StructuredLinear(matrix), x)
        assert torch.allclose(traced(x), matrix.matmul(x), atol=1e-5)

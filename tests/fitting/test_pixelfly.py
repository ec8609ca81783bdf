import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gblr.fitting.config import PixelflyConfig
from gblr.fitting.fit import fit
from gblr.fitting.pixelfly import pixelfly_plan
from gblr.matrices.pixelfly import PixelflyMatrix, butterfly_support
from tests.fitting.baselines import (
    assert_batch_equals_single,
    assert_inputs_are_used,
    errors,
    fit_all,
    randn,
    random_gram,
)
from tests.helpers import raises_value_error


@given(st.integers(1, 48), st.integers(1, 48), st.floats(0.02, 1), st.sampled_from([1, 4, 32]), st.floats(0, 0.9))
def test_the_budget_holds_for_any_shape(out_features, in_features, cost, tile, share):
    weight = torch.randn(1, out_features, in_features, generator=torch.Generator().manual_seed(0))
    config = PixelflyConfig(cost, tile=tile, low_rank_share=share, steps=1)
    if cost * weight.numel() < max(out_features, in_features):  # less than one element in each row and column
        with raises_value_error("Pixelfly", f"{out_features} x {in_features}"):
            fit_all(config, weight)
        return
    (matrix,) = fit_all(config, weight)
    assert max(matrix.blocks.shape[1:]) <= tile
    assert cost * weight.numel() - matrix.num_mults < out_features + in_features  # no whole rank is left unused


def test_the_plan_takes_the_largest_stride_that_fits():
    plan = pixelfly_plan((64, 64), mults=2048, tile=8, low_rank_share=0.3)
    assert (plan.grid, plan.max_stride) == ((8, 8), 2)  # 16 tiles cost 1024, 24 would cost 1536 > 0.7 * 2048
    assert plan.rank == (2048 - 1024) // 128
    assert pixelfly_plan((64, 64), mults=2400, tile=8).max_stride == 4
    assert pixelfly_plan((64, 64), mults=1000, tile=64).grid == (8, 8)  # larger tiles: the diagonal is too dear
    assert pixelfly_plan((21, 64), mults=700, tile=8).grid == (3, 8)  # 7 and 8 divide


@pytest.mark.parametrize("weighted", [False, True])
def test_a_pixelfly_matrix_is_recovered(weighted, generator):
    rows, cols = butterfly_support((8, 8), 2)
    blocks, u, v = (randn(*s, generator=generator) for s in ((len(rows), 6, 4), (2, 48), (2, 32)))
    planted = PixelflyMatrix(blocks, rows, cols, u, v, (8, 8))
    weight = planted.to_dense()[None]
    gram = random_gram(1, 32, generator) if weighted else None
    config = PixelflyConfig(planted.relative_cost, tile=6, low_rank_share=0.25, steps=200)
    (matrix,) = fit_all(config, weight, gram)
    assert (matrix.grid, matrix.u.shape[0]) == ((8, 8), 2)
    assert errors([matrix], weight, gram).item() < 1e-3


def test_tiles_are_the_weight_itself_where_no_rank_is_left(generator):
    weight = randn(1, 16, 16, generator=generator)
    (matrix,) = fit_all(PixelflyConfig(0.25, tile=4, low_rank_share=0), weight)
    assert matrix.u.shape[0] == 0
    expected = torch.block_diag(*(weight[0, i : i + 4, i : i + 4] for i in range(0, 16, 4)))
    torch.testing.assert_close(matrix.to_dense(), expected)


def test_steps_never_raise_the_error(generator):
    weight, gram = randn(2, 20, 15, generator=generator), random_gram(2, 15, generator)
    for g in (None, gram):
        course = [errors(fit_all(PixelflyConfig(0.6, tile=5, steps=n), weight, g), weight, g) for n in (1, 2, 4, 8)]
        assert all(bool((after <= before).all()) for before, after in itertools.pairwise(course))


@pytest.mark.parametrize("shape", [(16, 32), (32, 16), (24, 20)])
def test_inputs_lower_the_error_of_outputs(shape, generator):
    weight, gram = randn(2, *shape, generator=generator), random_gram(2, shape[1], generator)
    assert_inputs_are_used(PixelflyConfig(0.5, tile=4), weight, gram, margin=0.9)


def test_a_batch_gives_each_matrix_its_own_plan(generator):
    weight, gram = randn(3, 16, 16, generator=generator), random_gram(3, 16, generator)
    assert_batch_equals_single(PixelflyConfig(0.5, tile=4), weight, gram, [64, 200, 130])


def test_budgets_and_options_that_cannot_be_met_are_refused():
    with raises_value_error("Pixelfly", "20 x 10", "0.1", "0.05", "`relative_cost`"):
        fit(torch.ones(20, 10), PixelflyConfig(0.05))
    with raises_value_error("`low_rank_share`", "1.0"):
        PixelflyConfig(0.5, low_rank_share=1.0)
    with raises_value_error("`tile`", 0):
        PixelflyConfig(0.5, tile=0)

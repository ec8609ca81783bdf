import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gblr.fitting.config import LowRankConfig
from gblr.fitting.fit import fit
from tests.fitting.baselines import (
    assert_batch_equals_single,
    assert_inputs_are_used,
    errors,
    fit_all,
    randn,
    random_gram,
)
from tests.helpers import raises_value_error


@given(st.integers(2, 40), st.integers(2, 40), st.floats(0.01, 1), st.sampled_from([1, 8]))
def test_the_rank_is_the_largest_within_the_budget(out_features, in_features, cost, multiple):
    weight = torch.randn(1, out_features, in_features, generator=torch.Generator().manual_seed(0))
    per_rank, mults = out_features + in_features, cost * out_features * in_features
    if mults < per_rank:
        with raises_value_error("low-rank", "`relative_cost`"):
            fit_all(LowRankConfig(cost, rank_multiple=multiple), weight)
        return
    (matrix,) = fit_all(LowRankConfig(cost, rank_multiple=multiple), weight)
    assert matrix.rank % multiple == 0 or mults < multiple * per_rank
    slack = multiple if mults >= multiple * per_rank else 1
    assert (matrix.rank + slack) * per_rank > mults - 1e-6


@pytest.mark.parametrize("shape", [(13, 20), (20, 13), (16, 16)])
def test_the_error_is_that_of_eckart_and_young(shape, generator):
    weight = randn(2, *shape, generator=generator)
    s = torch.linalg.svdvals(weight)
    rank = int(0.5 * shape[0] * shape[1] / sum(shape))
    expected = s[:, rank:].square().sum(1).sqrt() / s.square().sum(1).sqrt()
    torch.testing.assert_close(errors(fit_all(LowRankConfig(0.5), weight), weight), expected)


@pytest.mark.parametrize("shape", [(13, 20), (20, 13)])
def test_the_weighted_error_is_that_of_eckart_and_young_in_the_metric_of_the_inputs(shape, generator):
    weight, gram = randn(2, *shape, generator=generator), random_gram(2, shape[1], generator)
    s = torch.linalg.svdvals(weight @ torch.linalg.cholesky(gram))
    expected = s[:, 3:].square().sum(1).sqrt() / s.square().sum(1).sqrt()
    torch.testing.assert_close(errors(fit_all(LowRankConfig(0.45), weight, gram), weight, gram), expected)
    assert_inputs_are_used(LowRankConfig(0.45), weight, gram, margin=0.9)


def test_factors_are_balanced(generator):
    (matrix,) = fit_all(LowRankConfig(0.5), randn(1, 30, 12, generator=generator))
    torch.testing.assert_close(matrix.u.norm(dim=1), matrix.v.norm(dim=1))


def test_a_batch_gives_each_matrix_its_own_rank(generator):
    weight, gram = randn(3, 12, 10, generator=generator), random_gram(3, 10, generator)
    assert_batch_equals_single(LowRankConfig(0.5), weight, gram, [22, 66, 60])


def test_a_budget_below_rank_1_is_refused_with_the_smallest_cost():
    with raises_value_error("12 x 8", "0.2084", "0.0938", "low-rank"):
        fit(torch.ones(12, 8), LowRankConfig(0.1))
    with raises_value_error("above dense", "leave this layer out"):
        fit(torch.ones(1, 8), LowRankConfig(1.0))
    with raises_value_error("`rank_multiple`", 0):
        LowRankConfig(0.5, rank_multiple=0)


def test_the_dtype_of_the_weight_comes_back():
    assert fit(torch.randn(12, 8).bfloat16(), LowRankConfig(0.5)).u.dtype == torch.bfloat16

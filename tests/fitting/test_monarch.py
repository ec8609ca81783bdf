import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gblr.fitting.config import MonarchConfig
from gblr.fitting.fit import fit
from gblr.fitting.svd import squared_error
from gblr.matrices.monarch import MonarchMatrix
from tests.fitting.baselines import (
    assert_batch_equals_single,
    assert_inputs_are_used,
    errors,
    fit_all,
    randn,
    random_gram,
)
from tests.helpers import raises_value_error


@given(st.integers(1, 5), st.integers(1, 5), st.sampled_from([2, 4, 6, 12]), st.floats(0.05, 1))
def test_it_takes_the_dearest_number_of_blocks_within_the_budget(a, b, common, cost):
    shape = (a * common, b * common)
    dense, full = shape[0] * shape[1], min(shape) * sum(shape)
    costs = [full // nb for nb in range(1, min(shape) + 1) if shape[0] % nb == shape[1] % nb == 0]
    allowed = [c for c in costs if c <= cost * dense + 1e-6]  # 0.7 * 360 is a little below 252
    weight = torch.randn(1, *shape, generator=torch.Generator().manual_seed(0))
    if not allowed:
        with raises_value_error("Monarch", f"{shape[0]} x {shape[1]}"):
            fit_all(MonarchConfig(cost), weight)
        return
    (matrix,) = fit_all(MonarchConfig(cost), weight)
    assert matrix.num_mults == max(allowed)


@pytest.mark.parametrize(("left", "right"), [((2, 6, 4), (2, 4, 4)), ((3, 4, 4), (3, 4, 5)), ((4, 6, 6), (4, 6, 8))])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_monarch_matrix_is_recovered(left, right, weighted, generator):
    planted = MonarchMatrix(randn(*left, generator=generator), randn(*right, generator=generator))
    weight = planted.to_dense()[None]
    gram = random_gram(1, weight.shape[2], generator) if weighted else None
    (matrix,) = fit_all(MonarchConfig(planted.relative_cost), weight, gram)
    assert matrix.num_blocks == planted.num_blocks
    assert errors([matrix], weight).item() < 1e-6


def descend(weight, gram, num_blocks, steps=1000, lr=1e-3):
    """The projection of the paper's baselines: Adam on the two factors."""
    (out_features, in_features), inner = weight.shape, min(weight.shape)
    generator = torch.Generator().manual_seed(1)
    sizes = [(num_blocks, n // num_blocks, k // num_blocks) for n, k in ((out_features, inner), (inner, in_features))]
    left, right = ((randn(*size, generator=generator) / math.sqrt(size[2])).requires_grad_() for size in sizes)
    optimizer = torch.optim.Adam([left, right], lr=lr)
    for _ in range(steps):
        error = weight - MonarchMatrix(left, right).to_dense()
        optimizer.zero_grad()
        squared_error(error[None], gram).sum().backward()
        optimizer.step()
    return MonarchMatrix(left.detach(), right.detach())


@pytest.mark.parametrize("weighted", [False, True])
def test_it_is_at_least_as_good_as_1000_steps_of_gradient_descent(weighted, generator):
    weight = randn(1, 12, 18, generator=generator) / 4
    gram = random_gram(1, 18, generator) if weighted else None
    ours = fit_all(MonarchConfig(0.6), weight, gram)
    theirs = descend(weight[0], gram, ours[0].num_blocks)
    assert errors(ours, weight, gram).item() <= errors([theirs], weight, gram).item()


def test_inputs_lower_the_error_of_outputs(generator):
    assert_inputs_are_used(
        MonarchConfig(0.5), randn(3, 16, 24, generator=generator), random_gram(3, 24, generator), margin=0.85
    )


def test_sweeps_never_raise_the_weighted_error(generator):
    weight, gram = randn(2, 12, 12, generator=generator), random_gram(2, 12, generator)
    course = [errors(fit_all(MonarchConfig(0.5, steps=n), weight, gram), weight, gram) for n in (0, 1, 2, 4, 8)]
    assert all(bool((after <= before).all()) for before, after in itertools.pairwise(course))
    assert bool((course[1] < course[0]).all())


def test_a_tile_of_zeros_may_help_its_neighbours(generator):
    weight, gram = randn(1, 12, 12, generator=generator), random_gram(1, 12, generator)
    weight[:, :6, :6] = 0
    (matrix,) = fit_all(MonarchConfig(0.5), weight, gram)
    assert matrix.num_blocks == 4
    assert matrix.to_dense()[:3, :3].abs().max() > 1e-3
    assert fit_all(MonarchConfig(0.5), torch.zeros_like(weight), gram)[0].to_dense().abs().max() == 0


def test_a_batch_gives_each_matrix_its_own_number_of_blocks(generator):
    weight, gram = randn(3, 12, 12, generator=generator), random_gram(3, 12, generator)
    assert_batch_equals_single(MonarchConfig(0.5), weight, gram, [72, 144, 80])
    assert_batch_equals_single(MonarchConfig(0.5), weight, None, [72, 144, 80])


def test_shapes_without_a_common_divisor_are_refused():
    with raises_value_error("Monarch", "13 x 7", "1.5385", "above dense"):
        fit(torch.ones(13, 7), MonarchConfig(0.5))
    with raises_value_error("12 x 12", "0.1667", "0.0972", "`relative_cost`"):
        fit(torch.ones(12, 12), MonarchConfig(0.1))

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

from gblr.ops.prox import budget_threshold, soft_shrink
from tests.helpers import compiled, raises_value_error


@given(x=st.lists(st.floats(-10, 10), max_size=6), threshold=st.floats(0, 5))
def test_soft_shrink_is_x_minus_mu_above_mu_and_zero_elsewhere(x, threshold):
    expected = [value - threshold if value > threshold else 0.0 for value in x]
    assert soft_shrink(torch.tensor(x, dtype=torch.float64), threshold).tolist() == expected


def test_soft_shrink_solves_the_proximal_problem():
    """It minimises (y - x)^2 / 2 + mu y over y >= 0: no point of a fine grid is better."""
    grid = torch.linspace(0, 4, 4001, dtype=torch.float64)
    for x in (-1.0, 0.2, 0.5, 3.0):
        best = grid[((grid - x) ** 2 / 2 + 0.5 * grid).argmin()]
        assert torch.isclose(soft_shrink(torch.tensor(x, dtype=torch.float64), 0.5), best, atol=1e-9)


def test_a_threshold_tensor_gives_each_width_its_own():
    x, threshold = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([0.5, 3.0])
    assert soft_shrink(x, threshold).tolist() == [[0.5, 0.0], [2.5, 1.0]]
    assert soft_shrink(x, torch.tensor(1.0)).tolist() == [[0.0, 1.0], [2.0, 3.0]]


def test_a_threshold_of_zero_only_cuts_negative_values():
    assert soft_shrink(torch.tensor([-1.0, 0.0, 2.0]), 0.0).tolist() == [0.0, 0.0, 2.0]


@pytest.mark.parametrize("bad", [-0.5, math.nan])
def test_a_threshold_below_zero_is_refused(bad):
    with raises_value_error("`threshold`", "0", bad):
        soft_shrink(torch.ones(2), bad)
    with raises_value_error("`threshold`", "0"):
        soft_shrink(torch.ones(2), torch.tensor([1.0, bad]))


@pytest.mark.parametrize("shape", [(4,), (2, 3)])
def test_a_threshold_of_another_shape_is_refused(shape):
    with raises_value_error("`threshold`", (3,), shape):
        soft_shrink(torch.ones(3), torch.ones(shape))


def test_values_of_a_threshold_tensor_are_not_read_under_compile_or_vmap():
    x, threshold = torch.tensor([1.0, 2.0]), torch.tensor([-1.0, 0.5])
    assert compiled(soft_shrink)(x, threshold).tolist() == [2.0, 1.5]
    assert torch.func.vmap(soft_shrink)(x, threshold).tolist() == [2.0, 1.5]


def stepped_problem(seed: int):
    """Random widths and weights, some of them 0, and a cost that counts whole elements; in steps, as rounding makes
    them."""
    generator = torch.Generator().manual_seed(seed)
    width, weight = (torch.rand(2, 6, generator=generator) for _ in range(2))
    width[:, 0], weight[:, 1] = 0, 0
    length = torch.randint(3, 40, (2, 1), generator=generator)
    price = torch.randint(1, 5, (2, 6), generator=generator).double()
    return width, weight + (weight > 0) * 0.05, lambda w: ((w * length).round() * price).sum((-2, -1))


def shrunk(width: torch.Tensor, weight: torch.Tensor, threshold: torch.Tensor) -> torch.Tensor:
    return (width - threshold * weight).clamp(min=0)


@given(seed=st.integers(0, 10**6), share=st.floats(0, 0.99))
def test_the_budget_threshold_is_the_smallest_that_fits(seed, share):
    width, weight, cost = stepped_problem(seed)
    least = cost(width * (weight == 0))
    budget = (least + share * (cost(width) - least)).floor()
    threshold = budget_threshold(width, weight, cost, budget)
    assert cost(shrunk(width, weight, threshold)) <= budget
    precision = float((width / weight)[weight > 0].max()) * 2**-22
    smaller = torch.linspace(0, 1, 2000) * (threshold - precision)  # brute force
    if cost(width) > budget:
        assert threshold > 0
        assert (cost(shrunk(width, weight, smaller[:, None, None])) > budget).all()
    else:
        assert threshold == 0


@pytest.mark.parametrize("room", [0.0, 0.5, 100.0])
def test_widths_that_fit_already_are_left_alone(room):
    width, weight, cost = stepped_problem(1)
    assert budget_threshold(width, weight, cost, cost(width) + room) == 0


def test_widths_of_weight_zero_are_not_shrunk_and_all_others_end_at_zero_where_nothing_fits():
    width, weight, cost = stepped_problem(2)
    after = shrunk(width, weight, budget_threshold(width, weight, cost, torch.tensor(-1.0)))
    assert torch.equal(after[weight == 0], width[weight == 0]) and (width[weight == 0] > 0).any()
    assert not after[weight > 0].any()


def test_weights_of_zero_alone_give_a_finite_threshold():
    width, _, cost = stepped_problem(3)
    assert budget_threshold(width, torch.zeros_like(width), cost, torch.tensor(0.0)) == 0


def test_the_budget_threshold_needs_no_value_on_the_host():
    """A FakeTensor has none: whatever would wait for the device raises."""
    with FakeTensorMode():
        width = torch.rand(2, 3)
        threshold = budget_threshold(width, torch.ones(2, 3), lambda w: w.sum((-2, -1)), torch.tensor(0.5))
    assert threshold.shape == () and threshold.dtype == torch.float32

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gblr.ops.prox import soft_shrink
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

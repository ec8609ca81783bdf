"""Theorem 2: a matrix whose structure lies between two others keeps their budget; rectangular too (A.3)."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from gblr.matrices.gblr import GBLRMatrix
from gblr.matrices.structure import Structure, interpolate

AXES = {"row_width": 12, "row_location": 11, "col_width": 7, "col_location": 6}  # a 12 x 7 matrix: largest values


def structures(num_blocks: int) -> st.SearchStrategy[Structure]:
    column = {
        name: st.lists(st.integers(0, most), min_size=num_blocks, max_size=num_blocks) for name, most in AXES.items()
    }
    return st.fixed_dictionaries(column).map(lambda c: Structure(**{name: torch.tensor(v) for name, v in c.items()}))


@given(data=st.data(), num_blocks=st.integers(1, 6), alpha=st.floats(0, 1))
def test_interpolation_keeps_the_budget(data, num_blocks, alpha):
    a, b = data.draw(structures(num_blocks)), data.draw(structures(num_blocks))
    between = interpolate(a, b, alpha)
    assert between.num_blocks == num_blocks
    assert between.average_width <= alpha * a.average_width + (1 - alpha) * b.average_width + 1e-8
    assert between.average_width <= max(a.average_width, b.average_width)


@given(data=st.data(), num_blocks=st.integers(1, 6), alpha=st.floats(0, 1))
def test_interpolated_structures_are_valid_for_any_contents(data, num_blocks, alpha):
    between = interpolate(data.draw(structures(num_blocks)), data.draw(structures(num_blocks)), alpha)
    for name, most in AXES.items():
        value = getattr(between, name)
        assert not value.is_floating_point() and value.min() >= 0 and value.max() <= most
    matrix = GBLRMatrix(between, torch.ones(num_blocks, 1, 12), torch.ones(num_blocks, 1, 7))
    assert matrix.num_mults <= 2 * num_blocks * between.average_width


@given(data=st.data(), alpha=st.floats(0, 1))
def test_each_parameter_is_the_floor_of_its_mean_and_not_of_a_shorter_way_around(data, alpha):
    a, b = data.draw(structures(3)), data.draw(structures(3))
    between = interpolate(a, b, alpha)
    for name in AXES:
        mean = alpha * getattr(a, name).double() + (1 - alpha) * getattr(b, name).double()
        difference = mean - getattr(between, name)
        assert difference.min() >= -1e-8 and difference.max() < 1

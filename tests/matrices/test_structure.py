import dataclasses
import math

import pytest
import torch

from gblr.matrices.structure import Structure, interpolate
from tests.helpers import raises_value_error


def structure(*rows, dtype=torch.long) -> Structure:
    """Rows of (row_width, row_location, col_width, col_location)."""
    return Structure(*torch.tensor(rows, dtype=dtype).reshape(-1, 4).unbind(1))


def rows_of(s: Structure) -> list[list[float]]:
    return torch.stack(list(vars(s).values()), dim=1).tolist()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.long, torch.float32, torch.float64])
def test_any_real_dtype_holds_whole_numbers(dtype):
    s = structure((2, 0, 3, 5), (4, 3, 3, 1), dtype=dtype)
    assert s.num_blocks == 2
    assert s.average_width == 3.0


def test_the_average_width_is_exact_where_float32_sums_are_not():
    width = torch.full((5001,), 4095.0)
    assert Structure(width, width, width, width).average_width == 4095.0


def test_a_structure_without_blocks_has_average_width_zero():
    s = structure()
    assert (s.num_blocks, s.average_width) == (0, 0.0)


def test_a_block_lives_while_both_widths_are_above_zero():
    assert structure((2, 0, 3, 0), (0, 0, 3, 0), (2, 0, 0, 0), (0, 0, 0, 0)).live.tolist() == [
        True,
        False,
        False,
        False,
    ]


def test_the_transpose_swaps_rows_and_columns():
    assert rows_of(structure((1, 2, 3, 4)).T) == [[3, 4, 1, 2]]


def test_a_structure_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        structure((1, 2, 3, 4)).row_width = torch.tensor([5])


def test_shapes_that_differ_are_refused():
    one, two = torch.ones(1), torch.ones(2)
    with raises_value_error("(num_blocks,)", (1,), (2,), "'col_width'"):
        Structure(one, one, two, one)
    with raises_value_error("(num_blocks,)", (1, 2)):
        Structure(*[torch.ones(1, 2)] * 4)


@pytest.mark.parametrize("field", range(4))
@pytest.mark.parametrize("bad", [1.5, math.nan, math.inf])
def test_values_that_are_not_whole_are_refused(field, bad):
    values = [torch.tensor([2.0]) for _ in range(4)]
    values[field] = torch.tensor([bad])
    name = ["row_width", "row_location", "col_width", "col_location"][field]
    with raises_value_error(f"`{name}`", "whole"):
        Structure(*values)


@pytest.mark.parametrize("field", ["row_width", "col_width"])
def test_negative_widths_are_refused(field):
    values = dict.fromkeys(("row_width", "row_location", "col_width", "col_location"), torch.tensor([2]))
    with raises_value_error(f"`{field}`", 0, -3):
        Structure(**{**values, field: torch.tensor([-3])})


def test_negative_locations_are_cyclic_and_welcome():
    assert rows_of(structure((2, -1, 2, -1))) == [[2, -1, 2, -1]]


def test_interpolation_floors_every_parameter():
    a, b = structure((8, 7, 8, 0), (1, 0, 0, 0)), structure((3, 0, 2, 5), (0, 0, 1, 0))
    assert rows_of(interpolate(a, b, 0.5)) == [[5, 3, 5, 2], [0, 0, 0, 0]]


def test_interpolation_ends_at_its_two_structures():
    a, b = structure((8, 7, 8, 0)), structure((3, 0, 2, 5))
    assert rows_of(interpolate(a, b, 1.0)) == rows_of(a)
    assert rows_of(interpolate(a, b, 0.0)) == rows_of(b)


@pytest.mark.parametrize("hundredths", range(101))
def test_rounding_does_not_push_an_exact_whole_number_below_itself(hundredths):
    """0.29 * 100 is 28.999... in floating point."""
    wide, nothing = structure((100, 0, 100, 0)), structure((0, 0, 0, 0))
    assert rows_of(interpolate(wide, nothing, hundredths / 100)) == [[hundredths, 0, hundredths, 0]]


@pytest.mark.parametrize("alpha", [-0.1, 1.1, math.nan])
def test_an_alpha_outside_zero_and_one_is_refused(alpha):
    with raises_value_error("`alpha`", "[0, 1]", alpha):
        interpolate(structure((1, 0, 1, 0)), structure((1, 0, 1, 0)), alpha)


def test_structures_of_unequal_size_are_refused():
    with raises_value_error("`a`", "`b`", 1, 2):
        interpolate(structure((1, 0, 1, 0)), structure((1, 0, 1, 0), (1, 0, 1, 0)), 0.5)

import dataclasses
import math

import numpy
import pytest

from gblr.fitting.config import BlastConfig, GaudiConfig, LowRankConfig, MonarchConfig, PixelflyConfig
from tests.helpers import raises_value_error
from tests.shape_hook import shapes_unchecked

EVERY = [GaudiConfig, LowRankConfig, MonarchConfig, PixelflyConfig, BlastConfig]


@pytest.mark.parametrize("config", EVERY)
@pytest.mark.parametrize("cost", [0.0, -0.1, 1.01, 30, math.nan])
def test_costs_outside_0_to_1_are_refused(config, cost):
    with raises_value_error("`relative_cost`", cost):
        config(cost)


@pytest.mark.parametrize("config", EVERY)
def test_configs_are_frozen_and_compare_by_value(config):
    with pytest.raises(dataclasses.FrozenInstanceError):
        config(0.5).relative_cost = 0.3
    assert config(0.5) == config(relative_cost=0.5) != config(0.4)


@pytest.mark.parametrize("config", EVERY)
def test_an_unknown_allocation_is_refused_with_those_there_are(config):
    with raises_value_error("`allocation`", "'uniform'", "'global'", "'greedy'"):
        config(0.5, allocation="greedy")


def test_gaudi_choices_are_listed_when_one_is_wrong():
    with raises_value_error("`init`", "'correlation'", "'low_rank'", "'full'", "'scratch'", "'svd'"):
        GaudiConfig(0.5, init="svd")
    with raises_value_error("`refine`", "'descent'", "'gradient'", "'none'", "'adam'"):
        GaudiConfig(0.5, refine="adam")


@pytest.mark.parametrize("name", ["block_rank", "align"])
def test_gaudi_sizes_below_1_are_refused(name):
    with raises_value_error(f"`{name}`", 0):
        GaudiConfig(0.5, **{name: 0})


@pytest.mark.parametrize("config", EVERY)
@pytest.mark.parametrize("cost", ["0.3", None, [0.3]])
def test_costs_that_are_no_numbers_are_told(config, cost):
    with shapes_unchecked(), pytest.raises(TypeError, match="`relative_cost` must be a number"):
        config(cost)


@pytest.mark.parametrize("name", ["block_rank", "align"])
def test_ranks_are_whole_numbers(name):
    with shapes_unchecked():
        with pytest.raises(TypeError, match=f"`{name}` must be a whole number; got 1.5"):
            GaudiConfig(0.5, **{name: 1.5})
        assert getattr(GaudiConfig(0.5, **{name: numpy.int64(4)}), name) == 4


@pytest.mark.parametrize("config", [GaudiConfig, MonarchConfig, PixelflyConfig, BlastConfig])
def test_steps_are_whole_numbers_and_not_negative(config):
    with raises_value_error("`steps`", -3):
        config(0.5, steps=-3)
    with shapes_unchecked(), pytest.raises(TypeError, match=r"`steps` must be a whole number; got 2\.5"):
        config(0.5, steps=2.5)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_blocks", 0),
        ("num_blocks", -1),
        ("threshold_ratio", 2.0),
        ("threshold_ratio", -0.1),
        ("smoothing_std", -1.0),
    ],
)
def test_gaudi_options_out_of_range_are_refused(name, value):
    with raises_value_error(f"`{name}`", value):
        GaudiConfig(0.5, **{name: value})


def test_none_leaves_steps_and_blocks_to_the_fit():
    assert GaudiConfig(0.5, steps=None, num_blocks=None) == GaudiConfig(0.5)

import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gblr.layers.gaudi import GaudiLinear
from gblr.training.latency import fit_layer_times, interleaved_medians, nonnegative_fit, seconds_outside
from tests.helpers import raises_value_error
from tests.training.models import ROWS

CPU = torch.device("cpu")


@given(coefficients=st.lists(st.floats(0, 1e-3), min_size=1, max_size=4), seed=st.integers(0, 10**6))
def test_coefficients_are_recovered(coefficients, seed):
    features = torch.rand(9, len(coefficients), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    features *= torch.tensor([1.0, 1e3, 1e5, 10.0])[: len(coefficients)]
    found = torch.tensor(nonnegative_fit(features, features @ torch.tensor(coefficients).double())).double()
    assert torch.allclose(features @ found, features @ torch.tensor(coefficients).double(), rtol=1e-6, atol=1e-9)
    assert (found >= 0).all()


def test_columns_that_would_need_a_negative_coefficient_get_zero():
    features = torch.tensor([[1.0, 0.0], [1.0, 1.0], [1.0, 2.0]]).double()
    base, slope = nonnegative_fit(features, torch.tensor([3.0, 2.0, 1.0]).double())
    assert slope == 0 and base == pytest.approx(2.0)
    assert nonnegative_fit(features, torch.tensor([-3.0, -2.0, -1.0]).double()) == [0.0, 0.0]


def test_layers_of_one_shape_are_timed_once_and_more_columns_take_longer():
    layers = [GaudiLinear(256, 256), GaudiLinear(256, 256), GaudiLinear(8, 8)]
    first, second, small = fit_layer_times(layers, [64, 64, 64], CPU)
    assert first == second != small
    for found in (first, small):
        assert min(found.base, found.per_row, found.per_col) >= 0
    whole = first.base + 256 * 256 * (first.per_row + first.per_col)
    assert 0 < small.base < whole < 1


def test_medians_are_those_of_each_call():
    fast, slow = interleaved_medians([lambda: None, lambda: time.sleep(0.003)], CPU)
    assert fast < 0.003 <= slow < 0.1


class SlowLayer(GaudiLinear):
    def forward(self, x):
        time.sleep(0.02)
        return super().forward(x)


class SlowModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = SlowLayer(12, 12)

    def forward(self, x):
        time.sleep(0.004)
        return self.layer(x)


def test_time_outside_the_layers_leaves_theirs_out():
    model = SlowModel().train()
    assert 0.004 <= seconds_outside(model, [model.layer], (ROWS,), {}, CPU) < 0.02
    assert model.training and not model.layer._forward_hooks and not model.layer._forward_pre_hooks


def test_a_model_elsewhere_cannot_be_timed():
    model = nn.Sequential(GaudiLinear(12, 12))
    with raises_value_error("meta", "move"):
        seconds_outside(model, [model[0]], (ROWS,), {}, torch.device("meta"))

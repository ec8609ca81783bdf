import copy

import pytest
import torch
from torch import nn

import gblr
from gblr.experiments.composed import compose_
from tests.helpers import assert_close

CONFIGS = [gblr.MonarchConfig(0.4), gblr.PixelflyConfig(0.5), gblr.BlastConfig(0.5, steps=2)]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: type(config).__name__)
def test_outputs_and_gradients_are_those_of_the_layer_itself(config, generator):
    layer = nn.Sequential(nn.Linear(48, 96))
    gblr.convert_(layer, config)
    composed = copy.deepcopy(layer)
    compose_(composed)
    x = torch.randn(5, 7, 48, generator=generator)
    weights = torch.randn(5, 7, 96, generator=generator)
    assert_close(composed(x), layer(x))
    for model in (layer, composed):
        (model(x) * weights).sum().backward()
    for (name, grad), (_, own) in zip(composed.named_parameters(), layer.named_parameters(), strict=True):
        torch.testing.assert_close(grad.grad, own.grad, rtol=1e-4, atol=1e-4, msg=name)
    assert set(composed.state_dict()) == set(layer.state_dict())


def test_a_copy_multiplies_by_its_own_weight():
    model = nn.Sequential(nn.Linear(48, 96))
    gblr.convert_(model, CONFIGS[0])
    compose_(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[0].left.zero_()
    x = torch.ones(1, 48)
    assert_close(other(x), other[0].bias[None])
    assert not torch.equal(model(x), other(x))

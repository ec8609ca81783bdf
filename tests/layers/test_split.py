import pytest
import torch
from torch import nn

from gblr.layers.split import SplitLinear
from gblr.layers.structured import StructuredLinear
from gblr.matrices.low_rank import LowRankMatrix
from tests.helpers import assert_close, compiled
from tests.layers.gaudi_layers import random_gaudi


def make(bias: bool = True) -> SplitLinear:
    torch.manual_seed(0)
    low_rank = LowRankMatrix(torch.randn(2, 5), torch.randn(2, 12))
    parts = [random_gaudi(bias=bias), StructuredLinear(low_rank, torch.randn(5) if bias else None)]
    return SplitLinear([*parts, nn.Linear(12, 3, bias=bias)])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(12,), (4, 12), (2, 3, 12)])
def test_outputs_of_the_parts_stand_side_by_side(bias, shape, generator):
    layer, x = make(bias), torch.randn(shape, generator=generator)
    y = layer(x)
    assert y.shape == (*shape[:-1], 16 + 5 + 3)
    for part, expected in zip(layer.parts, y.split((16, 5, 3), dim=-1), strict=True):
        assert torch.equal(part(x), expected)


@pytest.mark.parametrize("bias", [True, False])
def test_weight_and_bias_are_those_of_the_fused_layer(bias, generator):
    layer, x = make(bias), torch.randn(4, 12, generator=generator)
    assert layer.weight.shape == (layer.out_features, layer.in_features) == (24, 12)
    assert (layer.bias is not None) == bias
    assert_close(layer(x), nn.functional.linear(x, layer.weight, layer.bias))
    dense = layer.to_dense_layer()
    assert type(dense) is nn.Linear and (dense.bias is not None) == bias
    assert_close(dense(x), layer(x))


@pytest.mark.parametrize("bias", [True, False])
def test_outputs_of_the_parts_take_turns_in_several_runs(bias, generator):
    parts = [nn.Linear(12, size, bias=bias) for size in (8, 4, 4)]
    layer, x = SplitLinear(parts, runs=2), torch.randn(3, 4, 12, generator=generator)
    turns = layer(x).unflatten(-1, (2, 8))
    for part, found in zip(parts, turns.split((4, 2, 2), dim=-1), strict=True):
        assert torch.equal(part(x), found.flatten(-2))
    for part, rows in zip(parts, layer.rows, strict=True):
        assert torch.equal(part.weight, layer.weight[rows])
    assert_close(layer.to_dense_layer()(x), layer(x))


def test_gradients_reach_every_part(generator):
    layer = make()
    layer.parts[0].set_sigma(2.0)
    layer(torch.randn(4, 12, generator=generator)).square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert bool(parameter.grad.any()), name


def test_it_compiles_to_one_graph(generator):
    layer, x = make(), torch.randn(4, 12, generator=generator)
    assert_close(compiled(layer)(x), layer(x))

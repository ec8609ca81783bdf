import math

import pytest
import torch
from torch import nn

from gblr.conversion.cost import cost
from gblr.conversion.harden import harden_
from gblr.layers.gaudi import GaudiLinear, GaudiModule
from gblr.layers.structured import StructuredLinear
from gblr.matrices.low_rank import LowRankMatrix
from gblr.training.budget import Budget
from gblr.training.latency import LayerTime
from gblr.training.prices import Prices, Rest, count_rest, unit_prices
from gblr.training.widths import Widths
from tests.helpers import raises_value_error
from tests.training.models import IMAGES, ROWS, mixed_model, mlp


def settled(model: nn.Module, budget: Budget, x: torch.Tensor | None) -> tuple[Prices, Widths]:
    named = {name: module for name, module in model.named_modules() if isinstance(module, GaudiModule)}
    rest = count_rest(model, named, budget, x)
    widths = Widths(list(named.values()), math.inf)
    return unit_prices(budget, widths, rest.positions or [1.0] * len(named), rest), widths


def shrink(model: nn.Module, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in (p for name, p in model.named_parameters() if name.endswith("width_frac")):
            p.uniform_(-0.1, 0.8, generator=generator)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("block_rank", [1, 3])
def test_multiplications_are_those_of_the_hardened_model(seed, block_rank):
    model = mixed_model(seed, block_rank)
    shrink(model, seed)
    prices, widths = settled(model, Budget(relative_cost=0.3), IMAGES)
    whole, _ = settled(model, Budget(relative_cost=0.3, scope="model"), IMAGES)
    layers, model_cost = widths.cost(widths.read(), prices.budget), widths.cost(widths.read(), whole.budget)
    harden_(model)
    found = cost(model, IMAGES)
    assert layers == found.converted_mults and model_cost == found.num_mults
    assert prices.target == pytest.approx(0.3 * found.converted_dense_mults)
    assert whole.target == pytest.approx(0.3 * found.dense_mults)


@pytest.mark.parametrize("scope", ["layers", "model"])
def test_parameters_are_those_of_the_hardened_model(scope):
    model = mixed_model(block_rank=2)
    shrink(model)
    prices, widths = settled(model, Budget(num_params=500, scope=scope), None)
    counted = widths.cost(widths.read(), prices.budget)
    harden_(model)
    assert counted == (cost(model).num_params if scope == "model" else cost(model).converted_params)
    if scope == "model":
        assert counted == sum(p.numel() for p in model.parameters())


def test_whole_models_are_compared_with_the_dense_originals_of_layers_of_fixed_structure_too():
    model = mlp()
    model.append(StructuredLinear(LowRankMatrix(torch.randn(1, 6), torch.randn(1, 8))))
    prices, widths = settled(model, Budget(relative_cost=0.5, scope="model"), ROWS)
    found = cost(model, ROWS)
    assert prices.target == pytest.approx(0.5 * found.dense_mults)
    assert widths.cost(widths.read(), prices.budget) == found.num_mults


def test_attention_counts_as_rest_of_the_model():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.value = GaudiLinear(12, 12)

        def forward(self, x):
            return nn.functional.scaled_dot_product_attention(x, x, self.value(x))

    model, x = Attention(), torch.randn(2, 5, 12)
    prices, widths = settled(model, Budget(relative_cost=0.9, scope="model"), x)
    assert prices.budget.base == cost(model, x).attention_mults == 2 * 5 * 5 * 12
    assert widths.cost(widths.read(), prices.budget) == cost(model, x).num_mults


def test_weights_of_the_proximal_step_follow_the_price_of_a_whole_axis_and_are_one_on_average():
    model = mixed_model()
    prices, widths = settled(model, Budget(relative_cost=0.3), IMAGES)
    assert float(prices.weight.mean()) == pytest.approx(1.0)
    price = prices.budget.per_element * widths.length
    assert torch.allclose(prices.weight / prices.weight[0, 0], (price / price[0, 0]).float())


def test_seconds_are_the_layers_and_what_is_outside():
    model = mlp()
    widths = Widths([model[0], model[2]], math.inf)
    times = LayerTime(1.0, 0.1, 0.2), LayerTime(2.0, 0.3, 0.0)
    rest = Rest((1.0, 1.0), seconds=10.0, layer_times=times)
    layers = 1 + 2 + 0.1 * 12 * 16 + 0.2 * 12 * 12 + 0.3 * 8 * 8  # 12 blocks in 16 x 12, 8 in 8 x 16
    for scope, outside in (("layers", 0.0), ("model", 10.0)):
        prices = unit_prices(Budget(seconds=20.0, scope=scope), widths, [1.0, 1.0], rest)
        assert float(widths.cost(torch.ones_like(widths.read()), prices.budget)) == pytest.approx(layers + outside)


def test_seconds_that_no_width_changes_leave_the_widths_alone():
    """Small layers take the same time at any width: nothing must become 0 / 0."""
    widths = Widths([mlp()[0]], math.inf)
    rest = Rest((1.0,), layer_times=(LayerTime(1.0, 0.0, 0.0),))
    assert not unit_prices(Budget(seconds=2.0), widths, [1.0], rest).weight.any()


@pytest.mark.parametrize(
    ("budget", "words"),
    [
        (Budget(relative_cost=0.01, scope="model"), ["multiplications", "cannot"]),
        (Budget(num_params=10), ["10", "parameters", "cannot"]),
        (Budget(num_params=60, scope="model"), ["60", "parameters", "cannot"]),
        (Budget(seconds=1e-12), ["seconds", "cannot"]),
    ],
)
def test_a_budget_that_not_even_an_empty_model_meets_is_refused(budget, words):
    model = nn.Sequential(mlp(), nn.Linear(8, 8))
    with raises_value_error(*words):
        settled(model, budget, ROWS)


def test_frozen_layers_are_part_of_what_cannot_shrink():
    model = mlp()
    model[0].width_frac.requires_grad_(False)
    frozen = 12 * 16 / (12 * 16 + 16 * 8)
    settled(model, Budget(relative_cost=frozen + 0.01), ROWS)
    with raises_value_error("cannot", "trainable"):
        settled(model, Budget(relative_cost=frozen - 0.01), ROWS)


@pytest.mark.parametrize("budget", [Budget(relative_cost=0.3, scope="model"), Budget(seconds=1.0)])
def test_what_is_counted_on_inputs_asks_for_them(budget):
    with raises_value_error("`example_inputs`"):
        settled(mlp(), budget, None)


def test_inputs_that_miss_a_layer_are_refused():
    class Skipping(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = GaudiLinear(12, 12), GaudiLinear(12, 12)

        def forward(self, x):
            return self.used(x)

    with raises_value_error("`example_inputs`", "'unused'"):
        settled(Skipping(), Budget(relative_cost=0.3), ROWS)


@pytest.mark.parametrize("inputs", [ROWS, (ROWS,), [ROWS], {"input": ROWS}])
def test_inputs_may_be_a_tensor_a_tuple_or_keywords(inputs):
    model = mlp()
    model.train()
    state = torch.random.get_rng_state()
    named = {"0": model[0], "2": model[2]}
    assert count_rest(model, named, Budget(relative_cost=0.3), inputs).positions == (1.0, 1.0)
    assert model.training and model[0].training and torch.equal(torch.random.get_rng_state(), state)

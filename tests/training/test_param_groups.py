import math

import pytest
import torch
from torch import nn

import gblr
from gblr.layers.gaudi import GaudiLinear
from gblr.training.param_groups import param_groups
from tests.helpers import raises_value_error
from tests.training.models import ROWS, gaudi_layers, mixed_model, one_step


def names_of(model: nn.Module, **options) -> dict[str, set[str]]:
    names = {id(p): name for name, p in model.named_parameters()}
    groups = param_groups(model, lr=0.1, **options)
    return {group["name"]: {names[id(p)] for p in group["params"]} for group in groups}


def test_widths_and_locations_are_structure_and_nothing_else_is():
    model = mixed_model()
    found = names_of(model)["structure"]
    assert found == {name for name, _ in model.named_parameters() if name.endswith(("width_frac", "location_frac"))}
    assert len(found) == 2 * len(gaudi_layers(model))


def test_biases_and_norms_do_not_decay_and_weights_do():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Flatten(), GaudiLinear(4, 6), nn.LayerNorm((6, 1)))
    groups = names_of(model, weight_decay=0.1)
    assert groups["content"] == {"0.weight", "3.u", "3.v"}
    assert groups["no_decay"] == {"0.bias", "1.weight", "1.bias", "3.bias", "4.weight", "4.bias"}


def test_contents_of_hardened_layers_decay_too():
    model = nn.Sequential(GaudiLinear(8, 6), nn.LayerNorm(6))
    gblr.harden_(model)
    assert model[0].u.dim() == 1
    groups = names_of(model)
    assert groups == {"content": {"0.u", "0.v"}, "no_decay": {"0.bias", "1.weight", "1.bias"}}


class PreNorm(nn.Module):
    """Its name ends as that of a norm, and it holds more than one."""

    def __init__(self):
        super().__init__()
        self.scale, self.norm, self.fc = nn.Parameter(torch.ones(2, 3)), nn.LayerNorm(4), nn.Linear(4, 6)


def test_weights_inside_of_what_is_called_a_norm_decay():
    groups = names_of(PreNorm())
    assert groups == {"content": {"fc.weight"}, "no_decay": {"scale", "norm.weight", "norm.bias", "fc.bias"}}


def test_each_group_has_its_own_rate_and_decay_and_structure_has_no_momentum():
    content, plain, structure = param_groups(mixed_model(), lr=0.1, structure_lr=0.02, weight_decay=0.3)
    assert (content["lr"], content["weight_decay"]) == (0.1, 0.3)
    assert (plain["lr"], plain["weight_decay"]) == (0.1, 0.0)
    assert (structure["lr"], structure["weight_decay"], structure["betas"]) == (0.02, 0.0, (0.0, 0.999))


def test_every_trainable_parameter_is_in_one_group_and_shared_ones_once():
    model = mixed_model()
    model.append(nn.Sequential(nn.Flatten(), model[-1]))
    model[3].requires_grad_(False)
    found = [id(p) for group in param_groups(model, lr=0.1) for p in group["params"]]
    assert sorted(found) == sorted(id(p) for p in model.parameters() if p.requires_grad)


def test_empty_groups_are_left_out():
    model = nn.Sequential(GaudiLinear(4, 6, bias=False))
    assert list(names_of(model)) == ["content", "structure"]
    for p in (model[0].u, model[0].v):
        p.requires_grad_(False)
    assert list(names_of(model)) == ["structure"]


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.Adam, torch.optim.NAdam, torch.optim.SGD])
def test_groups_suit_any_optimizer(optimizer):
    model = nn.Sequential(GaudiLinear(12, 6))
    before = model[0].width_frac.clone()
    one_step(model, optimizer(param_groups(model, lr=0.1)), ROWS)
    assert not torch.equal(model[0].width_frac, before)


@pytest.mark.parametrize("name", ["lr", "structure_lr", "weight_decay"])
@pytest.mark.parametrize("bad", [-1.0, math.nan])
def test_negative_rates_are_refused(name, bad):
    with raises_value_error(f"`{name}`", "0", bad):
        param_groups(mixed_model(), **({"lr": 0.1} | {name: bad}))


def test_a_frozen_model_is_refused():
    with raises_value_error("trainable"):
        param_groups(nn.Linear(2, 3).requires_grad_(False), lr=0.1)

"""Hooks on a layer go on working, whatever takes its place."""

import copy

import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from torch import nn

import gblr
from gblr.layers.gaudi import GaudiLinear
from tests.conversion.low_rank_models import random_mlp

CONFIG = gblr.GaudiConfig(0.5, steps=2)


def test_hooks_move_to_the_new_layer_and_their_handles_still_remove_them(generator):
    model, x, seen = random_mlp(), torch.randn(5, 16, generator=generator), []
    teacher = copy.deepcopy(model)
    handles = [
        model[0].register_forward_hook(lambda module, args, y: seen.append(type(module))),
        model[0].register_forward_pre_hook(lambda module, args, kwargs: seen.append("before"), with_kwargs=True),
        model[0].register_full_backward_hook(lambda module, *grads: seen.append("backward")),
    ]
    for change in (
        lambda: gblr.convert_(model, CONFIG, calibration=[x]),
        lambda: gblr.heal_(model, teacher, [x]),
        lambda: gblr.harden_(model),
        lambda: gblr.densify_(model),
    ):
        change()
        seen.clear()
        model(x).sum().backward()
        assert seen == ["before", type(model[0]), "backward"]
    for handle in handles:
        handle.remove()
    seen.clear()
    model(x).sum().backward()
    assert seen == []


def test_a_refit_is_to_what_the_layer_computes_and_not_its_hooks(generator):
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(16, 16))
    teacher[0].register_forward_hook(lambda module, args, y: 3 * y)
    model, x = copy.deepcopy(teacher), torch.randn(64, 16, generator=generator)
    gblr.convert_(model, gblr.LowRankConfig(1.0))
    gblr.heal_(model, teacher, [x])
    error = (model(x) - teacher(x)).norm() / teacher(x).norm()
    assert float(error.detach()) < 0.4


class Doubles(ModelHook):
    def post_forward(self, module, output):
        return 2 * output


def test_hooks_of_accelerate_move_too(generator):
    model, x = nn.Sequential(nn.Linear(16, 16)), torch.randn(5, 16, generator=generator)
    add_hook_to_module(model[0], Doubles())
    gblr.convert_(model, CONFIG)
    assert isinstance(model[0], GaudiLinear)
    weight, bias = model[0].weight, model[0].bias
    torch.testing.assert_close(model(x), 2 * nn.functional.linear(x, weight, bias), rtol=1e-4, atol=1e-5)

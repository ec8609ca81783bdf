import math

import pytest
import torch
from torch import nn

from gblr.conversion.checkpoint import from_pretrained, load_, save_pretrained
from gblr.conversion.convert import convert_
from gblr.conversion.filters import conv_layers
from gblr.conversion.harden import densify_, harden_
from gblr.fitting.config import GaudiConfig, LowRankConfig
from gblr.layers.conv import GaudiConv2d, StructuredConv2d
from gblr.layers.gaudi import GaudiModule
from gblr.layers.split import SplitLinear
from gblr.layers.structured import StructuredLinear
from gblr.matrices.packed import PackedGBLR
from tests.conversion.converted import bert, gpt2, output
from tests.conversion.low_rank_models import assert_same, random_mlp
from tests.helpers import raises_value_error
from tests.layers.gaudi_layers import random_gaudi, three_blocks

GAUDI = GaudiConfig(0.5, steps=2)


def converted_mlp() -> nn.Module:
    model = random_mlp()
    convert_(model, GAUDI)
    return model.eval()


def test_hardening_keeps_outputs_and_cost(generator):
    model, x = converted_mlp(), torch.randn(5, 16, generator=generator)
    expected, costs = model(x), [model[i].num_mults for i in (0, 2, 4)]
    report = harden_(model)
    assert list(report) == ["0", "2", "4"] and [row.num_mults for row in report.rows] == costs
    assert all(isinstance(model[i].matrix, PackedGBLR) for i in (0, 2, 4))
    assert_same(model(x), expected, 1e-5)
    assert "packed" in str(report) and "blocks of rank 1" in str(report)


def test_soft_masks_are_hardened_up_to_the_threshold(generator):
    model = nn.Sequential(random_gaudi(24, 32, sigma=6.0))
    x = torch.randn(5, 24, generator=generator)
    expected = model(x)
    harden_(model)
    assert_same(model(x), expected, 5e-3)


def test_a_report_tells_of_blurred_masks_that_cost_more_than_their_widths():
    blurred, sharp = (nn.Sequential(random_gaudi(24, 32, sigma=sigma)) for sigma in (1.0, math.inf))
    (note,) = [note for note in harden_(blurred).notes if "blurred" in note]
    assert "sigma 1" in note and "set_sigma(math.inf)" in note
    assert not any("blurred" in note for note in harden_(sharp).notes)


def test_fixed_gblr_layers_are_packed_too(generator):
    model = nn.Sequential(StructuredLinear(three_blocks(), torch.ones(16)))
    x = torch.randn(5, 12, generator=generator)
    expected = model(x)
    harden_(model)
    assert isinstance(model[0].matrix, PackedGBLR)
    assert_same(model(x), expected, 1e-5)


def test_convolutions_and_split_layers_are_hardened(generator):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, stride=2, padding_mode="reflect"))
    convert_(model, GAUDI, where=conv_layers())
    assert isinstance(model[0], GaudiConv2d)
    x = torch.randn(2, 3, 9, 9, generator=generator)
    expected = model(x)
    harden_(model)
    assert isinstance(model[0], StructuredConv2d)
    assert_same(model(x), expected, 1e-5)

    model = gpt2()
    convert_(model, GAUDI)
    expected = output(model)
    report = harden_(model)
    assert isinstance(model.transformer.h[0].attn.c_attn, SplitLinear)
    assert "transformer.h.0.attn.c_attn.parts.2" in report
    assert not any(isinstance(module, GaudiModule) for module in model.modules())
    assert_same(output(model), expected, 1e-4)


def test_mode_and_frozen_weights_carry_over():
    model = converted_mlp().train()
    model[0].requires_grad_(False)
    model[2].eval()
    harden_(model)
    assert not any(p.requires_grad for p in model[0].parameters()) and model[2].u.requires_grad
    assert [model[i].training for i in (0, 2, 4)] == [True, False, True]
    densify_(model)
    assert not model[0].weight.requires_grad and model[2].weight.requires_grad
    assert [model[i].training for i in (0, 2, 4)] == [True, False, True]


def test_what_is_frozen_of_a_layer_stays_frozen():
    model = converted_mlp()
    model[0].requires_grad_(False).bias.requires_grad_()
    model[2].bias.requires_grad_(False)
    for parameter in model[4].content_parameters():
        parameter.requires_grad_(False)  # its structure is not
    harden_(model)
    found = [[p.requires_grad for p in (model[i].u, model[i].v, model[i].bias)] for i in (0, 2, 4)]
    assert found == [[False, False, True], [True, True, False], [False, False, True]]
    densify_(model)
    found = [[p.requires_grad for p in (model[i].weight, model[i].bias)] for i in (0, 2, 4)]
    assert found == [[False, True], [True, False], [False, True]]


@pytest.mark.parametrize("act", [harden_, densify_])
def test_shared_layers_stay_shared(act, generator):
    layer, split = random_gaudi(16, 16, sigma=math.inf), SplitLinear([random_gaudi(16, 16, sigma=math.inf)])
    block = nn.Sequential(layer)
    model = nn.Sequential(block, nn.ReLU(), layer, block, split, split)
    x = torch.randn(5, 16, generator=generator)
    expected = model(x)
    report = act(model)
    assert len(report) == 2 and not any(isinstance(module, GaudiModule) for module in model.modules())
    assert model[0] is model[3] and model[0][0] is model[2] and model[4] is model[5]
    assert_same(model(x), expected, 1e-5)


def test_a_bare_layer_is_refused_with_a_way_out():
    with raises_value_error("itself the layer", "nn.Sequential"):
        harden_(random_gaudi(16, 16))
    with raises_value_error("itself the layer", "nn.Sequential", "to_dense_layer()"):
        densify_(random_gaudi(16, 16))
    layer = StructuredLinear(PackedGBLR.from_gblr(three_blocks()))
    harden_(layer, plan="factors")  # nothing to replace
    assert layer.form == "factors"


def test_other_formats_are_left_alone():
    model = random_mlp()
    convert_(model, LowRankConfig(0.5), where=lambda m, n: n == "0")
    convert_(model, GAUDI, where=lambda m, n: n == "2")
    first = model[0]
    assert list(harden_(model)) == ["2"] and model[0] is first


def test_a_model_without_anything_to_harden_or_densify_is_refused():
    with raises_value_error("`convert_`"):
        harden_(random_mlp())
    with raises_value_error("structured"):
        densify_(random_mlp())
    with raises_value_error("`plan`", "'fast'"):
        harden_(converted_mlp(), plan="fast")


@pytest.mark.parametrize("plan", ["auto", "packed"])
def test_plans_give_the_same_outputs(plan, generator):
    model, x = converted_mlp(), torch.randn(5, 16, generator=generator)
    expected = model(x)
    harden_(model, example_inputs=x, plan=plan)
    assert_same(model(x), expected, 1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_models_harden_in_their_dtype(dtype, generator):
    model = random_mlp().to(dtype)
    convert_(model, GAUDI)
    x = torch.randn(5, 16, generator=generator).to(dtype)
    expected = model(x)
    harden_(model)
    assert model(x).dtype == dtype
    assert_same(model(x).float(), expected.float(), 0.02)


@pytest.mark.parametrize("config", [GAUDI, LowRankConfig(0.5)], ids=["gaudi", "low_rank"])
def test_densified_models_are_plain_and_compute_the_same(config):
    model = gpt2()
    convert_(model, config)
    expected = output(model)
    report = densify_(model)
    assert "transformer.h.0.attn.c_attn" in report and not any(".parts." in name for name in report)
    kinds = {type(module) for name, module in model.named_modules() if name in report}
    assert kinds == {nn.Linear}
    assert_same(output(model), expected, 1e-4)
    assert report.relative_cost == 1.0


def test_densified_convolutions_are_plain_and_compute_the_same(generator):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding="same", padding_mode="circular", bias=False))
    convert_(model, GAUDI, where=conv_layers())
    x = torch.randn(2, 3, 9, 9, generator=generator)
    expected = model(x)
    densify_(model)
    assert type(model[0]) is nn.Conv2d and model[0].bias is None
    assert_same(model(x), expected, 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("harden", [True, False])
def test_convert_harden_save_load_gives_the_same_outputs_bit_by_bit(dtype, harden, tmp_path):
    model = bert().to(dtype)
    convert_(model, GAUDI)
    if harden:
        harden_(model)
    save_pretrained(model, tmp_path)
    expected = output(model)
    assert torch.equal(output(from_pretrained(tmp_path).eval()), expected)
    assert torch.equal(output(load_(bert().to(dtype), tmp_path).eval()), expected)


def test_soft_layers_come_back_with_their_sigma(tmp_path, generator):
    model, x = converted_mlp(), torch.randn(5, 16, generator=generator)
    model[0].set_sigma(3.0)
    save_pretrained(model, tmp_path)
    loaded = load_(random_mlp(), tmp_path)
    assert float(loaded[0].sigma) == 3.0 and float(loaded[2].sigma) == math.inf
    assert torch.equal(loaded(x), model(x))


def test_a_hardened_model_is_as_small_on_disk_as_its_cost(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 128, bias=False))
    convert_(model, GaudiConfig(0.25, init="low_rank", steps=1))
    harden_(model)
    save_pretrained(model, tmp_path)
    numbers = (tmp_path / "model.safetensors").stat().st_size / 4
    assert numbers < 0.25 * 128 * 128 + 128 * 8 + 500  # contents, four indices for each block, a header

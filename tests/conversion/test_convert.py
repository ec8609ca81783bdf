import copy
from collections import OrderedDict

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from gblr.conversion import convert as convert_module
from gblr.conversion.checkpoint import load_, save_pretrained
from gblr.conversion.convert import convert_
from gblr.conversion.filters import conv_layers, linear_layers
from gblr.conversion.harden import harden_
from gblr.fitting.config import BlastConfig, GaudiConfig, LowRankConfig, MonarchConfig, PixelflyConfig
from gblr.layers.conv import GaudiConv2d, StructuredConv2d
from gblr.layers.gaudi import GaudiLinear
from gblr.layers.split import SplitLinear
from gblr.layers.structured import StructuredLinear
from gblr.training.heal import heal_
from tests.conversion.converted import encoder, gpt2, output
from tests.conversion.low_rank_models import LOSSLESS, assert_same, make_low_rank_, mlp, modules_of, random_mlp
from tests.helpers import raises_value_error
from tests.shape_hook import shapes_unchecked

GAUDI = GaudiConfig(0.5, steps=2)
EVERY = [GAUDI, LowRankConfig(0.5), MonarchConfig(0.5), PixelflyConfig(0.6, tile=4, steps=2), BlastConfig(0.6, steps=2)]
lossless = pytest.mark.parametrize("config", LOSSLESS, ids=["gaudi", "low_rank"])


def images() -> torch.Tensor:
    return torch.linspace(-1, 1, 2 * 3 * 9 * 9).view(2, 3, 9, 9).sin()


def convnet() -> nn.Module:
    torch.manual_seed(0)
    return make_low_rank_(
        nn.Sequential(
            nn.Conv2d(3, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 12, 3, stride=2, padding=1, bias=False), nn.ReLU(),
            nn.Conv2d(12, 12, (1, 3), padding="same", padding_mode="circular"), nn.ReLU(),
            nn.Conv2d(12, 8, 3, dilation=2, padding=2, padding_mode="reflect"),
        )
    )  # fmt: skip


@lossless
def test_weights_that_fit_into_the_cost_give_the_dense_outputs(config, generator):
    model, x = mlp(), torch.randn(6, 16, generator=generator)
    expected = model(x)
    report = convert_(model, config)
    assert list(report) == ["0", "2", "4"] and report.mean_error < 1e-3
    assert_same(model(x), expected)


@lossless
def test_convolutions_that_fit_into_the_cost_give_the_dense_outputs(config):
    model = convnet()
    expected = model(images())
    report = convert_(model, config, where=conv_layers())
    kind = GaudiConv2d if isinstance(config, GaudiConfig) else StructuredConv2d
    assert list(report) == ["0", "2", "4", "6"] and all(isinstance(model[int(name)], kind) for name in report)
    assert_same(model(images()), expected)


class CalledByName(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.qkv, self.fc = nn.Conv2d(3, 8, 3), nn.Linear(8, 24), nn.Linear(24, 16)

    def forward(self, x):
        hidden = self.conv(input=x).mean((2, 3))
        return self.fc(input=self.qkv(input=hidden).tanh())


@pytest.mark.parametrize("config", (GAUDI, LowRankConfig(0.6)), ids=["gaudi", "low_rank"])
def test_layers_take_their_input_by_name(config):
    """That of `nn.Linear` and `nn.Conv2d`, while calibrated, converted and hardened."""
    model = CalledByName().eval()
    dense = copy.deepcopy(model)
    where = lambda m, n: linear_layers()(m, n) or conv_layers()(m, n)  # noqa: E731
    convert_(model, config, where, calibration=[images()])
    assert isinstance(model.qkv, SplitLinear)
    heal_(model, dense, [images()])
    converted = model(images())
    if config is GAUDI:
        harden_(model, images())
    torch.testing.assert_close(model(images()), converted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("config", (GAUDI, LowRankConfig(0.6)), ids=["gaudi", "low_rank"])
@pytest.mark.parametrize("split", (False, True))
def test_linear_layers_also_take_the_name_of_conv1d(config, split):
    """Which stands in the same models as `nn.Linear`; one input is asked for, neither none nor two."""
    model = nn.Sequential(OrderedDict(qkv=nn.Linear(8, 24)))
    convert_(model, config, split_fused=split)
    x = torch.ones(2, 8)
    assert isinstance(model.qkv, SplitLinear) == split
    assert torch.equal(model.qkv(x=x), model.qkv(x)) and torch.equal(model.qkv(input=x), model.qkv(x))
    for wrong in ({}, {"input": x, "x": x}):
        with pytest.raises(TypeError, match="one input"):
            model.qkv(**wrong)


@pytest.mark.parametrize("config", EVERY, ids=lambda config: type(config).__name__)
def test_every_config_converts_within_its_cost(config):
    model = random_mlp()
    report = convert_(model, config)
    assert report.relative_cost <= config.relative_cost and len(report) == 3
    assert 0 < report.mean_error < 1
    assert isinstance(model[0], GaudiLinear if isinstance(config, GaudiConfig) else StructuredLinear)
    model(torch.ones(2, 16)).sum().backward()
    assert all(p.grad is not None for p in model[0].parameters())


def test_linear_layers_and_convolutions_together():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 16))
    report = convert_(model, LowRankConfig(0.6), where=lambda m, n: linear_layers()(m, n) or conv_layers()(m, n))
    assert list(report) == ["0", "3"] and model(images()).shape == (2, 16)


@lossless
@pytest.mark.parametrize("split_fused", [True, False])
def test_conv1d_keeps_its_orientation_and_fused_projections_are_split(config, split_fused):
    model = make_low_rank_(gpt2())
    expected = output(model)
    report = convert_(model, config, split_fused=split_fused)
    assert "transformer.h.0.attn.c_attn" in report and "lm_head" not in report
    fused = model.transformer.h[0].attn.c_attn
    assert isinstance(fused, SplitLinear) == split_fused
    assert [row.layer for row in report.rows if "h.0.attn.c_attn" in row.layer] == (
        [f"transformer.h.0.attn.c_attn[{part}]" for part in "qkv"] if split_fused else ["transformer.h.0.attn.c_attn"]
    )
    assert not any(isinstance(module, Conv1D) for module in model.modules())
    assert_same(output(model), expected)


def test_fused_projections_of_grouped_query_attention_are_split_unequally(generator):
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.config = type("Config", (), {"num_attention_heads": 4, "num_key_value_heads": 2})()
            self.qkv_proj = nn.Linear(32, 64)

        def forward(self, x):
            return self.qkv_proj(x)

    torch.manual_seed(0)
    model, x = make_low_rank_(Attention()), torch.randn(3, 32, generator=generator)
    expected = model(x)
    report = convert_(model, LowRankConfig(0.6))
    assert [row.shape for row in report.rows] == [(32, 32), (16, 32), (16, 32)] and list(report) == ["qkv_proj"]
    assert_same(model(x), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@lossless
def test_models_of_other_dtypes_stay_in_theirs(dtype, config, generator):
    model, x = mlp(), torch.randn(6, 16, generator=generator)
    expected = model(x)
    convert_(model.to(dtype), config)
    assert {p.dtype for n, p in model.named_parameters() if "_frac" not in n} == {dtype}
    assert {p.dtype for n, p in model.named_parameters() if "_frac" in n} <= {torch.float32}
    y = model(x.to(dtype))
    assert y.dtype == dtype
    assert_same(y.float(), expected, tolerance=0.05)


def test_reported_errors_are_those_of_the_dtype_that_is_kept():
    model = nn.Sequential(nn.Linear(15, 16)).to(torch.bfloat16)
    model[0].weight.data = torch.outer(torch.arange(1, 17), torch.arange(1, 16)).to(torch.bfloat16)  # exactly rank 1
    dense = model[0].weight.detach().float()
    (row,) = convert_(model, LowRankConfig(0.5)).rows
    kept = model[0].matrix.to(torch.float32).to_dense().detach()
    assert row.error == pytest.approx(float((kept - dense).norm() / dense.norm()), rel=1e-4) and row.error > 1e-4


def test_float64_is_fitted_in_float64(generator):
    model = make_low_rank_(mlp().double())
    x = torch.randn(50, 16, dtype=torch.float64, generator=generator)
    report = convert_(model, LOSSLESS[1], calibration=[x], sensitivity=True)
    assert all(row.error < 1e-12 for row in report.rows)


@pytest.mark.parametrize("config", EVERY, ids=lambda config: type(config).__name__)
def test_errors_do_not_depend_on_the_size_of_the_weights(config):
    usual = convert_(random_mlp(), config)
    for size in (2.0**80, 2.0**-80):
        model = random_mlp()
        for layer in (model[0], model[4]):
            layer.weight.data *= size
        rows = convert_(model, config).rows
        assert [row.error for row in rows] == pytest.approx([row.error for row in usual.rows], rel=1e-3)
        assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_a_nan_in_the_last_weight_leaves_the_model_as_it_was():
    model = random_mlp()
    model[4].weight.data[0, 0] = torch.nan
    before = modules_of(model)
    with raises_value_error("4: its weight", "NaN"):
        convert_(model, GAUDI)
    assert modules_of(model) == before


def test_an_error_in_the_middle_of_fitting_leaves_the_model_as_it_was(monkeypatch):
    model = random_mlp()
    before, calls = modules_of(model), []
    real = convert_module.fit_batch

    def failing(*args):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("out of memory")
        return real(*args)

    monkeypatch.setattr(convert_module, "fit_batch", failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        convert_(model, GAUDI)
    assert len(calls) == 2 and modules_of(model) == before


def test_a_layer_too_small_for_the_cost_leaves_the_model_as_it_was():
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 2))
    before = modules_of(model)
    with raises_value_error("2 x 32", "`where`"):
        convert_(model, LowRankConfig(0.2))
    assert modules_of(model) == before


def test_equal_shapes_are_fitted_as_one_batch(monkeypatch):
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)), nn.Linear(16, 24))
    shapes = []
    real = convert_module.fit_batch
    monkeypatch.setattr(convert_module, "fit_batch", lambda *args: shapes.append(args[1].shape) or real(*args))
    convert_(model, LowRankConfig(0.6))
    assert sorted(tuple(s) for s in shapes) == [(1, 24, 16), (3, 16, 16)]


def test_big_batches_are_fitted_in_pieces_with_the_same_result(monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
    twin = copy.deepcopy(model)
    convert_(model, LowRankConfig(0.6))
    monkeypatch.setattr(convert_module, "room", lambda device: 2 * 16 * 16)
    convert_(twin, LowRankConfig(0.6))
    for a, b in zip(model, twin, strict=True):
        torch.testing.assert_close(a.weight, b.weight)


@pytest.mark.parametrize(
    "config", [LowRankConfig, lambda *args: GaudiConfig(*args, steps=2)], ids=["low_rank", "gaudi"]
)
def test_global_allocation_keeps_the_total_and_spends_it_where_it_helps(config):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 24), nn.Linear(24, 24))
    with torch.no_grad():  # almost rank 1 against flat
        model[1].weight.copy_(torch.outer(torch.randn(24), torch.randn(24)) + 0.01 * torch.randn(24, 24))
    twin = copy.deepcopy(model)
    uniform, spread = convert_(twin, config(0.4)), convert_(model, config(0.4, "global"))
    assert spread.relative_cost <= 0.4
    assert spread.rows[0].num_mults > 1.3 * uniform.rows[0].num_mults
    assert sum(row.error**2 for row in spread.rows) < sum(row.error**2 for row in uniform.rows)
    assert "global" in str(spread)


@pytest.mark.parametrize(
    "config",
    [LowRankConfig(0.5, "global", 8), GaudiConfig(0.5, "global", 16, steps=2), MonarchConfig(0.5, "global", steps=1)],
)
def test_global_budgets_in_coarse_steps_are_spent(config):
    """0.46, 0.47 and 0.46, when low rank and Monarch rounded down what each layer was given, and no layer was given
    part of a step.
    """
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(96, 96) for _ in range(3)), nn.Linear(96, 384), nn.Linear(384, 96))
    with torch.no_grad():
        for i, layer in enumerate(model):
            u, s, v = torch.linalg.svd(layer.weight, full_matrices=False)
            layer.weight.copy_((u * torch.logspace(0, -0.3 - 0.4 * i, len(s))) @ v)
    assert 0.49 < convert_(model, config).relative_cost <= 0.5


@pytest.mark.parametrize(
    "config",
    [
        GaudiConfig(0.3, "global", 16, align=16, steps=2),
        BlastConfig(0.3, "global", steps=2),
        MonarchConfig(0.3, "global", steps=1),
        PixelflyConfig(0.3, "global", steps=1),
        LowRankConfig(0.3, "global", 16),
    ],
    ids=lambda config: type(config).__name__,
)
def test_global_budgets_pay_for_the_smallest_matrix_of_the_format(config):
    """The second layer was given what rank 1 costs, which pays for no block of 16 x 16 and for no BLAST matrix."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 256), nn.Linear(256, 64))
    with torch.no_grad():
        model[1].weight.copy_(torch.outer(torch.randn(64), torch.randn(256)))
    assert convert_(model, config).relative_cost <= 0.3


@pytest.mark.parametrize("allocation", ["uniform", "global"])
def test_a_model_of_blocks_spends_what_it_was_given(allocation):
    """As low rank does: what a fit leaves is less than its smallest block, and steps of ranks are small here."""
    model = nn.Sequential(nn.Linear(48, 96), nn.ReLU(), nn.Linear(96, 48), nn.ReLU(), nn.Linear(48, 48))
    report = convert_(model, GaudiConfig(0.4, allocation, block_rank=4, steps=2))
    assert 0.4 - 0.01 < report.relative_cost <= 0.4


def test_few_samples_are_told_of(generator):
    def notes(num):
        model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
        return convert_(model, LowRankConfig(0.5), calibration=[torch.randn(num, 16, generator=generator)]).notes

    assert notes(16) == ()
    (note,) = notes(15)
    assert "0 saw 15 inputs and has 16 features (and 1 more layer likewise)" in note


def test_global_allocation_weighs_layers_by_their_positions(generator):
    class Model(nn.Module):
        """The first layer is applied to ten times as many vectors as the second."""

        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.often, self.seldom = nn.Linear(24, 24), nn.Linear(24, 24)

        def forward(self, x):
            return self.seldom(self.often(x)[:, :1])

    model = Model()
    batches = [torch.randn(4, 10, 24, generator=generator)]
    often, seldom = convert_(model, LowRankConfig(0.4, "global"), calibration=batches).rows
    assert 10 * often.num_mults + seldom.num_mults <= 0.4 * 11 * 24 * 24
    assert seldom.relative_cost > 0.7 > often.relative_cost


@pytest.mark.parametrize("config", [GAUDI, LowRankConfig(0.5)], ids=["gaudi", "low_rank"])
def test_training_mode_and_frozen_weights_carry_over(config):
    model = random_mlp().train()
    model[0].requires_grad_(False)
    model[2].eval()
    convert_(model, config)
    assert not any(p.requires_grad for p in model[0].parameters())
    assert all(p.requires_grad for p in model[4].parameters())
    assert (model[0].training, model[2].training, model[4].training) == (True, False, True)


@pytest.mark.parametrize("config", [GAUDI, LowRankConfig(0.5)], ids=["gaudi", "low_rank"])
def test_a_frozen_weight_may_have_a_bias_that_trains_and_the_reverse(config):
    model = random_mlp()
    model[0].weight.requires_grad_(False)
    model[2].bias.requires_grad_(False)
    convert_(model, config)
    assert [name for name, p in model[0].named_parameters() if p.requires_grad] == ["bias"]
    assert [name for name, p in model[2].named_parameters() if not p.requires_grad] == ["bias"]
    model = nn.Sequential(OrderedDict(qkv=nn.Linear(16, 48)))
    model.qkv.weight.requires_grad_(False)
    convert_(model, config)
    assert {name for name, p in model.qkv.named_parameters() if p.requires_grad} == {
        f"parts.{i}.bias" for i in range(3)
    }


def test_layers_without_bias_stay_without():
    model = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 16))
    convert_(model, GAUDI)
    assert model[0].bias is None and model[1].bias is not None


def test_options_of_the_config_reach_the_layers():
    model = nn.Sequential(nn.Linear(32, 48))
    convert_(model, GaudiConfig(0.6, block_rank=2, align=4, num_blocks=9, rounding=True, steps=1))
    layer = model[0]
    assert (layer.block_rank, layer.align, layer.num_blocks, layer.rounding) == (2, 4, 9, True)
    assert bool((layer.structure.row_width % 4 == 0).all()) and layer.num_mults <= 0.6 * 32 * 48


@pytest.mark.parametrize("rounding", [True, False])
def test_a_converted_layer_is_the_fitted_matrix(rounding):
    model = mlp()
    report = convert_(model, GaudiConfig(0.7, init="low_rank", steps=1, rounding=rounding))
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
    assert report.mean_error < 1e-3
    assert_same(model(x), mlp()(x))


def test_scratch_ignores_the_weights_and_starts_at_the_cost():
    model = random_mlp()
    model[0].weight.data.fill_(torch.nan)
    report = convert_(model, GaudiConfig(0.4, init="scratch"))
    assert 0.3 < report.relative_cost <= 0.4 and report.mean_error is None
    assert bool(model(torch.ones(2, 16)).isfinite().all())


@pytest.mark.parametrize(("deviation", "expected"), [(0.005, 0.005), (0.1, 0.1), (0.0, (3 * 96) ** -0.5)])
@pytest.mark.parametrize("block_rank", [1, 8])
def test_scratch_starts_with_the_variance_of_the_layer_it_replaces(deviation, expected, block_rank):
    """Of zeros, which would never learn, with that of `nn.Linear`."""
    model = nn.Sequential(nn.Linear(96, 64))
    nn.init.normal_(model[0].weight, std=deviation, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    convert_(model, GaudiConfig(0.8, init="scratch", block_rank=block_rank))
    assert float(model[0].weight.std()) == pytest.approx(expected, rel=0.1)


def test_scratch_on_the_meta_device():
    with torch.device("meta"):
        model = random_mlp()
    report = convert_(model, GaudiConfig(0.4, init="scratch"))
    assert len(report) == 3 and model(torch.empty(2, 16, device="meta")).shape == (2, 8)
    assert {p.device.type for p in model.parameters()} == {"meta"}


@lossless
@pytest.mark.parametrize("padding", [False, True])
def test_the_fused_kernel_of_torch_transformers_is_not_taken(config, padding):
    """In eval mode without gradients it would read the dense weights past the converted layers."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
    model = make_low_rank_(nn.TransformerEncoder(layer, 2))
    x = torch.linspace(-1, 1, 2 * 5 * 32).view(2, 5, 32).sin()
    mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2]) if padding else None
    valid = ~mask if padding else torch.ones(2, 5, dtype=torch.bool)
    with torch.no_grad():
        expected = model(x, src_key_padding_mask=mask)
        report = convert_(model, config)
        actual = model(x, src_key_padding_mask=mask)
        assert_same(actual[valid], expected[valid])
        for module in model.modules():
            if isinstance(module, (GaudiLinear, StructuredLinear)):
                module.bias.add_(1.0)
        assert float((model(x, src_key_padding_mask=mask)[valid] - expected[valid]).abs().max()) > 1e-2
    assert all(name.endswith(("linear1", "linear2")) for name in report) and len(report) == 4
    assert all("MultiheadAttention" in why for why in report.skipped.values()) and len(report.skipped) == 2


def test_an_encoder_that_is_hardened_and_loaded_does_not_take_it_either(tmp_path):
    model = make_low_rank_(encoder())
    expected = output(model)
    convert_(model, LOSSLESS[0])
    harden_(model)
    assert_same(output(model), expected)
    save_pretrained(model, tmp_path)
    assert torch.equal(output(load_(encoder(), tmp_path)), output(model))


def test_a_converted_model_is_copied_and_keeps_its_outputs(generator):
    model, x = random_mlp(), torch.randn(3, 16, generator=generator)
    convert_(model, GAUDI)
    assert torch.equal(copy.deepcopy(model)(x), model(x))


def test_a_converted_model_can_go_on_learning(generator):
    model = random_mlp()
    convert_(model, GAUDI)
    for module in model.modules():
        if isinstance(module, GaudiLinear):
            module.set_sigma(4.0)
    x, y = torch.randn(32, 16, generator=generator), torch.randn(32, 8, generator=generator)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.9 * losses[0]


def test_a_model_that_is_structured_already_is_told_apart_from_one_without_layers():
    model = random_mlp()
    convert_(model, LowRankConfig(0.5))
    with raises_value_error("structured already", "gblr.densify_"):
        convert_(model, LowRankConfig(0.5))
    with raises_value_error("no linear or convolution layer"):
        convert_(nn.Sequential(nn.ReLU()), LowRankConfig(0.5))


def test_a_layer_that_is_too_small_for_the_cost_is_named():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 3), nn.Linear(3, 64), nn.Linear(64, 3))
    with raises_value_error("1 and 1 more of this shape", "3 x 64", "leave this layer out"):
        convert_(model, LowRankConfig(0.1), linear_layers(include=("1", "3")))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("bert", LowRankConfig(0.5)), "`model` must be a torch.nn.Module; got str"),
        ((nn.Linear(8, 8), 0.5), "`config` must be a config, such as .* got 0.5"),
        ((nn.Linear(8, 8), GaudiConfig), "`config` must be a config"),
        ((nn.Linear(8, 8), LowRankConfig(0.5), "fc"), "`where` must be a function .* got 'fc'"),
    ],
)
def test_arguments_of_another_type_are_told(arguments, words):
    with shapes_unchecked(), pytest.raises(TypeError, match=words):
        convert_(*arguments)


def test_labels_in_calibration_batches_are_told():
    batches = [(torch.ones(2, 8), torch.zeros(2))]
    with pytest.raises(TypeError, match="leave labels out"):
        convert_(nn.Sequential(nn.Linear(8, 8)), LowRankConfig(0.9), calibration=batches)

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune
from transformers import FalconConfig, FalconModel
from transformers.pytorch_utils import Conv1D

from gblr.conversion.convert import convert_
from gblr.conversion.filters import conv_layers, linear_layers
from gblr.conversion.sources import Uses, fused_sizes, read_source, reason_against
from gblr.fitting.config import GaudiConfig, LowRankConfig
from tests.conversion.converted import gpt2, llama
from tests.helpers import raises_value_error


class Named(nn.Module):
    """A module with the given children, and a config like that of transformers."""

    def __init__(self, config=None, **children: nn.Module):
        super().__init__()
        self.config = config
        for name, child in children.items():
            self.add_module(name, child)


def reason(model: nn.Module, name: str) -> str | None:
    return reason_against(model, name, model.get_submodule(name), Uses(model))


def test_plain_layers_have_nothing_against_them():
    model = Named(a=nn.Linear(4, 4), b=nn.Conv2d(3, 3, 1), c=Conv1D(4, 4))
    assert [reason(model, name) for name in "abc"] == [None] * 3


def test_tied_weights_stay():
    model = llama()
    assert "tied" in reason(model, "lm_head")
    report = convert_(model, LowRankConfig(0.6), where=linear_layers(include=("lm_head", "q_proj")))
    assert "tied" in report.skipped["lm_head"] and len(report) == 2
    assert model.lm_head.weight is model.model.embed_tokens.weight
    with raises_value_error("lm_head", "tied"):
        convert_(llama(), LowRankConfig(0.6), where=linear_layers(include=("lm_head",)))


def test_shared_modules_stay():
    layer = nn.Linear(16, 16)
    model = nn.Sequential(layer, nn.ReLU(), layer, nn.Linear(16, 16))
    report = convert_(model, LowRankConfig(0.6))
    assert list(report) == ["3"] and "several places" in report.skipped["0"]
    assert model[0] is model[2] is layer


def test_a_module_shared_through_its_parent_stays():
    block = nn.Sequential(nn.Linear(16, 16))
    model = nn.Sequential(block, block, nn.Linear(16, 16))
    assert list(convert_(model, LowRankConfig(0.6))) == ["2"]
    assert model[0] is model[1] and type(block[0]) is nn.Linear


def test_weights_that_a_parent_reads_stay():
    model = Named(attention=nn.MultiheadAttention(16, 2), mlp=nn.Linear(16, 16))
    report = convert_(model, LowRankConfig(0.6))
    assert list(report) == ["mlp"] and "MultiheadAttention" in report.skipped["attention.out_proj"]


def test_grouped_convolutions_stay():
    model = nn.Sequential(nn.Conv2d(8, 8, 3, groups=2), nn.Conv2d(8, 8, 3))
    report = convert_(model, LowRankConfig(0.6), where=conv_layers())
    assert list(report) == ["1"] and "groups=2" in report.skipped["0"]


def test_parametrized_weights_stay():
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(16, 16)), nn.Linear(16, 16))
    report = convert_(model, LowRankConfig(0.6))
    assert list(report) == ["1"] and "parametriz" in report.skipped["0"]


class Scaled(nn.Linear):
    def forward(self, x):
        return 3 * super().forward(x)


class Named16(nn.Linear):
    """Nothing but another name, and another way to be built."""

    def __init__(self):
        super().__init__(16, 16)


class Shifted(nn.Conv2d):
    def _conv_forward(self, x, weight, bias):
        return super()._conv_forward(x, weight, bias) + 1


def test_layers_with_a_forward_of_their_own_stay(generator):
    model, x = nn.Sequential(Scaled(16, 16), Named16()), torch.randn(3, 16, generator=generator)
    expected = model[0](x)
    report = convert_(model, LowRankConfig(0.6))
    assert list(report) == ["1"] and "Scaled computes something of its own" in report.skipped["0"]
    assert torch.equal(model[0](x), expected)
    with raises_value_error("0: skipped: Scaled"):
        convert_(nn.Sequential(Scaled(16, 16)), LowRankConfig(0.6))
    with raises_value_error("0: skipped: Shifted"):
        convert_(nn.Sequential(Shifted(4, 4, 3)), LowRankConfig(0.6), where=conv_layers())


def test_a_forward_that_says_the_same_in_other_words_is_known():
    config = FalconConfig(
        vocab_size=20, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, ffn_hidden_size=32
    )  # fmt: skip
    model = FalconModel(config).eval()
    assert len(convert_(model, LowRankConfig(0.6))) == 4


@pytest.mark.parametrize("layer", [nn.Linear(1, 16), nn.Linear(16, 1)])
def test_single_rows_and_columns_stay(layer):
    """A decision transformer embeds rewards, which are single numbers."""
    model = nn.Sequential(layer, nn.Linear(16, 16))
    other = copy.deepcopy(model)
    report = convert_(model, LowRankConfig(0.6))
    assert list(report) == ["1"] and "single row or column" in report.skipped["0"]
    assert list(convert_(other, GaudiConfig(0.6), linear_layers(include=("0", "1")))) == ["0", "1"]


def test_a_layer_whose_forward_was_replaced_stays():
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    model[0].forward = lambda x: 2 * x
    report = convert_(model, LowRankConfig(0.6))
    assert list(report) == ["1"] and "`forward` was replaced" in report.skipped["0"]


def pruned_bias(layer):
    return prune.l1_unstructured(layer, "bias", 0.5)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    "wrap",
    [nn.utils.weight_norm, nn.utils.spectral_norm, lambda m: prune.l1_unstructured(m, "weight", 0.5), pruned_bias],
)
def test_tensors_that_a_hook_computes_stay(wrap):
    model = nn.Sequential(wrap(nn.Linear(16, 16)), nn.Linear(16, 16))
    report = convert_(model, LowRankConfig(0.6))
    assert list(report) == ["1"] and "is no parameter" in report.skipped["0"]
    if wrap is pruned_bias:
        prune.remove(model[0], "bias")
        assert list(convert_(model, LowRankConfig(0.6))) == ["0"]


def test_tied_biases_stay():
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
    model[1].bias = model[0].bias
    report = convert_(model, LowRankConfig(0.6))
    assert list(report) == ["2"] and "bias is tied" in report.skipped["0"] and model[1].bias is model[0].bias


def test_layers_without_a_weight_yet_or_with_an_empty_one_stay():
    model = Named(a=nn.Linear(0, 16), b=nn.LazyLinear(16), c=nn.Linear(16, 16), qkv=nn.Linear(16, 0))
    report = convert_(model, LowRankConfig(0.6))
    assert list(report) == ["c"] and "empty" in report.skipped["a"] and "empty" in report.skipped["qkv"]
    assert "run the model once" in report.skipped["b"]
    model.b(torch.ones(2, 16))
    assert list(convert_(model, LowRankConfig(0.6))) == ["b"]


def test_structured_layers_stay():
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    convert_(model, LowRankConfig(0.6), where=linear_layers(include=("0",)))
    first = model[0]
    report = convert_(model, LowRankConfig(0.6), where=lambda module, name: name in ("0", "1"))
    assert list(report) == ["1"] and "structured already" in report.skipped["0"] and model[0] is first


def test_a_model_that_is_one_layer_is_refused_with_a_way_out():
    with raises_value_error("nn.Sequential"):
        convert_(nn.Linear(16, 16), LowRankConfig(0.6))


def test_skipped_layers_are_in_the_printed_report():
    layer = nn.Linear(16, 16)
    text = str(convert_(nn.Sequential(layer, layer, nn.Linear(16, 16)), LowRankConfig(0.6)))
    assert "skipped: this module is used" in " ".join(text.split())


def test_conv1d_is_read_transposed(generator):
    layer = Conv1D(24, 16)  # out, in
    source = read_source(Named(fc=layer), "fc", layer, split_fused=True)
    x = torch.randn(3, 16, generator=generator)
    torch.testing.assert_close(nn.functional.linear(x, source.weight, source.bias), layer(x))


def test_a_convolution_is_read_as_out_by_in_times_kernel(generator):
    layer = nn.Conv2d(3, 5, (2, 3), bias=False)
    source = read_source(Named(conv=layer), "conv", layer, split_fused=True)
    assert source.weight.shape == (5, 18) and source.bias is None
    x = torch.randn(2, 3, 6, 6, generator=generator)
    patches, (height, width) = source.geometry.unfold(x)
    y = (patches @ source.weight.T).mT.unflatten(2, (height, width))
    torch.testing.assert_close(y, layer(x))


class HeadsConfig:
    def __init__(self, num_attention_heads, num_key_value_heads):
        self.num_attention_heads, self.num_key_value_heads = num_attention_heads, num_key_value_heads


@pytest.mark.parametrize(
    ("config", "name", "shape", "expected"),
    [
        (None, "attn.qkv", (96, 32), (32, 32, 32)),
        (None, "attn.c_attn", (64, 32), (32, 32)),  # keys and values of cross attention
        (None, "mlp.fc1", (96, 32), (96,)),
        (None, "attn.qkv", (100, 32), (100,)),
        (HeadsConfig(8, 2), "self_attn.qkv_proj", (48, 32), (32, 8, 8)),
        (HeadsConfig(4, 4), "self_attn.qkv_proj", (96, 32), (32, 32, 32)),
        (HeadsConfig(4, 1), "query_key_value", (60, 32), (40, 10, 10)),  # heads wider than hidden size / heads
        (HeadsConfig(8, 2), "mlp.gate_up_proj", (48, 32), (48,)),
    ],
)
def test_fused_projections_are_split_by_name_and_config(config, name, shape, expected):
    assert fused_sizes(Named(config), name, *shape) == expected


def test_parts_of_a_fused_projection_are_its_rows():
    model = gpt2()
    layer = model.transformer.h[0].attn.c_attn
    source = read_source(model, "transformer.h.0.attn.c_attn", layer, split_fused=True)
    assert source.part_names == tuple(f"transformer.h.0.attn.c_attn[{part}]" for part in "qkv")
    weights, biases = zip(*source.parts(), strict=True)
    assert torch.equal(torch.cat(weights), layer.weight.T) and torch.equal(torch.cat(biases), layer.bias)
    whole = read_source(model, "transformer.h.0.attn.c_attn", layer, split_fused=False)
    assert whole.part_sizes == (96,) and whole.part_names == ("transformer.h.0.attn.c_attn",)


def test_a_weight_on_meta_is_refused_unless_it_starts_from_scratch():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(16, 16))
    with raises_value_error("0: its weight", "meta", "scratch"):
        convert_(model, LowRankConfig(0.6))

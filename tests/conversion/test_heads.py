"""The default conversion leaves the output head dense, by its name or by where it stands."""

import pytest
import torch
from torch import nn
from transformers import (
    BartConfig,
    BartForSequenceClassification,
    BertConfig,
    BertForMaskedLM,
    ResNetConfig,
    ResNetForImageClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from gblr.conversion.convert import convert_
from gblr.conversion.filters import NameFilter, conv_layers, is_linear_or_conv, linear_layers
from gblr.conversion.heads import output_heads
from gblr.fitting.config import LowRankConfig
from gblr.models.resnet_cifar import CifarResNet

SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 64}
BART = {"d_model": 32, "vocab_size": 64, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 64}
BART |= {"decoder_ffn_dim": 64, "encoder_attention_heads": 2, "decoder_attention_heads": 2}


def named(**layers: nn.Module) -> nn.Module:
    return nn.ModuleDict(layers)


def linear() -> nn.Linear:
    return nn.Linear(32, 32)


VGG = nn.Sequential(linear(), nn.ReLU(), linear(), nn.ReLU(), linear())


@pytest.mark.parametrize(
    ("model", "heads"),
    [
        (named(conv1=nn.Conv2d(3, 8, 3), fc=linear()), {"fc"}),
        (named(stem=linear(), head=named(norm=nn.LayerNorm(8), fc=linear())), {"head.fc"}),
        (named(features=nn.Conv2d(3, 8, 3), classifier=VGG), {"classifier.4"}),
        (CifarResNet(8), {"linear"}),
        (BertForMaskedLM(BertConfig(**SMALL, tie_word_embeddings=False)), {"cls.predictions.decoder"}),
        (RobertaForSequenceClassification(RobertaConfig(**SMALL)), {"classifier.out_proj"}),
        (BartForSequenceClassification(BartConfig(**BART)), {"classification_head.out_proj"}),
        (ResNetForImageClassification(ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1])), {"classifier.1"}),
        (nn.Sequential(linear(), nn.ReLU(), linear()), set()),
        (named(fc1=linear(), fc2=linear(), fc3=linear()), set()),
        (named(encoder=linear(), decoder=linear()), set()),
        (named(blocks=nn.ModuleList(named(fc=linear()) for _ in range(2))), set()),
        (named(fc=linear(), out_proj=linear()), set()),
        (named(linear=linear()), set()),
    ],
)  # fmt: skip
def test_the_head_is_found_where_there_is_one(model, heads):
    assert output_heads(model) == heads


def test_it_stays_dense_with_a_reason_unless_it_is_asked_for():
    model = named(stem=linear(), fc=linear())
    report = convert_(model, LowRankConfig(0.5))
    assert list(report) == ["stem"] and isinstance(model["fc"], nn.Linear)
    (row,) = (row for row in report.rows if row.layer == "fc")
    assert not row.converted and "output head; name it in `include`" in row.what
    assert list(convert_(named(stem=linear(), fc=linear()), LowRankConfig(0.5), linear_layers(include=("fc",)))) == [
        "fc"
    ]
    both = NameFilter(is_linear_or_conv, "linear or convolution")
    assert "linear" not in convert_(CifarResNet(8), LowRankConfig(0.7), both)
    assert list(convert_(named(stem=linear(), fc=linear()), LowRankConfig(0.5), lambda m, name: name == "fc")) == ["fc"]


def test_a_network_of_convolutions_is_told_how_to_convert_those():
    with pytest.raises(ValueError, match=r"linear: skipped: it is the output head.*`gblr.conv_layers\(\)`"):
        convert_(CifarResNet(8), LowRankConfig(0.5))
    assert len(convert_(CifarResNet(8), LowRankConfig(0.7), conv_layers(include=("layer3",)))) == 2


def test_float8_weights_count_as_quantized():
    model = named(stem=linear(), body=linear())
    model["body"].weight = nn.Parameter(model["body"].weight.detach().to(torch.float8_e4m3fn), requires_grad=False)
    report = convert_(model, LowRankConfig(0.5))
    assert list(report) == ["stem"] and "quantized" in next(row.what for row in report.rows if row.layer == "body")

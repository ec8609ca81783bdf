import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from gblr.conversion.convert import convert_
from gblr.conversion.filters import conv_layers, linear_layers, matches, near_matches
from gblr.fitting.config import LowRankConfig
from tests.conversion.converted import bert
from tests.helpers import raises_value_error

LINEAR = nn.Linear(4, 4)


@pytest.mark.parametrize(
    ("name", "pattern", "expected"),
    [
        ("layer.0.query", "query", True),
        ("layer.0.query", "quer", False),
        ("0.attention.self.query", "attention.self", True),
        ("0.attention.self.query", "self.attention", False),
        ("encoder.layer.3.output.dense", "encoder.layer.*.output.dense", True),
        ("encoder.layer.3.output.dense", "*.dense", True),
        ("encoder.layer.3.output.dense", "layer.3", True),
        ("encoder.layer.13.output.dense", "layer.3", False),
        ("query", "query", True),
        ("conv1", "^conv1", True),
        ("conv1.weight", "^conv1", True),
        ("conv10", "^conv1", False),
        ("layer1.0.conv1", "^conv1", False),
        ("layer1.0.conv1", "^layer1", True),
        ("layer1.0.conv1", "^layer1.*.conv1", True),
    ],
)
def test_patterns_match_whole_names_or_parts_between_dots(name, pattern, expected):
    assert matches(name, pattern) is expected


def test_linear_layers_are_linear_and_conv1d_but_no_heads():
    where = linear_layers()
    assert where(LINEAR, "layers.0.fc1") and where(Conv1D(4, 4), "h.0.attn.c_attn")
    assert not where(nn.Conv2d(3, 3, 1), "conv") and not where(nn.Embedding(3, 3), "embed")
    for head in ("lm_head", "head", "classifier", "score", "model.lm_head"):
        assert not where(LINEAR, head)
    assert linear_layers(include=("lm_head",))(LINEAR, "lm_head")


def test_conv_layers_are_convolutions():
    where = conv_layers(exclude=("stem",))
    assert where(nn.Conv2d(3, 3, 1), "layer1.conv") and not where(nn.Conv2d(3, 3, 1), "stem.conv")
    assert not where(LINEAR, "fc") and not where(nn.Conv1d(3, 3, 1), "conv")


def test_include_and_exclude_work_together():
    where = linear_layers(include=("attention", "*.fc1"), exclude=("layer.0",))
    assert where(LINEAR, "layer.1.attention.query") and where(LINEAR, "layer.1.fc1")
    assert not where(LINEAR, "layer.0.attention.query") and not where(LINEAR, "layer.1.fc2")


def test_a_pattern_that_matches_nothing_is_an_error_with_near_matches():
    with raises_value_error("`where`", "linear", "querry", "query"):
        convert_(bert(), LowRankConfig(0.5), where=linear_layers(include=("querry",)))
    with raises_value_error("`where`", "^quer", "query"):
        convert_(bert(), LowRankConfig(0.5), where=linear_layers(include=("^quer",)))
    with raises_value_error("`where`", "convolution"):
        convert_(bert(), LowRankConfig(0.5), where=conv_layers(include=("conv1",)))


def test_one_pattern_of_several_that_matches_nothing_is_noted():
    report = convert_(bert(), LowRankConfig(0.5), where=linear_layers(include=("query", "keys"), exclude=("pooller",)))
    assert all(name.endswith("query") for name in report) and len(report) == 2
    assert len(report.notes) == 2
    assert "'keys'" in report.notes[0] and "key" in report.notes[0] and "pooler" in report.notes[1]


def test_near_matches_fall_back_to_examples():
    assert "layer.0.fc1" in near_matches("zzzzzz", ["layer.0.fc1", "layer.0.fc2"])
    assert "fc1" in near_matches("fc_1", ["layer.0.fc1", "layer.0.fc2"])


def test_a_string_for_a_sequence_is_refused():
    with raises_value_error("`include`", "('query',)"):
        linear_layers(include="query")
    with raises_value_error("`exclude`", "('query',)"):
        conv_layers(exclude="query")


def test_a_filter_may_be_any_function_of_module_and_name():
    model = bert()
    seen = []
    report = convert_(model, LowRankConfig(0.5), where=lambda module, name: seen.append(name) or name.endswith("value"))
    assert list(report) == ["encoder.layer.0.attention.self.value", "encoder.layer.1.attention.self.value"]
    assert set(seen) == {name for name, _ in bert().named_modules()}


def test_a_function_that_chooses_everything_converts_what_can_be():
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 16))
    report = convert_(model, LowRankConfig(0.5), where=lambda module, name: True)
    assert list(report) == ["0", "2"] and "LayerNorm" in report.skipped["1"]
    assert model(torch.ones(2, 16)).shape == (2, 16)


def test_a_function_that_chooses_nothing_is_an_error_with_examples():
    with raises_value_error("`where`", "0, 2"):
        convert_(nn.Sequential(LINEAR, nn.ReLU(), nn.Linear(4, 4)), LowRankConfig(0.5), where=lambda m, n: False)

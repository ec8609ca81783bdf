"""Which part of a model repeats, and what passes from one repetition to the next."""

import pytest
import torch
from torch import nn
from transformers import T5Config, T5EncoderModel

from gblr.conversion.blocks import as_form, find_blocks, form_of, split_call
from gblr.conversion.choosing import choose
from gblr.conversion.filters import linear_layers
from gblr.conversion.streaming import convert_streaming
from gblr.fitting.config import LowRankConfig
from tests.conversion.converted import bert, gpt2, llama, resnet, vit


@pytest.mark.parametrize(
    ("make", "first", "outside"),
    [
        (bert, "encoder.layer.0", ["pooler.dense"]),
        (gpt2, "transformer.h.0", []),
        (llama, "model.layers.0", []),
        (vit, "vit.layers.0", []),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_blocks_are_the_list_with_most_of_the_layers(make, first, outside):
    model = make()
    sources, _ = choose(model, linear_layers(), split_fused=True)
    blocks = find_blocks(model, sources)
    assert blocks.names[0] == first and [source.name for source in blocks.outside] == outside
    assert sum(map(len, blocks.sources.values())) + len(outside) == len(sources)


def test_a_model_without_blocks_is_refused():
    model = nn.Sequential(nn.Linear(8, 8), nn.ModuleList([nn.Linear(2, 2)]))
    sources, _ = choose(model, linear_layers(), split_fused=True)
    with pytest.raises(ValueError, match=r"no list of blocks .* \(found: 1 \(6%\)\).*Use `gblr.convert_`"):
        find_blocks(model, sources)


def test_blocks_that_hand_on_more_than_hidden_states_are_refused_with_calibration(tmp_path):
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_ff": 32, "d_kv": 8, "num_layers": 2, "num_heads": 2, "vocab_size": 30}
    T5EncoderModel(T5Config(**sizes)).save_pretrained(tmp_path / "source")
    batches = [{"input_ids": torch.randint(0, 30, (2, 5))}]
    with pytest.raises(ValueError, match="gives more than hidden states"):
        convert_streaming(tmp_path / "source", tmp_path / "out", LowRankConfig(0.5), calibration=batches)
    assert len(convert_streaming(tmp_path / "source", tmp_path / "plain", LowRankConfig(0.5))) == 12


def test_calls_are_taken_apart_and_forms_kept():
    x, mask = torch.zeros(1, 2, 3), torch.ones(1, 2)
    hidden, (args, kwargs) = split_call((x, None), {"mask": (mask, True)}, "b")
    assert hidden is x and args == [None, None] and torch.equal(kwargs["mask"][0], mask)
    hidden, (args, kwargs) = split_call((), {"hidden_states": x, "n": 3}, "b")
    assert hidden is x and kwargs == {"hidden_states": None, "n": 3}
    with pytest.raises(ValueError, match="without hidden states"):
        split_call((), {"y": x}, "b")
    with pytest.raises(ValueError, match="is given a object, which cannot be kept"):
        split_call((x,), {"cache": object()}, "b")
    assert form_of(x, "b") is None and form_of((x, None), "b") == 2
    assert as_form(x, None) is x and as_form(x, 2) == (x, None)
    with pytest.raises(ValueError, match="more than hidden states"):
        form_of((x, mask), "b")


def test_a_model_of_convolutions_is_refused(tmp_path):
    resnet().save_pretrained(tmp_path / "source")
    with pytest.raises(ValueError):
        convert_streaming(tmp_path / "source", tmp_path / "out", LowRankConfig(0.5))

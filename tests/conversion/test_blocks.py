"""Which part of a model repeats, and what passes from one repetition to the next."""

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import (
    AlbertConfig,
    AlbertModel,
    T5Config,
    T5EncoderModel,
    T5ForConditionalGeneration,
    YolosConfig,
    YolosModel,
)

from gblr.conversion.blocks import Blocks, as_form, find_blocks, form_of, same, split_call, without_cache
from gblr.conversion.choosing import choose
from gblr.conversion.filters import linear_layers
from gblr.conversion.model_files import ModelFiles
from gblr.conversion.outside import Outside
from gblr.conversion.streaming import convert_streaming
from gblr.fitting.config import LowRankConfig
from tests.conversion.converted import bert, gpt2, llama, resnet, vit
from tests.conversion.streamed import make_batches


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


@pytest.mark.parametrize("make", [T5EncoderModel, T5ForConditionalGeneration])
def test_blocks_that_hand_on_more_than_hidden_states_are_refused_with_calibration(make, tmp_path):
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_ff": 32, "d_kv": 8, "num_layers": 2, "num_heads": 2, "vocab_size": 30}
    make(T5Config(**sizes, decoder_start_token_id=0)).save_pretrained(tmp_path / "source")
    batches = [{"input_ids": torch.randint(0, 30, (2, 5))}]
    if make is T5ForConditionalGeneration:
        batches[0]["decoder_input_ids"] = batches[0]["input_ids"]
    with pytest.raises(ValueError, match="gives more than hidden states"):
        convert_streaming(tmp_path / "source", tmp_path / "out", LowRankConfig(0.5), calibration=batches)
    assert len(convert_streaming(tmp_path / "source", tmp_path / "plain", LowRankConfig(0.5))) >= 12


def test_every_part_of_a_model_runs_without_its_cache():
    model = T5ForConditionalGeneration(T5Config(d_model=16, d_ff=32, d_kv=8, num_layers=1, num_heads=2, vocab_size=9))
    configs = [model.config, model.decoder.config]
    assert configs[0] is not configs[1] and all(config.use_cache for config in configs)
    with without_cache(model):
        assert not any(config.use_cache for config in configs)
    assert all(config.use_cache for config in configs)


# -- blocks that cannot be run alone -----------------------------------------------------------------------------------


def albert():
    sizes = {"embedding_size": 8, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
    return AlbertModel(AlbertConfig(vocab_size=50, num_hidden_layers=2, **sizes)), make_batches(1)


def yolos():
    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}
    model = YolosModel(YolosConfig(**sizes, image_size=[16, 16], patch_size=8, num_detection_tokens=2))
    return model, [torch.zeros(1, 3, 16, 16)]


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (albert, "call 2 is one of encoder.albert_layer_groups.0"),
        (yolos, r"what encoder.layer.1 is given was changed"),
    ],
)
def test_models_that_do_more_than_call_their_blocks_in_turn_are_refused_with_calibration(make, why, tmp_path):
    torch.manual_seed(0)
    model, batches = make()
    model.save_pretrained(tmp_path / "source")
    with pytest.raises(ValueError, match=rf"must run once, in turn.*{why}.*cannot be streamed with calibration"):
        convert_streaming(tmp_path / "source", tmp_path / "out", LowRankConfig(0.5), calibration=batches)


class Model(nn.Module):
    """Three blocks; `between` is called with all that they gave so far, and gives what the next is called with."""

    def __init__(self, between):
        super().__init__()
        self.layers = nn.ModuleList(nn.Identity() for _ in range(3))
        self.between = between

    def forward(self, x):
        outputs = [x + 1]
        for layer in self.layers:
            outputs.append(layer(*self.between(outputs)))
        return outputs[-1].zero_()


def outside(between):
    return Outside(
        Model(between), Blocks(("layers.0", "layers.1", "layers.2"), {}, []), ModelFiles(Path(), {}, {}, None)
    )


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("between", [lambda seen: [seen[-1] + 0], lambda seen: [seen[-1].add_(0)]])
def test_changes_between_blocks_are_seen(between, mode):
    with mode(), pytest.raises(ValueError, match=r"what layers.1 is given was changed"):
        outside(between).calls(torch.zeros(2, 4), None)


def test_arguments_that_come_from_other_blocks_are_seen():
    x = torch.zeros(2, 4)
    plain = outside(lambda seen: [seen[-1], seen[0].mean(-1)])
    hidden, calls = plain.calls(x, None)
    assert torch.equal(hidden, x + 1) and len(calls) == 3
    plain.check_calls(x, None, calls)
    arches = outside(lambda seen: [seen[-1], seen[len(seen) // 2].mean(-1)])
    with pytest.raises(ValueError, match="what some are given besides depends on outputs of others"):
        arches.check_calls(x, None, arches.calls(x, None)[1])


def test_calls_are_the_same_if_all_their_values_are():
    x = torch.tensor([1.0, float("-inf")])
    assert same([x, {"mask": (x, None)}], [x.clone(), {"mask": (x.clone(), None)}])
    for other in (x + 1, x[:1], None, 1.0):
        assert not same([x], [other]) and not same([other], [x])
    assert not same([x], [x, x])


# -- calls and forms ---------------------------------------------------------------------------------------------------


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

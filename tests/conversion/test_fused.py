import copy

import pytest
import torch
from torch import nn
from transformers import (
    BloomConfig,
    BloomModel,
    CodeGenConfig,
    CodeGenModel,
    FalconConfig,
    FalconModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    HieraConfig,
    HieraModel,
    JambaConfig,
    JambaModel,
    Lfm2Config,
    Lfm2Model,
    MiniMaxConfig,
    MiniMaxModel,
    Phi3Config,
    Phi3Model,
)

import gblr
from gblr.conversion.choosing import choose
from gblr.conversion.cost import cost
from gblr.layers.split import SplitLinear
from tests.conversion.converted import TOKENS
from tests.conversion.low_rank_models import LOSSLESS, assert_same, make_low_rank_

SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 50, "pad_token_id": 0}
WIDE = SIZES | {"intermediate_size": 64, "num_key_value_heads": 2}
HIERA = {
    "embed_dim": 16, "image_size": [32, 32], "patch_stride": [4, 4], "depths": [1, 1], "num_heads": [1, 2],
    "num_query_pool": 1, "masked_unit_size": [4, 4], "masked_unit_attention": [True, False],
}  # fmt: skip


def fused_layers(model: nn.Module) -> list[tuple[str, tuple[int, ...], int]]:
    """Name, rows of the parts and runs of all that are split, or could be taken for what is."""
    sources, _ = choose(model, gblr.linear_layers(include=("*qkv*", "*in_proj", "*query_key_value")), True)
    return [(source.name.split(".")[-1], source.part_sizes, source.runs) for source in sources]


@pytest.mark.parametrize(
    ("model", "config", "expected"),
    [
        (Phi3Model, Phi3Config(**WIDE), ("qkv_proj", (32, 16, 16), 1)),
        (BloomModel, BloomConfig(**SIZES | {"n_head": 4}), ("query_key_value", (32, 32, 32), 4)),
        (FalconModel, FalconConfig(**SIZES), ("query_key_value", (32, 8, 8), 1)),
        (FalconModel, FalconConfig(**SIZES, multi_query=False), ("query_key_value", (32, 32, 32), 4)),
        (
            FalconModel,
            FalconConfig(**SIZES, new_decoder_architecture=True, num_kv_heads=2),
            ("query_key_value", (32, 16, 16), 2),
        ),
        (CodeGenModel, CodeGenConfig(n_embd=32, n_layer=1, n_head=4, rotary_dim=8), ("qkv_proj", (96,), 1)),
    ],
    ids=["Phi3", "BLOOM", "Falcon-7B", "Falcon-RW", "Falcon-40B", "CodeGen"],
)
def test_q_k_and_v_are_found_where_the_model_has_them(model, config, expected):
    assert fused_layers(model(config)) == [expected]


def test_heads_are_those_of_the_attention_itself_not_of_others_in_the_model():
    """The lightning attention of MiniMax has as many key heads as query heads; the stages of Hiera differ in width."""
    config = MiniMaxConfig(
        **WIDE, head_dim=16, num_local_experts=2, num_experts_per_tok=1, block_size=8, layer_types=["linear_attention"]
    )
    assert fused_layers(MiniMaxModel(config)) == [("qkv_proj", (64, 64, 64), 4)]
    layers = fused_layers(HieraModel(HieraConfig(**HIERA)))
    assert layers == [("qkv", (16, 16, 16), 1), ("qkv", (32, 32, 32), 1)]


@pytest.mark.parametrize(
    ("model", "config"),
    [
        (JambaModel, JambaConfig(**WIDE, attn_layer_offset=1, num_experts=1, use_mamba_kernels=False)),
        (Lfm2Model, Lfm2Config(**WIDE, layer_types=["conv"])),
    ],
    ids=["Jamba", "LFM2"],
)
def test_the_in_proj_of_a_layer_that_is_no_attention_stays_whole(model, config):
    ((name, sizes, runs),) = fused_layers(model(config))
    assert (name, len(sizes), runs) == ("in_proj", 1, 1)


def neox() -> nn.Module:
    torch.manual_seed(0)
    return make_low_rank_(GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES | {"pad_token_id": None}, intermediate_size=64)))


@torch.no_grad()
@pytest.mark.parametrize("config", LOSSLESS, ids=["gaudi", "low_rank"])
def test_rows_that_take_turns_by_head_come_back_in_their_places(config, tmp_path):
    model = neox()
    expected, dense = model(TOKENS).logits, copy.deepcopy(model)
    report = gblr.convert_(model, config, calibration=[TOKENS], sensitivity=True)
    name = "gpt_neox.layers.0.attention.query_key_value"
    layer = model.get_submodule(name)
    assert isinstance(layer, SplitLinear) and f"{name}[k]" in [row.layer for row in report.rows]
    weight = dense.get_submodule(name).weight.view(4, 3, 8, 32)  # heads, q or k or v, rows of the head
    for i, part in enumerate(layer.parts):
        assert_same(part.weight, weight[:, i].flatten(0, 1))
    assert [one.type for one in cost(model, TOKENS).layers][:3] == ["q", "k", "v"]
    assert_same(model(TOKENS).logits, expected)
    gblr.heal_(model, dense, [TOKENS])
    assert_same(model(TOKENS).logits, expected)
    gblr.save_pretrained(model, tmp_path)
    assert torch.equal(gblr.from_pretrained(tmp_path)(TOKENS).logits, model(TOKENS).logits)
    assert torch.equal(gblr.load_(neox(), tmp_path)(TOKENS).logits, model(TOKENS).logits)
    assert '"class":"InterleavedLinear"' in (tmp_path / "gblr.json").read_text()  # which an older gblr refuses
    gblr.densify_(model)
    assert_same(model(TOKENS).logits, expected)


def test_rows_that_take_turns_are_exported(tmp_path):
    pytest.importorskip("onnxruntime")
    layer = SplitLinear([nn.Linear(16, size) for size in (8, 4, 4)], runs=2)
    assert gblr.export_onnx(nn.Sequential(layer, nn.ReLU()), torch.randn(3, 16), tmp_path / "a.onnx").difference < 1e-5

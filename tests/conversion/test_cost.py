import json

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers.pytorch_utils import Conv1D

from gblr.conversion.cost import cost
from gblr.conversion.layer_types import layer_type
from gblr.layers.gaudi import GaudiLinear
from gblr.layers.structured import StructuredLinear
from tests.conversion import converted
from tests.conversion.converted import IMAGES, TOKENS, low_rank

VECTORS = torch.linspace(-1, 1, 2 * 5 * 32).view(2, 5, 32)
MODELS = [
    (converted.bert, TOKENS),
    (converted.gpt2, TOKENS),
    (converted.llama, TOKENS),
    (converted.vit, IMAGES),
    (converted.resnet, IMAGES),
    (converted.encoder, VECTORS),
]


def counted_by_torch(model: nn.Module, x: torch.Tensor) -> float:
    """Multiplications per sample. Explicit attention, as torch has no formula for its fused kernel on the CPU."""
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
                model(x)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    return counter.get_total_flops() / 2 / len(x)


@pytest.mark.parametrize(("make", "x"), MODELS, ids=lambda value: getattr(value, "__name__", ""))
def test_dense_models_cost_what_torch_counts(make, x):
    model = make()
    c = cost(model, x)
    assert c.num_mults == c.dense_mults == round(counted_by_torch(model, x))
    assert c.relative_cost == c.model_relative_cost == 1.0
    assert c.num_params == c.dense_params == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_both_attention_products_are_counted_however_they_are_computed(attention):
    model = converted.llama()
    model.set_attn_implementation(attention)
    tokens, heads, head_size, layers = 7, 4, 8, 2
    assert cost(model, TOKENS).attention_mults == layers * 2 * heads * tokens * tokens * head_size


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_inference_mode_changes_no_count(attention):
    model = converted.llama()
    model.set_attn_implementation(attention)
    expected = cost(model, TOKENS)
    with torch.inference_mode():
        assert cost(model, TOKENS) == expected
        in_place = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4))
        assert cost(in_place, torch.ones(2, 4)).num_mults == 16  # of an input that was made in inference mode


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("packed", [False, True])
def test_recurrent_layers_count_every_weight_at_every_step(kind, packed):
    model = kind(6, 4, num_layers=2, bidirectional=True)
    weights = sum(p.numel() for name, p in model.named_parameters() if "weight" in name)
    x = torch.ones(5, 3, 6)
    if not packed:
        assert cost(model, x, batch_size=3).other_mults == cost(model, input=x, batch_size=3).other_mults == 5 * weights
        return
    sequences = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 3, 1]))
    assert cost(model, sequences, batch_size=3).other_mults == 3 * weights


def test_grouped_and_strided_convolutions_cost_what_torch_counts():
    model = nn.Sequential(nn.Conv2d(4, 8, 3, groups=2), nn.Conv2d(8, 6, 3, stride=2, padding=1), nn.Conv2d(6, 6, 1))
    x = torch.ones(3, 4, 9, 9)
    assert cost(model, x).num_mults == counted_by_torch(model, x)


def test_a_layer_that_returns_more_than_its_product_is_counted():
    """As the routers of Llama 4 and PhiMoE, which derive from nn.Linear."""

    class Router(nn.Linear):
        def forward(self, x):
            scores = super().forward(x)
            return scores.sigmoid(), scores

    (layer,) = cost(nn.Sequential(Router(32, 4)), VECTORS).layers
    assert (layer.positions, layer.num_mults) == (5, 5 * 32 * 4)


def test_transposed_convolutions_count_as_products_outside_layers():
    model = nn.ConvTranspose2d(4, 6, 3, stride=2)
    x = torch.ones(3, 4, 5, 5)
    assert cost(model, x).other_mults == counted_by_torch(model, x)


def test_converted_layers_count_their_format_at_every_position():
    model = nn.Sequential(StructuredLinear(low_rank(12, 8, rank=3)), nn.ReLU(), nn.Linear(12, 10))
    c = cost(model, torch.ones(4, 5, 8))
    first, second = c.layers
    assert (first.positions, first.product, first.num_mults) == (5, 3 * 20, 5 * 60)
    assert (c.converted_mults, c.converted_dense_mults) == (5 * 60, 5 * 96)
    assert c.relative_cost == 60 / 96 and c.model_relative_cost == (60 + 120) / (96 + 120)
    assert c.num_mults == 5 * 180 and c.dense_mults == 5 * 216
    assert c.num_params == 60 + 130 and c.dense_params == 96 + 130
    assert (second.converted, second.relative_cost) == (False, 1.0)


def test_gaudi_layers_count_the_widths_of_live_blocks():
    layer = GaudiLinear(8, 12, block_rank=2)
    with torch.no_grad():
        layer.width_frac.zero_()
        layer.width_frac[:, 0] = torch.tensor([0.5, 0.25])  # 6 rows, 2 columns
        layer.width_frac[0, 1] = 1.0  # no columns: dead
    c = cost(nn.Sequential(layer), torch.ones(1, 8))
    assert c.num_mults == 2 * (6 + 2) and c.num_params == 16 + 12


def test_layers_that_see_few_positions_weigh_little():
    """By products alone both layers would count alike."""
    model = converted.vit()
    model.classifier = nn.Linear(32, 2)
    c = cost(model, IMAGES)
    positions = {layer.name: layer.positions for layer in c.layers}
    assert positions["vit.layers.0.mlp.fc1"] == 17 and positions["classifier"] == 1
    assert positions["vit.embeddings.patch_embeddings.projection"] == 16


def test_a_module_called_twice_counts_twice_and_its_parameters_once():
    shared = StructuredLinear(low_rank(8, 8, rank=2))
    c = cost(nn.Sequential(shared, shared), torch.ones(3, 8))
    assert len(c.layers) == 1 and c.layers[0].positions == 2
    assert c.num_mults == 2 * 32 and c.num_params == 32


def test_tied_weights_are_parameters_once():
    model = converted.converted_llama()
    c = cost(model, TOKENS)
    assert c.num_params == sum(p.numel() for p in model.parameters())


def test_without_inputs_every_layer_counts_one_position_and_the_table_says_so():
    c = cost(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2)))
    assert c.num_mults == 24 + 12 and c.batch_size is None
    assert "no example inputs" in str(c) and "attention not counted" in str(c)


def test_inputs_may_be_keywords_and_the_batch_size_may_be_given():
    model = converted.bert()
    assert cost(model, input_ids=TOKENS) == cost(model, TOKENS)
    sequence_first = nn.TransformerEncoderLayer(32, 2, 64)
    assert cost(sequence_first, VECTORS.mT.permute(2, 0, 1).contiguous(), batch_size=2).num_mults == (
        cost(converted.encoder().layers[0], VECTORS).num_mults
    )


@pytest.mark.parametrize(("batch", "call"), [({"input_ids": TOKENS}, "**batch"), ((TOKENS,), "*batch")])
def test_a_batch_that_was_not_unpacked_is_told_how(batch, call):
    with pytest.raises(Exception) as caught:
        cost(converted.bert(), batch)
    assert f"gblr.cost(model, {call})" in "".join(caught.value.__notes__)


def test_counting_leaves_the_model_and_the_random_numbers_as_they_were():
    class Noisy(nn.Module):
        def forward(self, x):
            return x + torch.randn_like(x)

    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), Noisy()).train()
    model[1].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    cost(model, torch.ones(2, 4))
    assert torch.equal(torch.rand(3), expected)
    assert [module.training for module in model.modules()] == [True, True, False, True, True]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_model_that_fails_is_left_without_hooks_and_in_its_mode():
    model = nn.Sequential(nn.Linear(4, 4)).train()
    with pytest.raises(RuntimeError):
        cost(model, torch.ones(2, 5))
    assert model.training and not model[0]._forward_hooks and torch.backends.mha.get_fastpath_enabled()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("encoder.layer.3.attention.self.query", "q"),
        ("encoder.layer.3.attention.output.dense", "o"),
        ("encoder.layer.3.intermediate.dense", "fc1"),
        ("encoder.layer.3.output.dense", "fc2"),
        ("pooler.dense", "other"),
        ("vit.layers.0.attention.v_proj", "v"),
        ("transformer.h.0.attn.c_attn", "qkv"),
        ("transformer.h.0.attn.c_proj", "o"),
        ("transformer.h.0.mlp.c_fc", "fc1"),
        ("transformer.h.0.mlp.c_proj", "fc2"),
        ("model.layers.0.self_attn.o_proj", "o"),
        ("model.layers.0.mlp.gate_proj", "gate"),
        ("model.layers.0.mlp.up_proj", "fc1"),
        ("model.layers.0.mlp.down_proj", "fc2"),
        ("blocks.0.attn.proj", "o"),
        ("blocks.0.mlp_tokens.fc2", "fc2"),
        ("layers.0.linear1", "fc1"),
        ("lm_head", "head"),
        ("classifier.1", "head"),
        ("something", "other"),
    ],
)
def test_types_are_read_off_names(name, expected):
    assert layer_type(name, nn.Linear(1, 1)) == expected


def test_parts_of_a_fused_projection_have_their_own_types():
    types = [layer.type for layer in cost(converted.converted_gpt2(), TOKENS).layers]
    assert types == ["q", "k", "v", "o", "fc1", "fc2"] * 2 + ["head"]
    assert layer_type("h.0.attn.c_attn", Conv1D(6, 2)) == "qkv"
    assert layer_type("stem", nn.Conv2d(1, 1, 1)) == "conv"


def test_types_show_smallest_largest_and_mean_product():
    model = nn.ModuleDict({str(rank): nn.Module() for rank in (1, 2, 6)})
    for rank, block in model.items():
        block.fc1 = StructuredLinear(low_rank(8, 8, int(rank)))
    group = cost(model).by_type()["fc1"]
    assert (group.min_product, group.max_product, group.mean_product, group.dense_product) == (16, 96, 48, 64)


def test_the_table_has_no_colour_and_says_what_is_counted():
    text = str(cost(converted.converted_bert(), TOKENS))
    assert "\x1b" not in text and max(map(len, text.splitlines())) <= 120
    for word in ("converted layers", "whole model", "attention products", "PackedGBLR", "GaudiLinear", "fc2"):
        assert word in text


def test_the_dict_is_plain_json_with_all_totals():
    c = cost(converted.converted_bert(), TOKENS)
    plain = json.loads(json.dumps(c.to_dict()))
    assert plain["whole_model"]["relative_cost"] == c.model_relative_cost > c.relative_cost
    assert plain["converted_layers"]["mults"] == c.converted_mults
    assert sum(layer["mults"] for layer in plain["layers"]) + c.attention_mults == c.num_mults


def test_a_structure_without_values_is_refused():
    with pytest.raises(ValueError, match=r"'0'.*meta"):
        cost(nn.Sequential(GaudiLinear(4, 4, device="meta")))

import pytest
import torch
from torch import nn
from transformers import BartConfig, BartModel, OPTConfig, OPTModel, XLNetConfig, XLNetModel

from gblr.conversion.calls import padding_of
from gblr.conversion.convert import convert_
from gblr.conversion.filters import conv_layers
from gblr.conversion.sources import read_source
from gblr.conversion.statistics import collect
from gblr.fitting.config import GaudiConfig, LowRankConfig
from tests.conversion.converted import TOKENS, bert
from tests.conversion.low_rank_models import modules_of, random_mlp
from tests.helpers import raises_value_error


def inputs(generator: torch.Generator, batches: int = 3) -> list[torch.Tensor]:
    """Inputs in a narrow cone: what a real layer sees."""
    mixing = torch.randn(16, 16, generator=torch.Generator().manual_seed(7)) * torch.logspace(0, -1.5, 16)[:, None]
    return [torch.randn(40, 16, generator=generator) @ mixing for _ in range(batches)]


def sources_of(model: nn.Module, *names: str):
    return [read_source(model, name, model.get_submodule(name), True) for name in names]


def num_hooks(model: nn.Module) -> int:
    return sum(len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules())


def test_padded_batches_of_torch_transformers_reach_every_layer():
    """In eval mode `nn.TransformerEncoder` would hand them on as nested tensors, of which no sums can be made."""
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 1)
    padding = torch.tensor([[False] * 4, [False, False, True, True]])
    batch = {"src": torch.linspace(-1, 1, 128).view(2, 4, 16), "src_key_padding_mask": padding}
    found = collect(model, sources_of(model, "layers.0.linear1", "layers.0.linear2"), [batch])
    assert {statistics.positions for statistics in found.values()} == {8}


def test_grams_and_positions_are_those_of_the_layer_inputs(generator):
    model, batches = random_mlp(), inputs(generator)
    found = collect(model, sources_of(model, "0", "2"), batches)
    x = torch.cat(batches)
    torch.testing.assert_close(found["0"].gram, (x.T @ x).double(), rtol=1e-4, atol=1e-4)
    hidden = model[:2](x).detach()
    torch.testing.assert_close(found["2"].gram, (hidden.T @ hidden).double(), rtol=1e-4, atol=1e-4)
    assert found["0"].positions == found["2"].positions == 120
    assert found["0"].gram.dtype == torch.float64


def test_convolutions_are_seen_as_patches(generator):
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, stride=2))
    x = torch.randn(2, 3, 8, 8, generator=generator)
    found = collect(model, sources_of(model, "0"), [x])["0"]
    patches = nn.functional.unfold(x, 3, padding=1, stride=2).mT.reshape(-1, 27)
    torch.testing.assert_close(found.gram, (patches.T @ patches).double(), rtol=1e-4, atol=1e-4)
    assert found.positions == 2 * 16


def test_padded_positions_are_left_out():
    model, mask = bert(), torch.ones_like(TOKENS)
    mask[1, 3:] = 0
    name = "encoder.layer.0.attention.self.query"
    full = collect(model, sources_of(model, name), [{"input_ids": TOKENS, "attention_mask": mask}])[name]
    assert full.positions == 7 + 3
    other = TOKENS.clone()
    other[1, 3:] = 49  # what stands under the padding is of no concern
    again = collect(model, sources_of(model, name), [{"input_ids": other, "attention_mask": mask}])[name]
    torch.testing.assert_close(full.gram, again.gram)
    assert collect(model, sources_of(model, name), [{"input_ids": TOKENS}])[name].positions == 14


def bart() -> nn.Module:
    config = BartConfig(
        d_model=8, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=8, decoder_ffn_dim=8, vocab_size=50, max_position_embeddings=16,
    )  # fmt: skip
    return BartModel(config).eval()


def mask_of(samples: int, length: int, padded: int) -> torch.Tensor:
    return (torch.arange(length) < length - padded).long().expand(samples, -1)


@pytest.mark.parametrize("given", ["decoder_input_ids", "decoder_inputs_embeds", "nothing"])
def test_the_mask_of_an_encoder_says_nothing_of_the_decoder(given):
    """Lengths are equal, so that shapes do not tell; without inputs of its own BART's decoder is given the encoder's.
    Cross-attention has keys and values of the encoder's states, and queries of the decoder's.
    """
    model, tokens = bart(), torch.arange(16).view(2, 8)
    batch = {"input_ids": tokens, "attention_mask": mask_of(2, 8, padded=4)}
    own = {"decoder_input_ids": tokens, "decoder_inputs_embeds": torch.ones(2, 8, 8)}
    batch |= {name: value for name, value in own.items() if name == given}
    cross = [f"decoder.layers.0.encoder_attn.{name}" for name in ("k_proj", "v_proj", "q_proj", "out_proj")]
    names = ("encoder.layers.0.fc1", *cross, "decoder.layers.0.self_attn.k_proj", "decoder.layers.0.fc2")
    found = collect(model, sources_of(model, *names), [batch])
    assert [found[name].positions for name in names] == [8, 8, 8, 16, 16, 16, 16]
    batch["decoder_attention_mask"] = mask_of(2, 8, padded=1)
    found = collect(model, sources_of(model, *names), [batch])
    assert [found[name].positions for name in names] == [8, 8, 8, 14, 14, 14, 14]


def test_where_the_layer_is_not_known_an_unclear_mask_is_left_out():
    batch = {"attention_mask": mask_of(2, 8, padded=4), "decoder_input_ids": torch.ones(2, 8)}
    assert padding_of(batch) is None
    assert padding_of(batch, "something.fc1") is None and padding_of(batch, "decoder.cross_attn.other") is None
    assert padding_of(batch | {"decoder_input_ids": torch.ones(2, 7)}) is not None  # lengths tell them apart
    assert padding_of({"attention_mask": mask_of(2, 8, 4), "labels": torch.ones(2, 8)}, "decoder.fc1") is not None


def test_padding_is_left_out_where_a_model_flattens_its_positions():
    sizes = {"hidden_size": 8, "word_embed_proj_dim": 8, "ffn_dim": 8, "num_attention_heads": 2}
    model = OPTModel(OPTConfig(num_hidden_layers=1, vocab_size=50, max_position_embeddings=16, **sizes)).eval()
    mask = mask_of(2, 7, padded=3)
    names = ("decoder.layers.0.fc1", "decoder.layers.0.fc2", "decoder.layers.0.self_attn.q_proj")
    grams = []
    for under in (0, 9):
        tokens = torch.where(mask.bool(), TOKENS, under)
        grams.append(collect(model, sources_of(model, *names), [{"input_ids": tokens, "attention_mask": mask}]))
    for name in names:
        assert grams[0][name].positions == 8
        torch.testing.assert_close(grams[0][name].gram, grams[1][name].gram)


def test_padding_is_left_out_where_positions_come_first_and_never_by_a_wrong_mask():
    model = XLNetModel(XLNetConfig(d_model=8, n_layer=1, n_head=2, d_inner=8, vocab_size=50)).eval()
    name = "layer.0.ff.layer_1"
    for samples, length, positions in ((2, 7, 8), (7, 7, 49)):  # a square mask fits either way: none
        tokens = torch.ones(samples, length, dtype=torch.long)
        batch = {"input_ids": tokens, "attention_mask": mask_of(samples, length, padded=3)}
        assert collect(model, sources_of(model, name), [batch])[name].positions == positions
    square = {"input_ids": TOKENS.expand(7, 2, 7)[:, 0], "attention_mask": mask_of(7, 7, padded=3)}
    query = "encoder.layer.0.attention.self.query"
    model = bert()
    assert collect(model, sources_of(model, query), [square])[query].positions == 28


@pytest.mark.parametrize("kind", ["tensor", "tuple", "dict"])
def test_a_batch_is_what_the_model_is_called_with(kind, generator):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(16, 16)

        def forward(self, x, y=None):
            return self.fc(input=x)

    model, x = Model(), torch.randn(5, 16, generator=generator)
    batch = {"tensor": x, "tuple": (x, x), "dict": {"x": x}}[kind]
    found = collect(model, sources_of(model, "fc"), iter([batch]))
    torch.testing.assert_close(found["fc"].gram, (x.T @ x).double(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("config", [LowRankConfig(0.4), GaudiConfig(0.4, steps=3)], ids=["low_rank", "gaudi"])
def test_calibration_lowers_the_output_error_on_inputs_of_that_kind(config, generator):
    errors = []
    unseen = inputs(generator, 1)[0]
    expected = random_mlp()(unseen).detach()
    for calibration in (None, inputs(generator)):
        model = random_mlp()
        report = convert_(model, config, calibration=calibration)
        errors.append(float((model(unseen) - expected).norm().detach()))
        assert ("calibration" in str(report)) == (calibration is not None)
    assert errors[1] < 0.7 * errors[0]


def test_the_reported_error_is_that_of_the_outputs(generator):
    model, batches = random_mlp(), inputs(generator)
    dense = model[0]
    row = convert_(model, LowRankConfig(0.4), calibration=batches).rows[0]
    x = torch.cat(batches)
    with torch.no_grad():
        error = (x @ (model[0].weight - dense.weight).T).norm() / (x @ dense.weight.T).norm()
    assert row.error == pytest.approx(float(error), rel=0.5) and row.error > float(error)  # damping adds a little


def test_hooks_go_and_every_module_keeps_its_mode(generator):
    model = random_mlp().train()
    model[1].eval()  # one part frozen
    before = [module.training for module in model.modules()]
    collect(model, sources_of(model, "0"), inputs(generator))
    assert num_hooks(model) == 0
    assert [module.training for module in model.modules()] == before


def test_calibration_runs_in_eval_mode_without_gradients(generator):
    seen = []
    model = random_mlp().train()
    model[1].register_forward_hook(lambda module, args, y: seen.append((module.training, y.requires_grad)))
    collect(model, sources_of(model, "0"), inputs(generator, 1))
    assert seen == [(False, False)]


def test_an_error_in_a_batch_removes_hooks_and_changes_nothing(generator):
    model = random_mlp().train()
    before = modules_of(model)

    def batches():
        yield torch.randn(4, 16, generator=generator)
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk"):
        convert_(model, LowRankConfig(0.5), calibration=batches())
    assert num_hooks(model) == 0 and modules_of(model) == before and model.training


def test_calibration_that_reaches_no_layer_is_an_error():
    with raises_value_error("`calibration`", "empty"):
        convert_(random_mlp(), LowRankConfig(0.5), calibration=[])
    with raises_value_error("`calibration`", "str"):
        convert_(random_mlp(), LowRankConfig(0.5), calibration=["a text"])


def test_a_layer_that_no_batch_reaches_is_fitted_plainly(generator):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x):
            return self.used(x)

    torch.manual_seed(0)
    model = Model()
    plain = LowRankConfig(0.5)
    report = convert_(model, plain, calibration=inputs(generator))
    assert list(report) == ["used", "unused"]
    assert all(row.error is not None and row.error < 1 for row in report.rows)


def test_calibrated_convolutions(generator):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3))
    smooth = nn.functional.interpolate(torch.randn(4, 3, 3, 3, generator=generator), size=(9, 9), mode="bilinear")
    expected = model(smooth).detach()
    errors = []
    for calibration in (None, [smooth]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3))
        convert_(model, LowRankConfig(0.5), where=conv_layers(), calibration=calibration)
        errors.append(float((model(smooth) - expected).norm().detach()))
    assert errors[1] < 0.7 * errors[0]


def test_inputs_that_are_no_numbers_are_told_with_the_layer():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(ValueError, match="inputs of '0' are NaN or infinite"):
        convert_(model, LowRankConfig(0.9), calibration=[torch.ones(2, 4), torch.full((2, 4), torch.nan)])


def test_inputs_whose_squares_overflow_are_told_as_that():
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(ValueError, match=r"inputs of '0' are .* or so large that their squares are"):
        convert_(model, LowRankConfig(0.9), calibration=[torch.full((2, 4), 1e20)])

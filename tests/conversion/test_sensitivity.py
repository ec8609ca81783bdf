import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gblr
from gblr.conversion.choosing import choose
from gblr.conversion.sensitivity import collect_sensitivity, probe, row_factors
from tests.conversion import converted
from tests.helpers import raises_value_error


def measured(model: nn.Module, batches: list, where=None) -> dict[str, torch.Tensor]:
    sources, _ = choose(model, where or gblr.linear_layers(), split_fused=True)
    return collect_sensitivity(model, sources, batches)


def half_used() -> nn.Module:
    """The second layer reads only the first 8 outputs of the first."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(inplace=True), nn.Linear(16, 12), nn.Linear(12, 12))
    with torch.no_grad():
        model[2].weight[:, 8:] = 0
    return model


def test_it_is_the_expected_square_of_the_gradients(generator):
    """Of a linear chain: row sums of squares of what follows, as signs are random. In-place layers do not disturb."""
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4), nn.ReLU(inplace=True))
    with torch.no_grad():
        model[1].bias.fill_(1e4)  # the ReLU lets all through
    found = measured(model, [torch.randn(500, 6, generator=generator) for _ in range(20)])
    expected = model[1].weight.detach().square().sum(0)
    torch.testing.assert_close(found["0"].float(), expected, rtol=0.1, atol=1e-4)
    torch.testing.assert_close(found["1"].float(), torch.ones(4))


class Twice(nn.Module):
    """y = 3 A A x."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 3 * self.layer(self.layer(x))


def test_every_call_of_a_layer_counts(generator):
    model = Twice()
    found = measured(model, [torch.randn(500, 5, generator=generator) for _ in range(20)])["layer"].float()
    last, first = torch.full((5,), 9.0), 9 * model.layer.weight.detach().square().sum(0)
    torch.testing.assert_close(found, (last + first) / 2, rtol=0.1, atol=1e-4)


def test_what_is_checkpointed_is_measured_as_anything_else(generator):
    """Its layers run once more while gradients come back."""

    class Model(nn.Module):
        def __init__(self, checkpointed: bool):
            super().__init__()
            self.a, self.b, self.checkpointed = nn.Linear(8, 12), nn.Linear(12, 8), checkpointed

        def body(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.b(self.a(x).tanh())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.body, x, use_reentrant=False) if self.checkpointed else self.body(x)

    models, x = (Model(True), Model(False)), torch.randn(9, 8, generator=generator)
    models[1].load_state_dict(models[0].state_dict())
    found, plain = (measured(model, [x]) for model in models)
    for name in ("a", "b"):
        torch.testing.assert_close(found[name], plain[name])


def test_labels_are_drawn_from_the_predictions(generator):
    scores = torch.tensor([0.5, 0.3, 0.2]).log().expand(20_000, 3).clone().requires_grad_()
    probe(SimpleNamespace(logits=scores), None, generator).backward()
    drawn = (scores.grad < 0).float().mean(0)  # softmax minus one-hot
    torch.testing.assert_close(drawn, torch.tensor([0.5, 0.3, 0.2]), rtol=0, atol=0.02)


@pytest.mark.parametrize("scores", [torch.ones(4, 1), torch.ones(4, 6)], ids=["regression", "one for each position"])
def test_a_score_that_is_no_choice_among_classes_has_gradients_too(scores, generator):
    """The only class would be certain, and nothing would matter to it."""
    scores.requires_grad_()
    mask = torch.ones(scores.shape, dtype=torch.bool)
    probe(SimpleNamespace(logits=scores), mask, generator).backward()
    assert bool((scores.grad.abs() == 1).all())


def test_padding_counts_nowhere(generator):
    model = converted.bert()
    tokens = torch.randint(1, 50, (3, 8), generator=generator)
    mask = torch.ones_like(tokens)
    mask[:, 5:] = 0
    changed = torch.where(mask.bool(), tokens, 7)
    batches = [[{"input_ids": ids, "attention_mask": mask}] for ids in (tokens, changed)]
    one, other = (measured(model, batch, gblr.linear_layers(exclude=("pooler",))) for batch in batches)
    for name in one:
        torch.testing.assert_close(one[name], other[name])


class Scaled(nn.Module):
    """Output i of the layer times i: the expected squares are i^2, whatever the inputs."""

    def __init__(self, layer: nn.Module, channels_last: bool) -> None:
        super().__init__()
        self.layer = layer
        self.factors = torch.arange(8.0).view(-1, *[1] * (0 if channels_last else 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.factors * self.layer(x)


@pytest.mark.parametrize("shape", [(8,), (5, 8), (2, 8, 5, 8), (2, 8, 8, 8, 8)])
def test_inputs_of_linear_layers_may_have_any_number_of_axes(shape):
    found = measured(Scaled(nn.Linear(8, 8), channels_last=True), [torch.ones(shape)])["layer"]
    torch.testing.assert_close(found, torch.arange(8.0).square().double())


@pytest.mark.parametrize("shape", [(3, 9, 8), (2, 3, 9, 8)])
def test_convolutions_may_have_no_batch(shape):
    model = Scaled(nn.Conv2d(3, 8, 3), channels_last=False)
    found = measured(model, [torch.ones(shape)], gblr.conv_layers())["layer"]
    torch.testing.assert_close(found, torch.arange(8.0).square().double())


def test_a_decoder_counts_where_the_encoder_is_padded():
    class EncoderDecoder(nn.Module):
        """What the later half of the positions says counts three times."""

        def __init__(self) -> None:
            super().__init__()
            self.decoder = nn.ModuleDict({"fc": nn.Linear(4, 4)})

        def forward(self, decoder_inputs_embeds: torch.Tensor, **masks: torch.Tensor) -> torch.Tensor:
            return torch.tensor([1.0, 3.0]).repeat_interleave(3)[:, None] * self.decoder["fc"](decoder_inputs_embeds)

    batch = {"decoder_inputs_embeds": torch.ones(2, 6, 4), "attention_mask": torch.tensor([[1, 1, 1, 0, 0, 0]] * 2)}
    found = measured(EncoderDecoder(), [batch])["decoder.fc"]
    torch.testing.assert_close(found, torch.full((4,), 5.0, dtype=torch.float64))
    batch["decoder_attention_mask"] = batch["attention_mask"]
    torch.testing.assert_close(measured(EncoderDecoder(), [batch])["decoder.fc"], torch.ones(4, dtype=torch.float64))


@pytest.mark.parametrize("make", [converted.gpt2, converted.llama, converted.vit, converted.resnet])
def test_every_kind_of_model_has_one_number_for_each_output(make):
    model = make().train()
    where = gblr.conv_layers() if make is converted.resnet else gblr.linear_layers()
    batch = converted.IMAGES if make in (converted.vit, converted.resnet) else {"input_ids": torch.arange(12)[None] % 7}
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    found = measured(model, [batch], where)
    assert torch.equal(state, torch.get_rng_state())
    sources, _ = choose(model, where, True)
    assert {source.name: len(source.weight) for source in sources} == {name: len(s) for name, s in found.items()}
    assert all(bool((s >= 0).all()) and float(s.sum()) > 0 for s in found.values())
    assert all(p.grad is None and p.requires_grad for p in model.parameters()) and model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


EVERY = (gblr.GaudiConfig, gblr.LowRankConfig, gblr.MonarchConfig, gblr.PixelflyConfig, gblr.BlastConfig)


@pytest.mark.parametrize("config", EVERY)
def test_weights_of_every_format_come_near_the_dense_ones(config, generator):
    model = half_used()
    dense = model[0].weight.detach()
    batches = [torch.randn(64, 16, generator=generator) for _ in range(4)]
    gblr.convert_(model, config(1.0), where=gblr.linear_layers(include=("0",)), calibration=batches, sensitivity=True)
    found = model[0].weight.detach()
    assert float((found[:8] - dense[:8]).norm() / dense[:8].norm()) < 0.5
    assert float((found[8:] - dense[8:]).norm() / dense[8:].norm()) < 0.9


@pytest.mark.parametrize("config", [gblr.LowRankConfig(0.4), gblr.GaudiConfig(0.4)], ids=["low rank", "GBLR"])
def test_what_nobody_reads_is_given_up_first(config, generator):
    batches = [torch.randn(64, 16, generator=generator) for _ in range(4)]
    errors = {}
    for sensitivity in (False, True):
        model = half_used()
        dense = copy.deepcopy(model)
        where = gblr.linear_layers(include=("0",))
        report = gblr.convert_(model, config, where=where, calibration=batches, sensitivity=sensitivity)
        errors[sensitivity] = float((model(batches[0]) - dense(batches[0])).detach().norm())
        assert ("sensitivity" in str(report)) == sensitivity
    assert errors[True] < 0.8 * errors[False]


def test_global_budgets_follow_it(generator):
    """Of two layers whose outputs are added, that counts for more which is not scaled down."""

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleDict({"a": nn.Linear(24, 24), "b": nn.Linear(24, 24)})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.parts["a"](x) + 0.01 * self.parts["b"](x)

    torch.manual_seed(0)
    whole = Sum()
    batches = [torch.randn(64, 24, generator=generator)]
    gblr.convert_(whole, gblr.LowRankConfig(0.5, allocation="global"), calibration=batches, sensitivity=True)
    assert whole.parts["a"].matrix.rank > 2 * whole.parts["b"].matrix.rank


@pytest.mark.parametrize("structure", ["frozen", "free"])
def test_a_refit_weighs_outputs_alike(structure, generator):
    batches = [torch.randn(64, 16, generator=generator) for _ in range(4)]
    errors = {}
    for sensitivity in (False, True):
        teacher = half_used()
        model = copy.deepcopy(teacher)
        gblr.convert_(model, gblr.GaudiConfig(0.3), where=gblr.linear_layers(include=("0",)))
        result = gblr.heal_(model, teacher, batches, structure=structure, sensitivity=sensitivity)
        assert all(row.error <= row.error_before + 1e-6 for row in result.layers)
        errors[sensitivity] = float((model(batches[0]) - teacher(batches[0])).detach().norm())
    assert errors[True] < errors[False]


def test_rows_that_are_never_asked_for_keep_a_little():
    factors = row_factors(torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64))
    assert 0.2 < float(factors[0]) < float(factors[1]) < float(factors[2])
    assert torch.isfinite(row_factors(torch.zeros(3, dtype=torch.float64))).all()


def test_a_model_without_gradients_is_told_and_left_alone():
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        @torch.no_grad()
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x).detach()

    model = Frozen()
    with raises_value_error("without `sensitivity`"):
        gblr.convert_(model, gblr.LowRankConfig(0.5), calibration=[torch.randn(4, 8)], sensitivity=True)
    assert type(model.layer) is nn.Linear and model.layer.weight.requires_grad


def test_it_needs_calibration():
    model = nn.Sequential(nn.Linear(8, 8))
    with raises_value_error("calibration"):
        gblr.convert_(model, gblr.LowRankConfig(0.5), sensitivity=True)
    assert type(model[0]) is nn.Linear


def test_gradients_that_overflow_are_told_with_the_layer():
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(3))).half()
    for layer in model:
        nn.init.constant_(layer.weight, 300.0)
    with raises_value_error("'0'", "float16", "bfloat16"):
        calibration = [torch.full((2, 8), 1e-7).half()]
        gblr.convert_(model, gblr.LowRankConfig(0.5), calibration=calibration, sensitivity=True)
    assert type(model[0]) is nn.Linear

"""Refits of layers that are called several times, stand in several places, or are frozen."""

import copy
import math
import weakref

import pytest
import torch
from torch import nn
from transformers import BartConfig, BartModel

import gblr
from gblr.conversion import refit, refit_parts
from gblr.conversion.block_runs import BlockRuns
from gblr.conversion.goals import Halves
from gblr.conversion.refit import refit_layers_
from gblr.conversion.refit_runs import collect_pairs, repeated_layers
from tests.helpers import raises_value_error


class Twice(nn.Module):
    """Its layer feeds itself, with inputs of another kind at the second call."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x):
        return self.layer(self.layer(x).relu_() * 10 + 3)


def batches(width: int = 32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(64, width, generator=generator) for _ in range(2)]


def distance(model: nn.Module, teacher: nn.Module) -> float:
    with torch.no_grad():
        pairs = [(model(x), teacher(x)) for x in batches()]
    return sum(float((a - b).square().sum() / b.square().sum()) for a, b in pairs)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("config", [gblr.LowRankConfig(0.5), gblr.GaudiConfig(0.5)], ids=["low_rank", "gaudi"])
def test_a_layer_that_is_called_twice_is_fitted_to_both_calls(config, seed):
    torch.manual_seed(seed)
    teacher = Twice().eval()
    model = copy.deepcopy(teacher)
    gblr.convert_(model, config, calibration=batches())
    before = distance(model, teacher)
    (row,) = refit_layers_(model, teacher, batches())
    assert distance(model, teacher) <= before * 1.001 and row.error <= row.error_before


def test_all_calls_count():
    """The second sees what the first does not: columns that were zero before."""

    class Halved(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(32, 8)

        def forward(self, x):
            return self.layer(x * mask) + self.layer(x * (1 - mask))

    mask = (torch.arange(32) < 16).float()
    torch.manual_seed(0)
    teacher = Halved().eval()
    model = copy.deepcopy(teacher)
    gblr.convert_(model, gblr.LowRankConfig(0.5), calibration=batches())
    with torch.no_grad():
        model.layer.u.mul_(0.5)
    refit_layers_(model, teacher, batches())
    first, second = (model.layer.weight - teacher.layer.weight).detach().square().sum(0).view(2, 16).sum(1)
    assert 0.7 < first / second < 1.4  # 0.5 where the second call is not looked at


class Shared(nn.Module):
    """One layer in two blocks of a chain of three."""

    def __init__(self, tied: bool = True):
        super().__init__()
        first, second = nn.Linear(16, 16), nn.Linear(16, 16)
        layers = first, first if tied else second, nn.Linear(16, 16)
        self.layers = nn.ModuleList(nn.Sequential(layer, nn.Tanh()) for layer in layers)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def test_sums_of_one_layer_are_given_up_before_those_of_the_next_are_made(monkeypatch):
    """They take several times the memory of the weight."""
    made, alive = weakref.WeakSet(), []

    def collect(*args):
        alive.append(len(made))
        found = collect_pairs(*args)
        made.update(found.values())
        return found

    monkeypatch.setattr(Halves, "__hash__", object.__hash__)
    monkeypatch.setattr(refit, "collect_pairs", collect)
    teacher = nn.Sequential(Twice(), nn.Linear(32, 32), Twice()).eval()
    model = copy.deepcopy(teacher)
    gblr.convert_(model, gblr.LowRankConfig(0.5), gblr.linear_layers(include=("layer", "1")))
    refit_layers_(model, teacher, batches())
    assert alive == [0] * 5  # layers that are called twice are looked at before and after


def test_a_layer_in_two_places_stays_one_and_is_fitted_to_both():
    torch.manual_seed(0)
    teacher = Shared().eval()
    model = copy.deepcopy(teacher)
    small = nn.Sequential(model.layers[0][0])
    gblr.convert_(small, gblr.LowRankConfig(0.5))
    gblr.convert_(model, gblr.LowRankConfig(0.5), gblr.linear_layers(include=("layers.2.0",)))
    model.layers[0][0] = model.layers[1][0] = small[0]
    names = ["layers.0.0", "layers.2.0"]
    runs = BlockRuns(model, batches(16), names), BlockRuns(teacher, batches(16), names)
    with torch.no_grad():
        seen = collect_pairs(*runs, names[:1], repeated_layers(model, teacher, names, batches(16)[0]))
    assert len(runs[0].blocks) == 3 and seen[names[0]].whole().count == 2 * 2 * 64  # calls, batches, rows
    refit_layers_(model, teacher, batches(16))
    assert model.layers[0][0] is model.layers[1][0] is not small[0]


def test_a_teacher_that_calls_a_layer_more_often_is_refused():
    teacher, model = Shared(), Shared(tied=False)
    gblr.convert_(model, gblr.LowRankConfig(0.5))
    with raises_value_error("layers.0.0", "called 1 times in the model and 2 in its teacher"):
        refit_layers_(model, teacher, batches(16))


def test_images_may_come_without_a_batch_axis():
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
    image, errors = torch.randn(3, 10, 9), []
    for batch in (image, image[None]):
        model = copy.deepcopy(teacher)
        gblr.convert_(model, gblr.LowRankConfig(0.5), gblr.conv_layers())
        errors.append([row.error for row in refit_layers_(model, teacher, [batch])])
    assert errors[0] == pytest.approx(errors[1], rel=1e-4) and max(errors[0]) < 0.9


def converted() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    model = copy.deepcopy(teacher)
    gblr.convert_(model, gblr.GaudiConfig(0.5, steps=2))
    return model, teacher


def test_what_is_frozen_stays_so_and_the_mode_stays():
    model, teacher = converted()
    for parameter in model[0].structure_parameters():
        parameter.requires_grad_(False)
    model[2].requires_grad_(False).bias.requires_grad_()
    model.train()
    model[2].eval()
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    old = model[0]
    gblr.heal_(model, teacher, batches(16))
    assert model[0] is not old and {name for name, p in model.named_parameters() if not p.requires_grad} == frozen
    assert [model[i].training for i in (0, 2)] == [True, False]


def test_a_form_that_was_chosen_stays():
    model, teacher = converted()
    gblr.harden_(model, plan="factors")
    old = model[0]
    gblr.heal_(model, teacher, batches(16))
    assert model[0] is not old and (model[0].planned, model[0].form) == ("factors", "factors")


def test_an_encoders_padding_says_nothing_of_its_decoder():
    """Without inputs of its own BART's decoder is given the encoder's, shifted: lengths are equal."""
    sizes = {f"{part}_{key}": n for part in ("encoder", "decoder") for key, n in (("layers", 1), ("ffn_dim", 8))}
    sizes |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "d_model": 8, "vocab_size": 50}
    model = BartModel(BartConfig(**sizes)).eval()
    mask = (torch.arange(8) < 4).long().expand(2, -1)
    batch = [{"input_ids": torch.arange(16).view(2, 8), "attention_mask": mask}]
    for name, count in (("encoder.layers.0.fc1", 8), ("decoder.layers.0.fc1", 16)):
        runs = [BlockRuns(each, batch, [name]) for each in (model, copy.deepcopy(model))]
        assert collect_pairs(*runs, [name], set())[name].whole().count == count


@pytest.mark.parametrize("sensitivity", [False, True])
@pytest.mark.parametrize(
    "config", [gblr.LowRankConfig(0.9), gblr.GaudiConfig(0.5), gblr.GaudiConfig(0.9, block_rank=4)]
)
def test_models_in_float64_are_refitted_in_float64(config, sensitivity, monkeypatch):
    """No goal, Gram matrix or block passes through float32."""
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)).double()
    model, batches = copy.deepcopy(teacher), [torch.randn(64, 16, dtype=torch.float64)]
    gblr.convert_(model, config, gblr.linear_layers(include=("0", "2")), batches)
    dtypes = set()

    def seen(function):
        def call(*args, **kwargs):
            dtypes.update(a.dtype for a in args if isinstance(a, torch.Tensor) and a.dim() > 1)  # no budgets
            return function(*args, **kwargs)

        return call

    for name in ("fit_batch", "refit_batch", "squared_error"):
        monkeypatch.setattr(refit_parts, name, seen(getattr(refit_parts, name)))
    refit_layers_(model, teacher, batches, "free", sensitivity=sensitivity)
    assert dtypes == {torch.float64}
    assert {p.dtype for p in model.parameters()} <= {torch.float64, torch.float32}  # structure is kept in float32


class InPlace(nn.Module):
    """What q gives, and what it was given, is changed before k runs on the same tensor: in place, or not."""

    def __init__(self, in_place: str):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.in_place = nn.Linear(16, 16), nn.Linear(16, 16), in_place

    def forward(self, x):
        x = x + 0
        q = self.q(x)
        q = q.mul_(0.1) if self.in_place == "output" else q * 0.1
        k = self.k(x.mul_(3) if self.in_place == "input" else x)
        return q + k


@pytest.mark.parametrize("in_place", ["output", "input"])
def test_what_a_layer_gave_and_was_given_may_be_changed_before_the_next_with_that_input_runs(in_place):
    errors = []
    for way in (in_place, "nothing"):
        teacher = InPlace(way)
        model = copy.deepcopy(teacher)
        gblr.convert_(model, gblr.LowRankConfig(0.5), calibration=batches(16))
        errors.append({row.layer: (row.error_before, row.error) for row in refit_layers_(model, teacher, batches(16))})
    assert errors[0]["q"] == pytest.approx(errors[1]["q"], rel=1e-4)


@pytest.mark.parametrize("size", [1e-25, 1e25])
@pytest.mark.parametrize(
    "config", [gblr.GaudiConfig(0.4, steps=1), gblr.BlastConfig(0.4, steps=5), gblr.MonarchConfig(0.4, steps=2)]
)
def test_weights_whose_squares_float32_does_not_hold_are_refitted_as_others_are(config, size):
    power = 2.0 ** round(math.log2(size))
    errors = []
    for factor in (1.0, power):
        torch.manual_seed(0)
        teacher = nn.Sequential(nn.Linear(16, 16, bias=False))
        teacher[0].weight.data *= factor
        model = copy.deepcopy(teacher)
        gblr.convert_(model, config, gblr.linear_layers(include=("0",)), batches(16))
        (row,) = refit_layers_(model, teacher, batches(16), "free")
        errors.append((row.error_before, row.error))
    assert errors[0][1] < errors[0][0] and errors[1] == pytest.approx(errors[0], rel=1e-3)


class Mixture(nn.Module):
    """x + one of four experts, as `choice` says: other tokens come to an expert when inputs change."""

    def __init__(self):
        super().__init__()
        self.choice = nn.Linear(16, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(4)
        )  # fmt: skip

    def forward(self, x):
        chosen, y = self.choice(x).argmax(-1), x.clone()
        for number, expert in enumerate(self.experts):
            if bool((mine := chosen == number).any()):
                y[mine] += expert(x[mine])
        return y


def test_experts_that_are_given_other_tokens_than_in_the_teacher_are_refitted(generator):
    torch.manual_seed(0)
    teacher = nn.Sequential(*(Mixture() for _ in range(3))).eval()
    mixing = torch.randn(6, 16, generator=generator)
    given = [torch.randn(300, 6, generator=generator) @ mixing for _ in range(6)]
    model = copy.deepcopy(teacher)
    gblr.convert_(model, gblr.LowRankConfig(0.4), gblr.linear_layers(include=("experts",)), calibration=given[:4])
    with torch.no_grad():
        before = sum(float((model(x) - teacher(x)).square().sum()) for x in given[4:])
        done = refit_layers_(model, teacher, given[:4])
        after = sum(float((model(x) - teacher(x)).square().sum()) for x in given[4:])
    assert len(done) == 24 and all(row.error <= row.error_before for row in done) and after < before


def test_of_an_expert_that_a_batch_does_not_reach_it_is_said_what_to_do():
    torch.manual_seed(0)
    teacher = Mixture()
    model = copy.deepcopy(teacher)
    gblr.convert_(model, gblr.LowRankConfig(0.4), gblr.linear_layers(include=("experts",)))
    with raises_value_error("not every layer runs on every batch", "Larger batches"):
        refit_layers_(model, teacher, [torch.randn(100, 16), torch.randn(1, 16)])

"""Recovery from the dense original: layer by layer, then as a whole; the cost stays."""

import copy
import json
import math
import os
from pathlib import Path

import pytest
import torch
from torch import nn

import gblr
from gblr.conversion import refit_parts
from gblr.conversion.refit import refit_layers_, structured_layers
from gblr.conversion.tensor_files import CheckpointError
from gblr.training import heal
from gblr.training.distillation import distillation_loss
from gblr.training.loop import TrainResult
from tests.conversion import converted
from tests.helpers import raises_value_error

CONFIGS = {
    "gaudi": gblr.GaudiConfig(0.4, steps=4),
    "gaudi rank 4": gblr.GaudiConfig(0.5, block_rank=4, steps=4),
    "low rank": gblr.LowRankConfig(0.4),
    "monarch": gblr.MonarchConfig(0.6),
    "pixelfly": gblr.PixelflyConfig(0.6, tile=8),
    "blast": gblr.BlastConfig(0.5, num_tiles=2, steps=15),
}


def tokens(number: int = 6) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{"input_ids": torch.randint(0, 50, (4, 12), generator=generator)} for _ in range(number)]


def sharpened(model: nn.Module) -> nn.Module:
    """Weights with a spectrum that falls, as trained ones have: random ones have nothing to keep."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            u, s, v = torch.linalg.svd(module.weight.detach(), full_matrices=False)
            module.weight.data = u @ torch.diag(s * torch.linspace(1, 0.05, len(s)) ** 2) @ v * 3
    return model


def distance(model: nn.Module, teacher: nn.Module, batches) -> float:
    with torch.no_grad():
        return sum(float(distillation_loss(teacher)(model, batch)) for batch in batches) / len(batches)


def mults(model: nn.Module) -> dict[str, int]:
    return {name: layer.num_mults if hasattr(layer, "num_mults") else layer.matrix.num_mults
            for name, layer in structured_layers(model).items()}  # fmt: skip


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_layers_refitted_in_order_bring_the_outputs_nearer(config):
    teacher, batches = sharpened(converted.bert()), tokens()
    model = copy.deepcopy(teacher)
    gblr.convert_(model, config, where=gblr.linear_layers(exclude=("pooler",)), calibration=batches)
    before, spent = distance(model, teacher, batches), mults(model)
    result = gblr.heal_(model, teacher, batches)
    assert distance(model, teacher, batches) < 0.98 * before
    assert result.training is None and len(result.layers) == 12
    assert all(row.error <= row.error_before + 1e-6 for row in result.layers)
    assert result.layers[0].layer.endswith("query") and result.layers[-1].layer.endswith("1.output.dense")
    assert all(found <= spent[name] for name, found in mults(model).items())


@pytest.mark.parametrize("structure", ["frozen", "free"])
def test_blocks_stay_where_they_are_unless_they_are_free(structure):
    teacher, batches = sharpened(converted.bert()), tokens()
    model = copy.deepcopy(teacher)
    gblr.convert_(model, gblr.GaudiConfig(0.4), where=gblr.linear_layers(include=("intermediate",)))

    def masks() -> list[torch.Tensor]:
        found = [layer.structure for layer in structured_layers(model).values()]
        return [gblr.boxcar_mask(s.col_width[s.live], s.col_location[s.live], 32) for s in found]

    before, spent = masks(), mults(model)
    gblr.heal_(model, teacher, batches, structure=structure)
    before_and_after = zip(before, masks(), strict=True)
    stayed = all(old.shape == new.shape and torch.equal(old, new) for old, new in before_and_after)
    assert stayed == (structure == "frozen")
    assert all(spent[name] - 2 < found <= spent[name] for name, found in mults(model).items())


def test_matrices_of_one_shape_and_input_are_refitted_together_as_if_alone(monkeypatch):
    teacher, batches = sharpened(converted.bert()), tokens()
    start = copy.deepcopy(teacher)
    gblr.convert_(start, gblr.GaudiConfig(0.4, steps=2), where=gblr.linear_layers(include=("self",)))
    sizes, fit = [], refit_parts._fit
    monkeypatch.setattr(refit_parts, "_fit", lambda parts, *how: sizes.append(len(parts)) or fit(parts, *how))
    together, alone = copy.deepcopy(start), copy.deepcopy(start)
    gblr.heal_(together, teacher, batches, structure="free")
    assert sizes == [3, 3]  # query, key and value of two layers
    monkeypatch.setattr(refit_parts, "_groups", lambda parts, structure: [[part] for part in parts])
    gblr.heal_(alone, teacher, batches, structure="free")
    for name, layer in structured_layers(together).items():
        torch.testing.assert_close(layer.weight, alone.get_submodule(name).weight, rtol=1e-3, atol=1e-4)


def test_a_layer_alone_becomes_the_best_of_its_format():
    """Inputs that differ from the dense ones by a scale: a refit undoes it."""
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Linear(16, 8))
    teacher[1].weight.data = torch.randn(8, 2) @ torch.randn(2, 16)
    model = copy.deepcopy(teacher)
    gblr.convert_(model, gblr.LowRankConfig(0.5), where=gblr.linear_layers(include=("1",)))
    model[0].weight.data *= 2
    batches = [torch.randn(64, 16) for _ in range(4)]
    (row,) = refit_layers_(model, teacher, batches)
    with torch.no_grad():
        relative = (model(batches[0]) - teacher(batches[0])).norm() / teacher(batches[0]).norm()
    assert row.error < 0.02 < row.error_before and relative < 0.02


@pytest.mark.parametrize("make", [converted.gpt2, converted.llama, converted.vit, converted.resnet])
def test_every_kind_of_model_can_be_healed(make):
    teacher = make()
    model = copy.deepcopy(teacher)
    where = gblr.conv_layers() if make is converted.resnet else gblr.linear_layers()
    gblr.convert_(model, gblr.GaudiConfig(0.5, steps=3), where=where)
    batches = [converted.IMAGES] * 2 if make in (converted.vit, converted.resnet) else tokens(3)
    before = distance(model, teacher, batches)
    gblr.heal_(model, teacher, batches)
    assert distance(model, teacher, batches) < before
    gblr.harden_(model)
    gblr.heal_(model, teacher, batches)  # packed layers too
    assert distance(model, teacher, batches) < before


@pytest.mark.parametrize("structure", ["frozen", "free"])
@pytest.mark.parametrize("match", ["logits", "hidden"])
def test_distillation_goes_on_where_the_refit_ends(structure, match):
    teacher, batches = converted.llama(), tokens(8)
    model = copy.deepcopy(teacher)
    gblr.convert_(model, gblr.GaudiConfig(0.4, steps=3), calibration=batches)
    before, spent = distance(model, teacher, batches), sum(mults(model).values())
    config = gblr.TrainConfig(epochs=8, lr=5e-3, structure_lr=1e-3, weight_decay=0.0)
    result = gblr.heal_(model, teacher, batches, layers=False, config=config, structure=structure, match=match)
    assert result.layers == [] and result.training is not None
    assert distance(model, teacher, batches) < 0.8 * before
    assert sum(mults(model).values()) <= spent
    assert all(p.requires_grad for layer in structured_layers(model).values() for p in layer.parameters())


@pytest.mark.parametrize(("given", "taken"), [({}, 1e-4), ({"structure_lr": 1e-3}, 1e-3)])
def test_free_blocks_move_at_the_rate_of_fitted_ones_unless_told(given, taken, monkeypatch):
    """At the default rate, which is for blocks that learn from scratch, they lost what refit and fit had won."""
    teacher, batches, found = converted.llama(), tokens(2), []
    model = copy.deepcopy(teacher)
    gblr.convert_(model, gblr.GaudiConfig(0.4, steps=3))

    def notes(*args: object, config: gblr.TrainConfig, **options: object) -> TrainResult:
        found.append(config)
        return TrainResult([], None, None, 0.0)

    monkeypatch.setattr(heal, "train", notes)
    gblr.heal_(model, teacher, batches, layers=False, config=gblr.TrainConfig(**given), structure="free")
    budget = gblr.Budget(relative_cost=0.4)
    own = gblr.TrainConfig(budget=budget, **given)
    gblr.heal_(model, teacher, batches, layers=False, config=own, structure="free")
    assert found[0].structure_lr == taken and found[1] == own


@pytest.mark.parametrize("scale", [math.nan, math.inf, 1e20])
def test_inputs_that_no_fit_can_use_are_told_by_the_layer_that_sees_them(scale):
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8))
    model = copy.deepcopy(teacher)
    gblr.convert_(model, gblr.LowRankConfig(0.4), gblr.linear_layers(include=("0", "2")))
    with raises_value_error("'0'", "NaN or infinite", "`batches`"):
        gblr.heal_(model, teacher, [torch.randn(8, 16), torch.randn(8, 16) * scale])


def test_free_blocks_stay_at_their_own_cost_beside_other_formats():
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8))
    model = copy.deepcopy(teacher)
    gblr.convert_(model, gblr.LowRankConfig(0.9), where=gblr.linear_layers(include=("0",)))
    gblr.convert_(model, gblr.GaudiConfig(0.2), where=gblr.linear_layers(include=("2",)))
    spent, batches = mults(model), [torch.randn(16, 32) for _ in range(8)]
    config = gblr.TrainConfig(epochs=20, lr=1e-2, structure_lr=0.02)
    gblr.heal_(model, teacher, batches, layers=False, config=config, structure="free")
    assert 0.9 * spent["2"] < mults(model)["2"] <= spent["2"]


def test_modes_of_both_models_are_as_before():
    teacher = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    model = copy.deepcopy(teacher)
    for each in (teacher, model):
        each[1].eval()
    gblr.convert_(model, gblr.GaudiConfig(0.5), where=gblr.linear_layers(include=("0",)))
    gblr.heal_(model, teacher, [torch.randn(16, 8) for _ in range(2)], config=gblr.TrainConfig(epochs=1))
    for each in (teacher, model):
        assert [module.training for module in each.modules()] == [True, True, False, True]
        assert each[1].num_batches_tracked == 0


def test_padded_positions_do_not_count():
    teacher = converted.bert()
    model = copy.deepcopy(teacher)
    gblr.convert_(model, gblr.LowRankConfig(0.4))
    ids, mask = torch.randint(0, 50, (2, 10)), torch.ones(2, 10, dtype=torch.long)
    mask[0, 6:] = 0
    batch, loss = {"input_ids": ids, "attention_mask": mask}, distillation_loss(teacher)
    with torch.no_grad():
        first = loss(model, batch)
        ids[0, 6:] = 7
        torch.testing.assert_close(loss(model, batch), first)


def test_dropout_is_off_while_the_model_learns_from_its_teacher():
    teacher = converted.bert()
    teacher.config.attention_probs_dropout_prob = teacher.config.hidden_dropout_prob = 0.5
    teacher = type(teacher)(teacher.config).eval()
    model = copy.deepcopy(teacher)
    gblr.convert_(model, gblr.LowRankConfig(0.4))
    losses = [float(distillation_loss(teacher)(model.train(), tokens(1)[0]).detach()) for _ in range(2)]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("structure", ["frozen", "free"])
def test_a_layer_that_was_given_nothing_stays_so(structure):
    teacher, batches = converted.llama(), tokens(2)
    model = copy.deepcopy(teacher)
    gblr.convert_(model, gblr.GaudiConfig(0.4, block_rank=8, steps=2), gblr.linear_layers(include=("q_proj",)))
    first, layer = next(iter(structured_layers(model).items()))
    with torch.no_grad():
        layer.width_frac.zero_()
    gblr.heal_(model, teacher, batches, structure=structure)
    found = mults(model)
    assert found[first] == 0 and all(value for name, value in found.items() if name != first)


def test_an_interrupted_refit_continues(tmp_path, monkeypatch):
    teacher, batches = sharpened(converted.bert()), tokens(2)

    def convert() -> nn.Module:
        model = copy.deepcopy(teacher)
        gblr.convert_(model, gblr.LowRankConfig(0.4))
        return model

    whole = convert()
    gblr.heal_(whole, teacher, batches)
    from gblr.conversion import refit

    done, real = [], refit._refit_set

    def stops(*args):
        if len(done) >= 5:
            raise KeyboardInterrupt
        done.extend(args[2])
        return real(*args)

    monkeypatch.setattr(refit, "_refit_set", stops)
    with pytest.raises(KeyboardInterrupt):
        gblr.heal_(convert(), teacher, batches, out=tmp_path)
    stored = [row["layer"] for row in json.loads((tmp_path / "layers.json").read_text())]
    assert stored == done[: len(stored)] and len(stored) >= 4
    monkeypatch.setattr(refit, "_refit_set", real)
    model = convert()
    result = gblr.heal_(model, teacher, batches, out=tmp_path)
    assert len({row.layer for row in result.layers}) == len(result.layers) == len(structured_layers(whole))
    x = batches[0]
    torch.testing.assert_close(model(**x)[0], whole(**x)[0], rtol=1e-4, atol=1e-4)


def test_a_folder_of_another_call_is_refused_and_changes_nothing(tmp_path):
    """What it holds would take the place of the model's layers: another cost, another format, another network."""
    torch.manual_seed(0)
    teacher, batches = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8)), [torch.randn(8, 16)] * 2
    other = copy.deepcopy(teacher)
    nn.init.normal_(other[0].weight)

    def convert(config: object, dense: nn.Module = teacher) -> nn.Module:
        model = copy.deepcopy(dense)
        gblr.convert_(model, config, gblr.linear_layers(include=("0", "2")))
        return model

    low_rank = gblr.LowRankConfig(0.4)
    first = convert(low_rank)
    gblr.heal_(first, teacher, batches, out=tmp_path)
    calls = [
        (convert(gblr.LowRankConfig(0.7)), teacher, {}, "multiplications"),
        (convert(gblr.BlastConfig(0.4)), teacher, {}, "other structured layers"),
        (convert(low_rank, other), other, {}, "`teacher`"),
        (convert(low_rank), teacher, {"structure": "free"}, "`structure` was 'frozen' and is 'free'"),
    ]
    for model, dense, options, words in calls:
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(CheckpointError, match=words):
            gblr.heal_(model, dense, batches, out=tmp_path, **options)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    again = convert(low_rank)
    gblr.heal_(again, teacher, batches, out=tmp_path)
    assert all(torch.equal(value, first.state_dict()[name]) for name, value in again.state_dict().items())


def test_mistakes_are_said_before_anything_is_changed():
    teacher, batches = converted.bert(), tokens(1)
    model = copy.deepcopy(teacher)
    with raises_value_error("convert_"):
        gblr.heal_(model, teacher, batches)
    gblr.convert_(model, gblr.LowRankConfig(0.4))
    with raises_value_error("list(...)"):
        gblr.heal_(model, teacher, iter(batches))
    with raises_value_error("dense original", "teacher"):
        gblr.heal_(model, model, batches)
    with raises_value_error("no layer", "dense original"):
        gblr.heal_(model, nn.Linear(2, 2), batches)
    with raises_value_error("structure", "'loose'"):
        gblr.heal_(model, teacher, batches, structure="loose")


@pytest.mark.parametrize("moved", ["gblr.json", "layers.json"])
def test_a_kill_while_a_refit_is_saved_loses_that_refit_alone(moved, tmp_path, monkeypatch):
    """Files are moved to their places one after the other."""
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8))
    batches, real, seen = [torch.randn(32, 16)], os.replace, []

    def convert() -> nn.Module:
        model = copy.deepcopy(teacher)
        gblr.convert_(model, gblr.GaudiConfig(0.5, steps=2), gblr.linear_layers(include=("0", "2", "4")))
        return model

    def stops(old, new):
        seen.append(Path(new).name == moved)
        if sum(seen) == 2:
            raise KeyboardInterrupt
        real(old, new)

    whole, model = convert(), convert()
    rows = gblr.heal_(whole, teacher, batches, structure="free").layers
    monkeypatch.setattr(os, "replace", stops)
    with pytest.raises(KeyboardInterrupt):
        gblr.heal_(convert(), teacher, batches, structure="free", out=tmp_path)
    monkeypatch.setattr(os, "replace", real)
    assert gblr.heal_(model, teacher, batches, structure="free", out=tmp_path).layers == rows
    torch.testing.assert_close(model(batches[0]), whole(batches[0]))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["call.json", "layers-3", "layers.json"]


def test_few_samples_are_told_also_by_a_refit_that_went_on(tmp_path):
    teacher = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))

    def healed(num: int, **options) -> gblr.HealResult:
        model = copy.deepcopy(teacher)
        gblr.convert_(model, gblr.LowRankConfig(0.5), gblr.linear_layers(include=("0", "2", "4")))
        return gblr.heal_(model, teacher, [torch.randn(num, 8) for _ in range(2)], **options)

    assert healed(8).notes == []
    few = [
        "`batches` has few samples: 2 saw 14 inputs and has 16 features (and 1 more layer likewise). With more, fits "
        "hold better on other data."
    ]
    assert healed(7).notes == healed(7, out=tmp_path).notes == healed(7, out=tmp_path).notes == few


@pytest.mark.parametrize(
    "other, words",
    [
        (nn.Linear(8, 24), "24 x 8"),
        (nn.Linear(9, 16), "16 x 9"),
        (nn.Conv2d(8, 16, 3), "16 x 72"),
        (nn.Identity(), "Identity"),
    ],
)
def test_a_teacher_with_layers_of_other_sizes_is_told(other, words):
    teacher = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    model = copy.deepcopy(teacher)
    gblr.convert_(model, gblr.LowRankConfig(0.5))
    with raises_value_error("'0' is 16 x 8 in `model`", f"{words} in `teacher`", "dense original"):
        gblr.heal_(model, nn.Sequential(other, nn.ReLU(), nn.Linear(16, 8)), [torch.randn(4, 8)])


def test_a_teacher_of_outputs_alone_may_be_of_any_size():
    larger = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 8))
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    gblr.convert_(model, gblr.LowRankConfig(0.5))
    config = gblr.TrainConfig(epochs=1, lr=1e-3)
    assert gblr.heal_(model, larger, [torch.randn(4, 8)], layers=False, config=config).training is not None


def test_a_budget_is_for_a_structure_that_is_free():
    torch.manual_seed(0)
    teacher, batches = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8)), [torch.randn(8, 16)] * 4
    first = gblr.linear_layers(include=("0",))
    config = gblr.TrainConfig(epochs=2, budget=gblr.Budget(relative_cost=0.3))
    model = copy.deepcopy(teacher)
    gblr.convert_(model, gblr.GaudiConfig(0.5, steps=2), where=first)
    before = copy.deepcopy(model.state_dict())
    with raises_value_error("budget", "structure='frozen'", "structure='free'"):
        gblr.heal_(model, teacher, batches, config=config)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    result = gblr.heal_(model, teacher, batches, config=config, structure="free")
    assert result.training.relative_cost <= 0.3
    model = copy.deepcopy(teacher)
    gblr.convert_(model, gblr.LowRankConfig(0.5), where=first)  # no structure: training leaves budgets aside
    assert gblr.heal_(model, teacher, batches, config=config).training.relative_cost is None


def test_a_model_that_skips_a_layer_is_told_apart():
    class Skips(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return self.b(self.a(x)) if float(x.sum()) < math.inf else self.b(x)

    teacher = Skips()
    model = copy.deepcopy(teacher)
    gblr.convert_(model, gblr.LowRankConfig(0.5))
    with raises_value_error("not every layer runs"):
        gblr.heal_(model, teacher, [torch.zeros(2, 8), torch.full((2, 8), math.inf)])


def test_what_convert_has_measured_is_not_measured_again(monkeypatch):
    teacher, batches = converted.gpt2().eval(), tokens()
    models = [copy.deepcopy(teacher) for _ in range(2)]
    reports = [gblr.convert_(m, gblr.LowRankConfig(0.5), None, batches, sensitivity=True) for m in models]
    gblr.heal_(models[0], teacher, batches, sensitivity=True)

    def again(*args):
        raise AssertionError("measured twice")

    monkeypatch.setattr("gblr.conversion.refit.collect_sensitivity", again)
    gblr.heal_(models[1], teacher, batches, sensitivity=reports[1].sensitivity)
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(AssertionError, match="measured twice"):  # a layer that is missing is measured
        name, *_ = reports[1]
        few = {key: value for key, value in reports[1].sensitivity.items() if key != name}
        gblr.heal_(models[1], teacher, batches, sensitivity=few)
    with pytest.raises(ValueError, match=r"has 3 numbers for .* outputs"):
        gblr.heal_(models[1], teacher, batches, sensitivity={name: torch.ones(3)})

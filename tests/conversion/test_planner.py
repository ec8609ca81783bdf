"""`harden_` chooses for each layer what it multiplies by: measured on example inputs, counted, or forced."""

import copy
import json
import os
import subprocess
import sys
from collections import UserDict
from pathlib import Path

import pytest
import torch
from torch import nn

from gblr.conversion import planner
from gblr.conversion.checkpoint import load_, save_pretrained
from gblr.conversion.harden import harden_
from gblr.layers.conv import ConvGeometry, GaudiConv2d, StructuredConv2d
from gblr.layers.structured import StructuredLinear
from gblr.matrices import forms
from gblr.matrices.forms import FORMS
from gblr.matrices.packed import PackedGBLR
from gblr.matrices.structure import Structure
from gblr.ops import block_matmul, native
from tests.conversion.low_rank_models import assert_same
from tests.helpers import raises_value_error
from tests.layers.gaudi_layers import random_gaudi, scatter_blocks, three_blocks
from tests.layers.packed_layers import each_form, needs_kernels

ROOT = Path(__file__).parents[2]
POSSIBLE = [form for form in FORMS if form != "packed" or native._load()[0] is not None]


class Model(nn.Module):
    """A convolution, two linear layers, one of them given by name, and one that no input reaches."""

    def __init__(self, autocast: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.conv = GaudiConv2d(3, 8, 3, padding=1)
        self.first, self.second, self.unused = random_gaudi(8, 16), random_gaudi(16, 12), random_gaudi(12, 12)
        scatter_blocks(self.conv)
        self.autocast = autocast

    def forward(self, image, scale=1.0):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.autocast):
            y = self.conv(image).mean((-2, -1)) * scale
            return self.second(x=self.first(y).relu())


LAYERS = ["conv", "first", "second", "unused"]
REACHED = LAYERS[:3]


@pytest.fixture
def image(generator):
    return torch.randn(4, 3, 6, 6, generator=generator)


@pytest.fixture
def no_kernels(monkeypatch):
    monkeypatch.setattr(block_matmul, "available", lambda: False)


@pytest.fixture
def quick_clock(monkeypatch):
    """Times that are known beforehand: `factors` is the fastest for "first", `dense` for all others."""
    times = {"packed": 3.0, "factors": 2.0, "dense": 1.0}
    monkeypatch.setattr(
        planner,
        "form_times",
        lambda layer, x, graphs: times | ({"factors": 0.5} if layer.out_features == 16 else {}),
    )
    return times


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    return {name: model.get_submodule(name) for name in LAYERS}


# measuring


@pytest.mark.parametrize("how", ["tensor", "tuple", "list", "dict", "mapping"])
def test_example_inputs_may_be_given_as_to_the_model(how, image):
    example = {
        "tensor": image,
        "tuple": (image, 0.5),
        "list": [image, 0.5],
        "dict": {"image": image, "scale": 0.5},
        "mapping": UserDict(image=image),
    }[how]
    model = Model()
    with torch.no_grad():
        expected = model(image)
    report = harden_(model, example)
    rows = {row.layer: row for row in report.rows}
    assert list(report) == list(rows) == LAYERS
    assert all(set(rows[name].form_seconds) == set(POSSIBLE) for name in REACHED)
    with torch.no_grad():
        assert_same(model(image), expected, 1e-5)


def test_the_fastest_form_is_kept_and_reported(image):
    model = Model()
    report = harden_(model, image)
    for row in report.rows:
        layer = model.get_submodule(row.layer)
        assert layer.form == row.form in POSSIBLE
        if row.layer in REACHED:
            assert all(0 < seconds < 1 for seconds in row.form_seconds.values())
            assert row.form_seconds[row.form] == min(row.form_seconds.values())
            assert layer.planned == row.form and all(f"{form} " in row.what for form in POSSIBLE)
    assert "measured on the example inputs" in report.notes[0] and "not measured" not in report.notes[0]
    stored = json.loads(json.dumps(report.to_dict()))
    assert stored["rows"][0]["form"] == report.rows[0].form and stored["rows"][0]["form_seconds"]


def test_the_clock_decides_for_each_layer_by_itself(image, quick_clock):
    model = Model()
    report = harden_(model, image)
    assert {row.layer: row.form for row in report.rows if row.layer in REACHED} == {
        "conv": "dense",
        "first": "factors",
        "second": "dense",
    }
    assert report.rows[0].form_seconds == quick_clock


def test_a_layer_without_input_gets_the_expected_form(image, quick_clock):
    model = Model()
    report = harden_(model, image)
    row = report.rows[LAYERS.index("unused")]
    assert row.layer == "unused" and row.form_seconds == {} and "us" not in row.what
    assert model.unused.planned is None
    assert model.unused.form == row.form == forms.expected_form(model.unused.matrix)


def test_without_example_inputs_multiplications_are_counted():
    model = Model()
    report = harden_(model)
    for row in report.rows:
        layer = model.get_submodule(row.layer)
        assert row.form_seconds == {} and layer.planned is None
        assert layer.form == row.form == layer.expected_form(layer.matrix)
    assert "not measured" in report.notes[0]


def test_expected_forms_follow_the_multiplications():
    def of(num_blocks, width, size=1000, rank=1):
        side = torch.full((num_blocks,), width)
        s = Structure(side, torch.arange(num_blocks), side, torch.arange(num_blocks))
        contents = [torch.zeros(rank * num_blocks * width) for _ in range(2)]
        return forms.expected_form(PackedGBLR(s, *contents, rank, (size, size)))

    assert of(10, 1000) == "factors"  # low rank: nothing to be cropped
    assert of(600, 1000) == "dense"  # more than a dense product
    if "packed" in POSSIBLE:
        assert of(300, 100) == "packed"


@pytest.mark.parametrize(("positions", "cold"), [(1, True), (16, True), (17, False)])
def test_few_positions_are_measured_with_weights_that_are_not_in_the_cache(positions, cold, monkeypatch):
    """In a model, other layers' weights have been there in between."""
    seen = {form: set() for form in POSSIBLE}
    multiply = forms.multiply

    def record(form, derived, *others):
        seen[form].add(derived.tensors[0].data_ptr())
        return multiply(form, derived, *others)

    monkeypatch.setattr(planner.forms, "multiply", record)
    model = nn.Sequential(random_gaudi(16, 12))
    harden_(model, torch.randn(positions, 16))
    assert all((len(places) > 1) == cold for places in seen.values())


def test_graphs_are_measured_on_a_gpu_alone(image):
    with raises_value_error("cpu", "CUDA graphs"):
        harden_(Model(), image, captured=True)
    with raises_value_error("example_inputs"):
        harden_(Model(), captured=True)


def test_layers_are_measured_on_what_reaches_them(image, monkeypatch):
    seen = {}
    measure = planner.form_times

    def record(layer, x, graphs):
        seen[layer.out_features] = tuple(x.shape)
        return measure(layer, x, graphs)

    monkeypatch.setattr(planner, "form_times", record)
    harden_(Model(), image)
    assert seen == {8: (4, 3, 6, 6), 16: (4, 8), 12: (4, 16)}


def test_models_that_use_autocast_can_be_measured(image):
    model = Model(autocast=True)
    report = harden_(model, image)
    assert set(report.rows[1].form_seconds) == set(POSSIBLE)
    assert model(image).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_only_forms_that_know_the_dtype_are_measured(dtype, image):
    model = Model().to(dtype)
    report = harden_(model, image.to(dtype))
    known = POSSIBLE if dtype == torch.bfloat16 else ["factors", "dense"]
    assert set(report.rows[0].form_seconds) == set(known) and model(image.to(dtype)).dtype == dtype


def test_measuring_leaves_modes_and_random_numbers_alone(image):
    model = Model().train()
    model.first.eval()
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    harden_(model, image)
    assert torch.equal(torch.rand(2), expected)
    assert [m.training for m in (model, *layers_of(model).values())] == [True, True, False, True, True]
    assert not any(m._forward_pre_hooks for m in model.modules())


# forcing


@each_form
def test_a_plan_forces_the_form(form, image):
    model = Model()
    with torch.no_grad():
        expected = model(image)
    report = harden_(model, image, plan=form)  # the inputs are not needed, nor are they measured
    assert {row.form for row in report.rows} == {form} and not any(row.form_seconds for row in report.rows)
    assert all(layer.planned == layer.form == form for layer in layers_of(model).values())
    assert f"{form} 100%" in report.notes[0]
    with torch.no_grad():
        assert_same(model(image), expected, 1e-5)


def snapshot(model: nn.Module):
    hooks = {name: len(m._forward_pre_hooks) for name, m in model.named_modules()}
    modes = {name: (type(m), id(m), m.training) for name, m in model.named_modules()}
    return modes, hooks, copy.deepcopy(model.state_dict())


def assert_unchanged(model: nn.Module, before) -> None:
    modes, hooks, state = snapshot(model)
    assert modes == before[0] and hooks == before[1]
    assert state.keys() == before[2].keys() and all(torch.equal(state[name], before[2][name]) for name in state)


def test_packed_without_kernels_is_refused_and_nothing_changed(no_kernels):
    model = Model().train()
    before = snapshot(model)
    with pytest.raises(
        RuntimeError, match=r"layer 'conv' cannot multiply packed blocks: .*cpu_kernels\(\).*plan='auto'"
    ):
        harden_(model, plan="packed")
    assert_unchanged(model, before)


def test_packed_in_a_dtype_without_kernels_is_refused():
    with pytest.raises(RuntimeError, match=r"layer 'conv' cannot multiply packed blocks: .*not torch\.float64"):
        harden_(Model().double(), plan="packed")


@pytest.mark.parametrize("hardened", [False, True])
@pytest.mark.parametrize("example", [(torch.ones(4, 5, 6, 6),), {"picture": torch.ones(4, 3, 6, 6)}, ()], ids=str)
def test_inputs_that_fail_change_nothing(example, hardened):
    model = Model().train()
    if hardened:
        harden_(model, plan="factors")
    before = snapshot(model)
    with pytest.raises(Exception, match=r"size|argument|shape|Type-check|channels"):
        harden_(model, example)
    assert_unchanged(model, before)
    if hardened:
        assert {layer.form for layer in layers_of(model).values()} == {"factors"}


# again


def test_hardening_again_plans_anew_in_place(image, quick_clock):
    model = Model()
    harden_(model, plan="factors")
    layers, parameters = layers_of(model), dict(model.named_parameters())
    with torch.no_grad():
        expected = model(image)
    report = harden_(model, image)
    assert [row.form for row in report.rows][:3] == ["dense", "factors", "dense"]
    assert layers_of(model) == layers
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    with torch.no_grad():
        assert_same(model(image), expected, 1e-5)
    assert {row.form for row in harden_(model, plan="dense").rows} == {"dense"}


def test_hardening_again_leaves_partly_frozen_layers_as_they_are():
    model = Model().train()
    harden_(model)
    model.first.u.requires_grad_(False)
    model.second.eval()
    harden_(model)
    assert [p.requires_grad for p in (model.first.u, model.first.v, model.first.bias)] == [False, True, True]
    assert not model.second.training and model.first.training


def test_fixed_structures_are_planned_too(generator):
    geometry = ConvGeometry(3, (2, 2))
    model = nn.Sequential(
        StructuredConv2d(three_blocks(), geometry), nn.Flatten(), StructuredLinear(three_blocks(8, 16))
    )
    x = torch.randn(2, 3, 2, 2, generator=generator)
    expected = model(x).detach()
    report = harden_(model, x)
    assert list(report) == ["0", "2"] and all(row.form_seconds for row in report.rows)
    with torch.no_grad():
        assert_same(model(x), expected, 1e-5)


# checkpoints


@each_form
def test_checkpoints_keep_the_planned_form(form, tmp_path, image):
    model = Model().eval()
    harden_(model, plan=form)
    save_pretrained(model, tmp_path)
    loaded = load_(Model(), tmp_path).eval()
    assert {(layer.form, layer.planned) for layer in layers_of(loaded).values()} == {(form, form)}
    with torch.no_grad():
        assert torch.equal(loaded(image), model(image))
    other = Model().eval()
    harden_(other, plan="dense" if form == "factors" else "factors")  # hardened alike, but planned otherwise
    load_(other, tmp_path)
    assert {layer.form for layer in layers_of(other).values()} == {form}


def test_checkpoints_from_before_there_were_forms_load(tmp_path, image):
    model = Model().eval()
    harden_(model, plan="factors")
    save_pretrained(model, tmp_path)
    manifest = json.loads((tmp_path / "gblr.json").read_text())
    for spec in manifest["layers"].values():
        del spec["form"]
    (tmp_path / "gblr.json").write_text(json.dumps(manifest))
    loaded = load_(Model(), tmp_path).eval()
    for layer in layers_of(loaded).values():
        assert layer.planned is None and layer.form == layer.expected_form(layer.matrix)
    with torch.no_grad():
        assert_same(loaded(image), model(image), 1e-5)


@needs_kernels
def test_a_packed_checkpoint_loads_where_there_are_no_kernels(tmp_path, image, request):
    model = Model().eval()
    harden_(model, plan="packed")
    with torch.no_grad():
        expected = model(image)
    save_pretrained(model, tmp_path)
    request.getfixturevalue("no_kernels")
    loaded = load_(Model(), tmp_path).eval()
    assert all(layer.form in ("factors", "dense") and layer.planned == "packed" for layer in layers_of(loaded).values())
    with torch.no_grad():
        assert_same(loaded(image), expected, 1e-5)


# a machine without kernels


WITHOUT_KERNELS = """
import json, warnings
import torch
import gblr
from torch import nn

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 8)).eval()
    gblr.convert_(model, gblr.GaudiConfig(0.5, steps=2))
    x = torch.randn(5, 16)
    with torch.no_grad():
        expected = model(x)
        report = gblr.harden_(model, x)
        first = float((model(x) - expected).norm() / expected.norm())
    gblr.harden_(model)
    model(x).sum().backward()
messages = [str(w.message) for w in caught if issubclass(w.category, UserWarning) and "gblr" in str(w.message)]
try:
    gblr.harden_(model, plan="packed")
except RuntimeError as error:
    refusal = str(error)
print(json.dumps([messages, [row.form for row in report.rows], first, refusal]))
"""


def test_without_kernels_hardening_works_by_plain_products_and_says_so_once():
    environment = os.environ | {"GBLR_CPU_KERNELS": "none", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", WITHOUT_KERNELS]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, check=True, timeout=120)
    messages, planned, error, refusal = json.loads(done.stdout)
    assert len(messages) == 1 and "switched off by GBLR_CPU_KERNELS=none" in messages[0]
    assert set(planned) <= {"factors", "dense"} and error < 1e-5
    assert "cannot multiply packed blocks" in refusal

"""Hardened layers multiply by tensors derived from their contents: the same results by every form, at every time."""

import copy
import math
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from gblr.layers.prepared import PreparedModule
from gblr.layers.structured import StructuredLinear
from gblr.matrices.packed import PackedGBLR
from tests.helpers import TOLERANCE
from tests.layers.packed_layers import (
    assert_up_to_date,
    each_form,
    needs_kernels,
    packed_conv,
    packed_linear,
    packed_mlp,
    plain,
    plan_as,
)
from tests.ops.packed_blocks import random_packed
from tests.shape_hook import shapes_unchecked


def inputs(*shape: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(*shape, 20, generator=generator)


# changes are noticed


def step(layer, optimizer=torch.optim.SGD, frozen=(), **options):
    for name in ("bias", *frozen):
        getattr(layer, name).requires_grad_(False)  # contents alone change
    layer(torch.ones(4, 20)).square().sum().backward()
    optimizer(layer.parameters(), lr=0.1, **options).step()


@torch.no_grad()
def copy_in_place(layer):
    layer.u.copy_(2 * layer.u)


@torch.no_grad()
def change_one_number(layer):
    layer.v[3] += 100


@torch.inference_mode()
def change_in_inference_mode(layer):
    layer.v.mul_(3)


def load(layer, **options):
    layer.load_state_dict(packed_linear(seed=0).state_dict() | {"u": torch.ones_like(layer.u)}, **options)


def move_blocks(layer):
    state = layer.state_dict()
    layer.load_state_dict(state | {"structure_row_location": state["structure_row_location"] + 5})


def replace_data(layer):
    layer.u.data = 2 * layer.u.data


def replace_data_twice(layer):
    """The second time, memory may be that of the beginning."""
    for _ in range(2):
        layer.u.data = 2 * layer.u.data
        layer.v.data = layer.v.data + 1


def write_to_data(layer):
    layer.u.data.mul_(2)  # which nobody can notice
    layer.prepare()


def replace_parameter(layer):
    layer.v = nn.Parameter(torch.ones_like(layer.v))


def by_vector(layer):
    vector = nn.utils.parameters_to_vector(layer.parameters())
    nn.utils.vector_to_parameters(2 * vector, layer.parameters())


def allocate_anew(layer):
    state = copy.deepcopy(layer.state_dict())
    layer.to("meta").to_empty(device="cpu")
    layer.load_state_dict({name: 2 * t if t.is_floating_point() else t for name, t in state.items()})


CHANGES = {
    "sgd": step,
    "adam": lambda layer: step(layer, torch.optim.Adam, foreach=True),
    "fused adamw": lambda layer: step(layer, torch.optim.AdamW, fused=True),  # leaves no trace on the tensors
    "fused sgd of u": lambda layer: step(layer, frozen=["v"], fused=True),
    "fused sgd of v": lambda layer: step(layer, frozen=["u"], fused=True),
    "copy_": copy_in_place,
    "one number": change_one_number,
    "inference mode": change_in_inference_mode,
    "load_state_dict": load,
    "assign": lambda layer: load(layer, assign=True),
    "structure": move_blocks,
    "data": replace_data,
    "data twice": replace_data_twice,
    "data.mul_": write_to_data,
    "new parameter": replace_parameter,
    "vector": by_vector,
    "to_empty": allocate_anew,
}


@each_form
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("training", [False, True])
def test_changed_contents_change_the_outputs(form, change, training, generator):
    layer, x = packed_linear(form).train(training), inputs(3, generator=generator)
    with torch.no_grad():
        before = layer(x)
    change(layer)
    with torch.no_grad():
        assert (layer(x) - before).norm() > 0.01 * before.norm()  # the change can be seen
    assert_up_to_date(layer, x)
    assert layer.form == form


@each_form
def test_a_fused_step_after_a_look_without_gradients_is_noticed(form, generator):
    """The look makes what belongs to the contents before the step, and the step leaves no trace on them."""
    layer, x = packed_linear(form).eval(), inputs(3, generator=generator)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, fused=True)
    layer(x).square().sum().backward()
    with torch.no_grad():
        before = layer(x)
    optimizer.step()
    with torch.no_grad():
        assert (layer(x) - before).norm() > 0.01 * before.norm()
    assert_up_to_date(layer, x)


@each_form
def test_a_mode_that_was_put_back_by_hand_ends_with_evaluation_too(form, generator):
    """As after an evaluation in between: a compiled model is told of changes by the switch to evaluation alone."""
    layer, x = packed_linear(form), inputs(3, generator=generator)
    layer.eval()
    layer.training = True
    derived = [layer.__dict__[name].clone() for name in ("_derived_0",)]
    step(layer, torch.optim.AdamW, fused=True)
    layer.eval()
    assert not torch.equal(layer.__dict__["_derived_0"], derived[0])
    assert_up_to_date(layer, x)


@each_form
def test_changes_while_gradients_are_on_are_noticed_too(form, generator):
    layer, x = packed_linear(form), inputs(3, generator=generator)
    layer(x)
    copy_in_place(layer)
    expected = plain(layer, x)
    assert (layer(x) - expected).detach().norm() <= 1e-5 * expected.detach().norm()


@each_form
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_a_cast_layer_multiplies_in_its_dtype_by_a_form_that_can(form, dtype, generator):
    layer, x = packed_linear(form), inputs(3, generator=generator)
    with torch.no_grad():
        expected = layer(x)
    layer.to(dtype)
    possible = form != "packed" or dtype == torch.bfloat16
    assert (layer.form == form) == possible and layer.form is not None
    y = layer(x.to(dtype)).detach()
    assert y.dtype == dtype and (y - expected).norm() <= TOLERANCE[dtype] * expected.norm() + 1e-5
    layer.float()
    assert layer.form == form == layer.planned  # it comes back with the dtype
    rough = {torch.bfloat16: 0.02, torch.float16: 0.002}.get(dtype, 1e-5)
    with torch.no_grad():
        assert (layer(x) - expected).norm() <= rough * expected.norm()


@each_form
def test_a_parametrized_content_is_followed(form, generator):
    layer, x = packed_linear(form), inputs(3, generator=generator)

    class Twice(nn.Module):
        factor = 2.0

        def forward(self, u):
            return self.factor * u

    before = layer.u.detach().clone()
    parametrize.register_parametrization(layer, "u", Twice())
    for factor in (2.0, 3.0, 5.0):
        layer.parametrizations.u[0].factor = factor
        assert torch.equal(layer.u.detach(), factor * before)
        assert_up_to_date(layer, x)


@each_form
def test_other_parameters_can_be_lent_to_a_layer(form, generator):
    """`functional_call` with tensors that live for one call: their memory is that of the next ones."""
    layer, x = packed_linear(form), inputs(3, generator=generator)
    with torch.no_grad():
        own, weight = layer(x), layer.weight
        for factor in (2.0, 3.0, 4.0):
            y = torch.func.functional_call(layer, {"u": factor * layer.u}, (x,))
            expected = nn.functional.linear(x, factor * weight, layer.bias)
            assert (y - expected).norm() <= 1e-5 * expected.norm()
            del y, expected
        assert torch.equal(layer(x), own)
        strided = torch.stack([layer.bias, -layer.bias], 1)[:, 0]
        assert torch.equal(torch.func.functional_call(layer, {"bias": strided}, (x,)), own)
    on_meta = {name: t.to("meta") for name, t in layer.state_dict().items()}
    assert torch.func.functional_call(layer, on_meta, (x.to("meta"),)).shape == (3, 24)
    with torch.no_grad():
        assert torch.equal(layer(x), own) and layer.form == form


def test_a_state_dict_of_other_widths_is_refused_as_torch_does():
    layer, other = packed_linear("dense"), packed_linear("dense", seed=1)
    assert layer.u.shape != other.u.shape
    with pytest.raises(RuntimeError, match=r"size mismatch for u"):
        layer.load_state_dict(other.state_dict())


# derived tensors are nobody else's business


@each_form
def test_derived_tensors_are_neither_saved_nor_trained_nor_copied(form):
    layer = packed_linear(form)
    sides = ("row_width", "row_location", "col_width", "col_location")
    buffers = {f"structure_{side}" for side in sides}
    assert set(dict(layer.named_parameters())) == {"u", "v", "bias"}
    assert set(dict(layer.named_buffers())) == buffers and set(layer.state_dict()) == buffers | {"u", "v", "bias"}
    state = layer.__getstate__()
    held = [name for name, value in state.items() if isinstance(value, torch.Tensor)]
    assert not held and "_bound" not in state and "_stamp" not in state
    twin = copy.deepcopy(layer)
    assert twin.form == twin.planned == form
    assert twin._derived_0.data_ptr() != layer._derived_0.data_ptr()


# the same by every form


@each_form
@pytest.mark.parametrize("shape", [(), (1,), (5,), (2, 3, 4), (0,)])
@pytest.mark.parametrize("training", [False, True])
def test_outputs_and_gradients_are_those_of_the_dense_layer(form, shape, training, generator):
    layer, x = packed_linear(form).train(training), inputs(*shape, generator=generator).requires_grad_()
    exact, x_exact = copy.deepcopy(layer).double(), x.detach().double().requires_grad_()
    y, expected = layer(x), plain(exact, x_exact)
    assert y.shape == expected.shape and (y - expected).detach().norm() <= 1e-5 * expected.detach().norm()
    actual = torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])
    wanted = torch.autograd.grad(expected.square().sum(), [x_exact, *exact.parameters()])
    for a, w in zip(actual, wanted, strict=True):
        assert a.shape == w.shape and (a - w).norm() <= 1e-5 * w.norm()


@each_form
def test_convolutions_are_those_of_the_dense_layer(form, generator):
    layer, x = packed_conv(form), torch.randn(2, 3, 7, 6, generator=generator).requires_grad_()
    exact = copy.deepcopy(layer).double()
    weight = exact.weight
    padded = nn.functional.pad(x.double(), (1, 1, 1, 1), mode="circular")
    expected = nn.functional.conv2d(padded, weight.unflatten(1, (3, 3, 3)), exact.bias)
    y = layer(x)
    assert (y - expected).detach().norm() <= 1e-5 * expected.detach().norm()
    with torch.no_grad():
        assert (layer(x) - expected).norm() <= 1e-5 * expected.norm()
    actual = torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])
    wanted = torch.autograd.grad(expected.square().sum(), [x, *exact.parameters()])
    for a, w in zip(actual, wanted, strict=True):
        assert (a - w).norm() <= 1e-5 * w.norm()


@each_form
def test_frozen_contents_let_gradients_through(form, generator):
    layer, x = packed_linear(form).requires_grad_(False), inputs(3, generator=generator).requires_grad_()
    layer(x).sum().backward()
    assert (x.grad - layer.weight.sum(0)).norm() <= 1e-5 * x.grad.norm()
    layer.bias.requires_grad_()
    layer(x).sum().backward()
    assert torch.equal(layer.bias.grad, torch.full((24,), 3.0)) and layer.u.grad is None


@each_form
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_computes_in_its_dtype_and_trains_in_float32(form, dtype, generator):
    layer, x = packed_linear(form), inputs(5, generator=generator)
    expected = plain(layer, x).detach()
    with torch.autocast("cpu", dtype=dtype):
        with torch.no_grad():
            quick = layer(x)
        y = layer(x.to(dtype))
    for found in (quick, y.detach()):
        assert found.dtype == dtype and (found - expected).norm() < 2e-2 * expected.norm()
    y.float().square().sum().backward()
    assert all(p.grad.dtype == torch.float32 and bool(p.grad.any()) for p in layer.parameters())
    layer.double()
    with torch.autocast("cpu", dtype=dtype):
        assert layer(x.double()).dtype == torch.float64


@each_form
def test_a_bias_of_another_dtype_is_cast(form, generator):
    layer, x = packed_linear(form), inputs(5, generator=generator)
    layer.bias.data = layer.bias.data.double()
    with torch.no_grad():
        y = layer(x)
        expected = nn.functional.linear(x, layer.weight, layer.bias.float())
    assert y.dtype == torch.float32 and (y - expected).norm() <= 1e-5 * expected.norm()


@each_form
def test_layers_work_on_meta_and_back(form, generator):
    layer, x = packed_linear(form), inputs(5, generator=generator)
    state = copy.deepcopy(layer.state_dict())
    layer.to("meta")
    assert layer.form is None and layer(x.to("meta")).shape == (5, 24)
    layer.to_empty(device="cpu").load_state_dict(state)
    assert layer.form == form
    assert_up_to_date(layer, x)


@each_form
def test_wrong_inputs_are_refused_as_by_other_layers(form):
    layer = packed_linear(form)
    for grad in (True, False):
        with torch.set_grad_enabled(grad), shapes_unchecked():
            with pytest.raises(ValueError, match=r"in_features = 20 elements; got shape \(3, 19\)"):
                layer(torch.ones(3, 19))
            with pytest.raises(RuntimeError, match="dtype"):
                layer(torch.ones(3, 20, dtype=torch.float64))


# training


@pytest.fixture
def generic(monkeypatch):
    """Layers multiply by their matrix itself, as if there were no forms."""
    monkeypatch.setattr(PreparedModule, "quick", lambda *_: None)
    monkeypatch.setattr(PreparedModule, "multiply", lambda *_: None)


def trained(model: nn.Module, x: torch.Tensor, target: torch.Tensor, validate: bool = True) -> tuple[list[float], list]:
    """Losses before each step and, in evaluation and inference mode, after it; and the contents at the end."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    losses = []
    for _ in range(6):
        model.train()
        loss = (model(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.eval()
        with torch.inference_mode():
            losses += [loss.item(), (model(x) - target).square().mean().item()]
    return losses, [p.detach().clone() for p in model.parameters()]


@each_form
@pytest.mark.parametrize("make", [packed_mlp, lambda form: nn.Sequential(packed_conv(form))], ids=["mlp", "conv"])
def test_training_by_a_form_is_training_by_the_matrix(form, make, generator, request):
    model, reference = make(form), make(form)
    shape, out = ((3, 6, 6), (10, 6, 6)) if isinstance(model[0], type(packed_conv("dense"))) else ((20,), (12,))
    x, target = torch.randn(9, *shape, generator=generator), torch.randn(9, *out, generator=generator)
    losses, contents = trained(model, x, target)
    request.getfixturevalue("generic")
    expected, expected_contents = trained(reference, x, target)
    assert losses[-1] < 0.9 * losses[0]
    assert losses == pytest.approx(expected, rel=1e-3)
    for found, wanted in zip(contents, expected_contents, strict=True):
        assert (found - wanted).norm() < 1e-2 * wanted.norm()


@needs_kernels
def test_what_inference_mode_prepared_serves_for_training(generator):
    layer, x = packed_linear(), inputs(3, generator=generator)
    copy_in_place(layer)
    with torch.inference_mode():
        layer(x)
    layer(x).sum().backward()
    assert bool(layer.u.grad.any())


@needs_kernels
def test_a_layer_made_in_inference_mode_works(generator):
    with torch.inference_mode():
        layer, x = packed_linear(), inputs(3, generator=generator)
        assert layer.u.is_inference()
        expected = plain(layer, x)
        assert (layer(x) - expected).norm() <= 1e-5 * expected.norm()
    with torch.no_grad():
        assert (layer(x) - expected).norm() <= 1e-5 * expected.norm()


@each_form
def test_derivatives_of_derivatives_are_those_of_the_dense_layer(form, generator):
    layer, x = packed_linear(form), inputs(3, generator=generator).requires_grad_()
    exact, x_exact = copy.deepcopy(layer).double(), x.detach().double().requires_grad_()
    found = []
    for run, own, leaf in ((layer, layer, x), (lambda x: plain(exact, x), exact, x_exact)):
        (first,) = torch.autograd.grad(run(leaf).square().sum(), leaf, create_graph=True)
        with warnings.catch_warnings(action="error"):
            found.append(torch.autograd.grad(first.square().sum(), [leaf, own.u, own.v]))
    for a, w in zip(*found, strict=True):
        assert (a - w).norm() <= 1e-5 * w.norm()


def test_no_form_is_kept_for_other_formats():
    matrix = random_packed(24, 20, 7, 2)
    layer = StructuredLinear(matrix.to_gblr())
    assert layer.form is None and not layer.is_packed and layer.train().training
    layer = StructuredLinear(PackedGBLR.from_gblr(matrix.to_gblr()))
    assert layer.form is not None
    assert math.isfinite(float(layer(torch.ones(20)).sum().detach()))


def test_an_unknown_plan_is_the_expected_form():
    layer = packed_linear("dense")
    layer.planned = "by_magic"
    layer.prepare()
    expected = layer.form
    layer.planned = None
    layer.prepare()
    assert layer.form == expected
    plan_as(layer, "factors")

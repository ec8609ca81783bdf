"""Fractions to whole elements: the operator against straight-through rounding, its GPU kernels by the interpreter."""

import pytest
import torch

from gblr.ops.elements import elements, reference
from gblr.ops.masks import round_ste
from tests.ops.interpreted import interpreted_kernels
from tests.shape_hook import shapes_unchecked

AXES = [((8, 8), 1), ((100, 63), 1), ((100, 63), 8), ((96, 1536), 16), ((7, 100), 12)]


def fractions(generator, num=300):
    """With halves between two elements, both ends, and what an optimizer may leave beyond them."""
    width, location = (1.2 * torch.rand(2, num, generator=generator) - 0.1 for _ in range(2))
    width[:, :5] = torch.tensor([0.0, 1.0, -0.5, 1.5, 0.5])
    width[:, 5:40] = torch.arange(35) / 16  # halves on an axis of 8
    location[:, :6] = torch.tensor([0.0, 1.0, 0.999, -0.25, 1.75, 3.3])
    return width, location


def straight_through(width, location, axes, align):
    widths = [round_ste(width[i].clamp(0, 1) * n, align, n) for i, n in enumerate(axes)]
    around = location - location.detach().floor()
    return (*widths, *(round_ste(around[i] * n, align, n) for i, n in enumerate(axes)))


def test_locations_beyond_the_axis_go_around_it():
    """Optimizers leave them there where no learner puts them back; cut off, they would all be at the axis' end."""
    location = torch.tensor([[0.25, 1.25, -0.75, 7.25], [0.5, 1.5, 2.5, -0.5]])
    found = elements(torch.ones(2, 4), location, (8, 12), 1)
    assert found[2].tolist() == [2, 2, 2, 2] and found[3].tolist() == [6, 6, 6, 6]


@pytest.mark.parametrize(("axes", "align"), AXES)
def test_it_is_straight_through_rounding_of_all_four(axes, align, generator):
    found = []
    upstream = torch.randn(4, 300, generator=generator)
    sides = fractions(generator)
    for function in (elements, straight_through):
        width, location = (side.clone().requires_grad_() for side in sides)
        out = function(width, location, axes, align)
        found.append((*out, *torch.autograd.grad(out, (width, location), tuple(upstream))))
    for got, want in zip(*found, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize(("axes", "align"), AXES)
@pytest.mark.parametrize("num", [1, 40, 300])
def test_the_gpu_kernels_round_alike(axes, align, num, generator, unwritten_is_nan):
    pytest.importorskip("triton")
    kernels = interpreted_kernels("elements")
    width, location = (side[:, :num].contiguous() for side in fractions(generator))
    grad = torch.randn(4, num, generator=generator)
    assert torch.equal(kernels.forward(width, location, *axes, align), reference.forward(width, location, *axes, align))
    found, expected = (module.backward(grad, width, *axes) for module in (kernels, reference))
    assert all(torch.equal(got, want) for got, want in zip(found, expected, strict=True))


def test_strided_fractions_are_read_correctly(generator):
    pytest.importorskip("triton")
    kernels = interpreted_kernels("elements")
    width, location = (side.T.contiguous().T for side in fractions(generator))
    assert torch.equal(kernels.forward(width, location, 96, 64, 1), reference.forward(width, location, 96, 64, 1))


def test_it_is_a_proper_operator(generator):
    width, location = (side.requires_grad_() for side in fractions(generator, num=50))
    torch.library.opcheck(torch.ops.gblr.elements.default, (width, location, 96, 64, 8))


def test_only_what_needs_a_gradient_gets_one(generator):
    width, location = fractions(generator)
    out = elements(width, location.requires_grad_(), (96, 64), 1)
    assert not any(t.isnan().any() for t in torch.autograd.grad(sum(t.sum() for t in out), location))


def test_compiled_steps_get_the_same_without_the_operator(generator):
    width, location = fractions(generator)
    expected = elements(width, location, (96, 64), 8)
    with shapes_unchecked():
        found = torch.compile(elements, backend="eager", fullgraph=True)(width, location, (96, 64), 8)
    assert all(torch.equal(got, want) for got, want in zip(found, expected, strict=True))


def test_layers_may_be_mapped(generator):
    sides = [fractions(generator, num=50) for _ in range(3)]
    width, location = (torch.stack(side) for side in zip(*sides, strict=True))
    mapped = torch.vmap(lambda w, l: torch.stack(elements(w, l, (96, 64), 1)))(width, location)
    for got, (w, l) in zip(mapped, sides, strict=True):
        assert torch.equal(got, torch.stack(elements(w, l, (96, 64), 1)))

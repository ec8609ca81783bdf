"""Packed layers that multiply by a chosen form, and what they should give."""

import pytest
import torch
from torch import Tensor, nn

from gblr.layers.conv import ConvGeometry, StructuredConv2d
from gblr.layers.structured import MatrixModule, StructuredLinear
from gblr.matrices.forms import FORMS, Form
from gblr.ops import native
from tests.ops.packed_blocks import random_packed

needs_kernels = pytest.mark.skipif(native._load()[0] is None, reason="no compiled CPU kernels here")
_MARKS = {"packed": needs_kernels}
each_form = pytest.mark.parametrize("form", [pytest.param(form, marks=_MARKS.get(form, ())) for form in FORMS])


def plan_as(layer: MatrixModule, form: Form) -> None:
    layer.planned = form
    layer.prepare()
    assert layer.form == form


def packed_linear(
    form: Form = "packed", out_features: int = 24, in_features: int = 20, seed: int = 0, num_blocks: int = 7
) -> StructuredLinear:
    """In evaluation mode; scaled, so that outputs are about as large as inputs."""
    matrix = random_packed(out_features, in_features, num_blocks, 2, seed=seed)
    matrix.u.div_(10)
    layer = StructuredLinear(matrix, torch.linspace(-1, 1, out_features))
    plan_as(layer, form)
    return layer.eval()


def packed_conv(form: Form = "packed") -> StructuredConv2d:
    geometry = ConvGeometry(3, (3, 3), padding=(1, 1), padding_mode="circular")
    layer = StructuredConv2d(random_packed(10, 27, 6, 2), geometry, torch.linspace(-1, 1, 10))
    plan_as(layer, form)
    return layer.eval()


def packed_mlp(form: Form = "packed") -> nn.Sequential:
    return nn.Sequential(packed_linear(form, 24, 20), nn.GELU(), packed_linear(form, 12, 24, seed=1)).eval()


def plain(layer: MatrixModule, x: Tensor) -> Tensor:
    """The layer's outputs for its contents as they are now, by no form; differentiable."""
    return nn.functional.linear(x, layer.weight, layer.bias)


def assert_up_to_date(layer: MatrixModule, x: Tensor, tolerance: float = 1e-5) -> None:
    """With and without the way for plain inference."""
    expected = plain(layer, x).detach()
    with torch.no_grad():
        quick = layer(x)
    for y in (quick, layer(x).detach()):
        assert y.dtype == expected.dtype and (y - expected).norm() <= tolerance * expected.norm()


def assert_near(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    assert actual.shape == expected.shape
    assert (actual - expected).detach().norm() <= tolerance * expected.detach().norm()

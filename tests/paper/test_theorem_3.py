"""Theorem 3, Corollaries 4 and 8, Lemma 7: the mask's derivatives exist, are finite, and do not vanish at w = 0.

`gradcheck` of the same derivatives is in tests/ops/test_masks.py.
"""

import math

import pytest
import torch

from gblr.ops.masks import gaudi_mask
from tests.helpers import SIGMAS, all_whole, assert_close, random_real

f64 = torch.float64


def derivatives(width, location, sigma, length):
    """(dm/dw, dm/dl), each (blocks, length): a block's mask depends on its own parameters alone."""
    width, location = width.detach().requires_grad_(), location.detach().requires_grad_()
    mask = gaudi_mask(width, location, sigma, length)
    columns = [torch.autograd.grad(mask[:, j].sum(), (width, location), retain_graph=True) for j in range(length)]
    return tuple(torch.stack(side, dim=1) for side in zip(*columns, strict=True))


def corollary_8(width, location, sigma, length, phase=2.0):
    """The printed sums over frequencies, k = 0 .. n // 2; `phase` is the factor in exp(-i pi k phase w / n)."""
    k = torch.arange(length // 2 + 1, dtype=f64)
    w, l = width[:, None], location[:, None]
    smoothing = torch.exp(-(k**2) / (2 * sigma**2))
    c = torch.exp(1j * math.pi * k / length) * smoothing / torch.sinc(k / length)
    turn = torch.exp(-2j * math.pi * k * l / length)
    dirichlet = smoothing * w * torch.sinc(w * k / length) / torch.sinc(k / length)
    dirichlet = dirichlet * torch.exp(1j * math.pi * k * (1 - w) / length)
    by_width = turn * torch.exp(-1j * math.pi * k * phase * w / length) * c
    by_location = turn * (-2j * math.pi * k / length) * dirichlet
    return tuple(torch.fft.irfft(side, n=length) for side in (by_width, by_location))


@pytest.mark.parametrize("sigma", SIGMAS)
@pytest.mark.parametrize("length", [1, 2, 7, 8])
def test_derivatives_are_those_of_corollary_8_for_every_whole_width_and_location(length, sigma):
    width, location = all_whole(length)
    for actual, printed in zip(
        derivatives(width, location, sigma, length), corollary_8(width, location, sigma, length), strict=True
    ):
        assert_close(actual, printed)


@pytest.mark.parametrize("sigma", [1.0, 100.0, math.inf])
@pytest.mark.parametrize("length", [96, 97])
def test_derivatives_are_those_of_corollary_8_for_real_parameters(length, sigma, generator):
    width, location = random_real(length, 8, generator)
    for actual, printed in zip(
        derivatives(width, location, sigma, length), corollary_8(width, location, sigma, length), strict=True
    ):
        assert_close(actual, printed)


def test_erratum_the_last_line_of_the_proof_of_lemma_7_loses_a_factor_of_two():
    width, location = torch.tensor([3.0], dtype=f64), torch.tensor([1.0], dtype=f64)
    actual = derivatives(width, location, 2.0, 12)[0]
    assert_close(actual, corollary_8(width, location, 2.0, 12, phase=2.0)[0])
    assert (actual - corollary_8(width, location, 2.0, 12, phase=1.0)[0]).norm() > 0.1


@pytest.mark.parametrize("sigma", [1e-3, *SIGMAS])
@pytest.mark.parametrize("length", [1, 8, 13])
def test_theorem_3_both_derivatives_are_finite_everywhere(length, sigma):
    for side in derivatives(*all_whole(length), sigma, length):
        assert side.isfinite().all()


@pytest.mark.parametrize("sigma", [1e-3, *SIGMAS])
@pytest.mark.parametrize("length", [1, 8, 13, 96])
@pytest.mark.parametrize("offset", [0.0, 0.4])  # the table's gradient and the FFT form's
def test_corollary_4_the_derivative_in_the_width_is_not_zero_at_width_zero(length, sigma, offset):
    """sum_j dm/dw[j] = 1, whatever sigma is: the mask sums to w."""
    location = torch.arange(length, dtype=f64)[:5] + offset
    by_width, by_location = derivatives(torch.zeros_like(location), location, sigma, length)
    assert (by_width.norm(dim=1) >= length**-0.5 - 1e-12).all()
    assert_close(by_width.sum(1), torch.ones_like(location))
    assert_close(by_location, torch.zeros_like(by_location))


def test_the_polar_form_has_a_zero_gradient_at_width_zero():
    """Why the mask is not written as torch.polar(magnitude, angle), which reads just as well."""
    k = torch.arange(1, 5, dtype=f64)
    width = torch.zeros((), dtype=f64, requires_grad=True)
    magnitude = width * torch.sinc(width * k / 8) / torch.sinc(k / 8)
    spectrum = torch.nn.functional.pad(torch.polar(magnitude, math.pi * k * (1 - width) / 8), (1, 0))
    (polar,) = torch.autograd.grad(torch.fft.irfft(spectrum, n=8)[0], width)
    ours = derivatives(torch.zeros(1, dtype=f64), torch.zeros(1, dtype=f64), math.inf, 8)[0][0, 0]
    assert polar == 0
    assert ours > 0.5

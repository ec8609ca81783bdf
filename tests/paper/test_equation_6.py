"""Eqs. 5-6: which frequencies. Printed over k = 0 .. n - 1 the mask is complex; over 0 .. n // 2 it is real."""

import math

import pytest
import torch

from gblr.ops.masks import boxcar_mask, gaudi_mask
from tests.helpers import assert_close, fft_mask

f64 = torch.float64


def spectrum_as_printed(width, location, sigma, length):
    k = torch.arange(length, dtype=f64)
    size = width * torch.sinc(width * k / length) / torch.sinc(k / length) * torch.exp(-(k**2) / (2 * sigma**2))
    return size * torch.exp(1j * math.pi * k * (1 - width) / length - 2j * math.pi * k * location / length)


@pytest.mark.parametrize("length", [7, 8])
@pytest.mark.parametrize(("width", "location"), [(0, 0), (3, 2), (5, 6), (7, 1)])
def test_equation_5_is_the_dft_of_the_boxcar(length, width, location):
    boxcar = boxcar_mask(torch.tensor(width), torch.tensor(location), length).double()
    printed = spectrum_as_printed(torch.tensor(width), torch.tensor(location), math.inf, length)
    assert (torch.fft.fft(boxcar) - printed).abs().max() < 1e-12


def test_the_printed_frequencies_give_a_complex_mask_and_ours_a_real_one_that_is_nearer():
    width, location = torch.tensor(92.0, dtype=f64), torch.tensor(300.0, dtype=f64)
    printed = torch.fft.ifft(spectrum_as_printed(width, location, 100.0, 768))
    ours, boxcar = gaudi_mask(width, location, 100.0, 768), boxcar_mask(width, location, 768)
    assert printed.imag.norm() > 0.3 * boxcar.norm()
    assert not ours.is_complex()
    assert (printed - boxcar).norm() / boxcar.norm() == pytest.approx(0.66, abs=0.01)
    assert (ours - boxcar).norm() / boxcar.norm() == pytest.approx(0.07, abs=0.01)


@pytest.mark.parametrize("length", [7, 8])
def test_ours_is_the_symmetric_spectrum_where_k_and_n_minus_k_share_their_smoothing(length):
    k = torch.arange(length, dtype=f64)
    sigma, width, location = 2.0, torch.tensor(3.0, dtype=f64), torch.tensor(5.0, dtype=f64)
    smoothing = torch.exp(-(torch.minimum(k, length - k) ** 2) / (2 * sigma**2))
    smoothed = torch.fft.ifft(torch.fft.fft(boxcar_mask(width, location, length)) * smoothing)
    assert smoothed.imag.abs().max() < 1e-12
    assert_close(gaudi_mask(width, location, sigma, length), smoothed.real)


def test_figure_7_non_integer_parameters_spike_without_smoothing_and_hardly_with_it():
    width, location = torch.tensor(128.5, dtype=f64), torch.tensor(191.8, dtype=f64)
    spiky, calm = (gaudi_mask(width, location, sigma, 512) for sigma in (math.inf, 100.0))
    assert spiky.max() > 1.1 and spiky.min() < -0.09
    assert calm.max() < 1.02 and calm.min() > -0.02
    assert_close(spiky, fft_mask(width, location, math.inf, 512))

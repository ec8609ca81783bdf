"""Lemma 5: the Gaudi mask tends to the boxcar. The limit holds; the printed bound on the error does not."""

import math

import pytest
import torch

from gblr.ops.masks import boxcar_mask, gaudi_mask

f64 = torch.float64


def relative_error(width: torch.Tensor, sigma: float, length: int) -> torch.Tensor:
    location = torch.zeros_like(width)
    boxcar = boxcar_mask(width, location, length)
    return (gaudi_mask(width, location, sigma, length) - boxcar).norm(dim=1) / boxcar.norm(dim=1)


def printed_bound(sigma: float, length: int) -> float:
    return 1 - math.exp(-((1 - 1 / length) ** 2) / (2 * sigma**2))


def bound_with_half_the_length(sigma: float, length: int) -> float:
    return 1 - math.exp(-((length / 2) ** 2) / (2 * sigma**2))


@pytest.mark.parametrize("length", [7, 8, 97, 768])
def test_gaudi_tends_to_boxcar(length):
    width = torch.arange(1, length + 1, dtype=f64)
    errors = torch.stack([relative_error(width, sigma, length) for sigma in (1, 10, 100, 1e4, 1e6, math.inf)])
    assert (errors[:-1] - errors[1:] >= -1e-13).all()  # never worse at a larger sigma
    assert errors[-2].max() < 1e-6
    assert errors[-1].max() == 0


@pytest.mark.parametrize(("width", "actual"), [(1, 0.76), (10, 0.22), (92, 0.074), (384, 0.036)])
def test_erratum_the_printed_bound_is_wrong_by_orders_of_magnitude(width, actual):
    error = relative_error(torch.tensor([width], dtype=f64), 100.0, 768).item()
    assert error == pytest.approx(actual, rel=0.05)
    assert printed_bound(100.0, 768) == pytest.approx(5e-5, rel=0.01)
    assert error > 500 * printed_bound(100.0, 768)


@pytest.mark.parametrize("length", [2, 3, 8, 13, 96, 97, 200, 768])
@pytest.mark.parametrize("sigma", [0.5, 1.0, 10.0, 100.0, 1000.0])
def test_with_half_the_length_in_the_exponent_the_bound_holds(length, sigma):
    width = torch.arange(1, length + 1, dtype=f64)
    assert relative_error(width, sigma, length).max() <= bound_with_half_the_length(sigma, length) + 1e-12

import math

import pytest
import torch

from gblr.ops import step
from gblr.ops.masks import gaudi_mask
from gblr.ops.step import step_spectrum, step_table
from tests.helpers import SIGMAS, assert_close

f64, CPU = torch.float64, torch.device("cpu")


def smoothed_step(x: torch.Tensor, sigma: float, n: int) -> torch.Tensor:
    """S(x) as docs/mathematics.md writes it, term by term."""
    total = x / n
    for k in range(1, (n + 1) // 2):
        smoothing = math.exp(-(k**2) / (2 * sigma**2))
        total = total + smoothing * torch.sin(2 * math.pi * k * x / n) / math.sin(math.pi * k / n) / n
    if n % 2 == 0:
        total = total + math.exp(-((n / 2) ** 2) / (2 * sigma**2)) * torch.sin(math.pi * x) / (2 * n)
    return total


@pytest.mark.parametrize("sigma", SIGMAS)
@pytest.mark.parametrize("length", [1, 2, 7, 8, 97])
def test_the_table_holds_the_step_and_its_slope_at_half_integers(length, sigma):
    x = (torch.arange(-2 * length, length, dtype=f64) + 0.5).requires_grad_()
    value = smoothed_step(x, sigma, length)
    slope = torch.autograd.grad(value.sum(), x)[0]
    table = step_table(length, sigma, f64, CPU)
    assert_close(table, torch.stack([value.detach() - 0.5, slope]))


@pytest.mark.parametrize("length", [1, 8, 97])
def test_the_step_grows_by_one_per_turn(length):
    value, slope = step_table(length, 3.0, f64, CPU)
    assert_close(value[length:], value[:-length] + 1)
    assert_close(slope[length:], slope[:-length])


def test_the_step_without_smoothing_is_the_exact_staircase():
    value = step_table(6, math.inf, torch.float32, CPU)[0]
    assert value.tolist() == [-2.0] * 6 + [-1.0] * 6 + [0.0] * 6


def test_tables_are_cached_by_length_sigma_dtype_and_device():
    for build in (step_table, step_spectrum):
        first = build(8, 2.0, f64, CPU)
        assert build(8, 2.0, f64, CPU) is first
        others = [build(9, 2.0, f64, CPU), build(8, 3.0, f64, CPU), build(8, 2.0, torch.float32, CPU)]
        assert all(other is not first for other in others)
        assert build(8, 2.0, f64, torch.device("meta")).is_meta


def test_the_caches_stay_bounded_while_sigma_anneals():
    for cache, build in ((step._cached_table, step_table), (step._cached_spectrum, step_spectrum)):
        for i in range(1000):
            build(4, 1.0 + i / 1000, torch.float32, CPU)
        assert cache.cache_info().currsize <= cache.cache_info().maxsize <= 256


def test_a_table_first_seen_in_inference_mode_serves_training():
    for location in (1.0, 1.5):  # by table, by FFT
        width, location = torch.tensor([3.0]), torch.tensor([location])
        with torch.inference_mode():
            gaudi_mask(width, location, 7.25, 8)
        gaudi_mask(width.requires_grad_(), location, 7.25, 8)[0, 1].backward()
        assert width.grad is not None


def test_a_table_first_seen_in_inference_mode_may_be_rewritten_later():
    for build in (step_table, step_spectrum):
        with torch.inference_mode():
            table = build(8, 4.25, f64, CPU)
        assert not table.is_inference()


def test_a_table_first_seen_under_fake_tensors_serves_real_ones():
    for location in (1.0, 1.5):
        with torch._subclasses.FakeTensorMode():
            gaudi_mask(torch.tensor([3.0]), torch.tensor([location]), 6.25, 8)
        mask = gaudi_mask(torch.tensor([3.0]), torch.tensor([location]), 6.25, 8)
        assert torch.isclose(mask.sum(), torch.tensor(3.0))


def test_a_table_first_seen_under_another_default_device_serves_the_cpu():
    with torch.device("meta"):
        table = step_table(8, 5.25, f64, CPU)
    assert_close(table, step._build_table(8, 5.25))

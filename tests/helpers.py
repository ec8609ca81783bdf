"""What several tests share: tolerances, the masks as the paper defines them, measuring, the plain matrix product."""

import math
import re
from collections.abc import Callable
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from tests.shape_hook import shapes_unchecked

TOLERANCE = {  # absolute and relative, for values around 1
    torch.float64: 1e-12,
    torch.float32: 2e-5,
    torch.bfloat16: 5e-2,
    torch.float16: 5e-3,
}
SIGMAS = [0.3, 1.0, 5.0, 100.0, math.inf]


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """Equal up to the tolerance of `actual`'s dtype; `expected` may be more precise."""
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual, expected.to(actual.dtype), rtol=tolerance, atol=tolerance)


def fft_mask(width: Tensor, location: Tensor, sigma: float, length: int) -> Tensor:
    """Eqs. 5-6 as printed, over k = 0 .. length // 2, by a real inverse FFT; autograd differentiates it."""
    k = torch.arange(length // 2 + 1, dtype=torch.float64)
    w, l = width.double()[..., None], location.double()[..., None]
    smoothing = torch.exp(-(k**2) / (2 * sigma**2))
    magnitude = smoothing * w * torch.sinc(w * k / length) / torch.sinc(k / length)
    angle = math.pi * k * (1 - w) / length - 2 * math.pi * k * l / length
    return torch.fft.irfft(torch.complex(magnitude * torch.cos(angle), magnitude * torch.sin(angle)), n=length)


def all_whole(length: int) -> tuple[Tensor, Tensor]:
    """Every whole (width, location) of an axis, in float64."""
    width, location = torch.meshgrid(torch.arange(length + 1), torch.arange(length), indexing="ij")
    return width.flatten().double(), location.flatten().double()


def random_whole(length: int, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random whole (width, location); the first two widths are 0 and `length`, the last location wraps around."""
    width = torch.randint(0, length + 1, (count,), generator=generator).double()
    location = torch.randint(0, length, (count,), generator=generator).double()
    width[:2] = torch.tensor([0.0, length])
    width[-1], location[-1] = length // 2 + 1, length - 1
    return width, location


def random_real(length: int, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random real (width, location); widths 0 and `length` among them."""
    width = torch.rand(count, dtype=torch.float64, generator=generator) * length
    location = torch.rand(count, dtype=torch.float64, generator=generator) * length
    width[:2] = torch.tensor([0.0, length])
    return width, location


@contextmanager
def raises_value_error(*words: object):
    """A ValueError whose message holds every one of `words`; our own check answers, not the shape hook of the tests."""
    with shapes_unchecked(), pytest.raises(ValueError) as caught:
        yield
    for word in words:
        assert re.search(rf"(?<![\w.]){re.escape(str(word))}(?![\w.]*\w)", str(caught.value)), (word, str(caught.value))


def compiled(function: Callable, backend: str = "aot_eager") -> Callable:
    """`torch.compile` without graph breaks. Graph and autograd are traced in full; generating machine code (inductor)
    would take many seconds each, so one test alone does it.
    """
    torch._dynamo.reset()
    run = torch.compile(function, fullgraph=True, backend=backend)

    def call(*args: Tensor) -> Tensor:
        with shapes_unchecked():
            return run(*args)

    return call


def peak_temporary_bytes(function: Callable[[], object]) -> tuple[int, int]:
    """(most bytes that the CPU allocator had out besides what is left at the end, bytes left at the end)."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        result = function()
    events = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    assert events and result is not None  # something was measured, and its result was alive
    return peak - now, now

"""The smoothed step S, of which every Gaudi mask is a difference, tabulated once per (length, sigma).

    mask[j] = S(j - l + 1/2) - S(j - l - w + 1/2)              S(x + n) = S(x) + 1
    S(x)    = x/n + (1/n) sum_{0<k<n/2} g(k) sin(2 pi k x / n) / sin(pi k / n)  [+ g(n/2) sin(pi x) / (2n) for even n]
    g(k)    = exp(-k^2 / (2 sigma^2))

docs/mathematics.md derives it from Eqs. 5-6 of the paper. Two forms are kept, both of shape (2, ...): entry 0 is for S,
entry 1 for its slope S'.

* the *table*, for whole w and l: S(i + 1/2) - 1/2 and S'(i + 1/2) for i = -2n .. n-1, so that the samples of S that a
  mask needs are one contiguous run of the table and neither wrapping nor a modulo is left to do;
* the *spectrum*, for real w and l: Fourier coefficients of S(x) - x/n and of S' - 1/n at x = j + 1/2, shifted by a
  phase.
"""

import functools
import math

import torch
from jaxtyping import Complex, Float
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

# sigma changes at every training step, so old entries are worthless; 256 covers a model with many layer shapes in one
# step.
_CACHE_SIZE = 256


def step_table(length: int, sigma: float, dtype: torch.dtype, device: torch.device) -> Float[Tensor, "2 three_length"]:
    """S(i + 1/2) - 1/2 and S'(i + 1/2) for i = -2 length .. length - 1. Cached; do not write into it."""
    if _is_traced():
        return _build_table(length, sigma).to(device=device, dtype=dtype)
    return _cached_table(length, sigma, dtype, device)


def step_spectrum(length: int, sigma: float, dtype: torch.dtype, device: torch.device) -> Float[Tensor, "2 freqs 2"]:
    """Fourier coefficients of S(x) - x/n and S'(x) - 1/n at x = j + 1/2, real and imaginary part last. Cached
    likewise.
    """
    if _is_traced():
        return torch.view_as_real(_build_spectrum(length, sigma)).to(device=device, dtype=dtype)
    return _cached_spectrum(length, sigma, dtype, device)


def _is_traced() -> bool:
    """Under compile, fake tensors or another dispatch mode a table may be no real tensor: it must not be cached."""
    return torch.compiler.is_compiling() or _get_current_dispatch_mode() is not None


@functools.lru_cache(_CACHE_SIZE)
@torch.inference_mode(False)  # a table first made in an evaluation must serve training too
def _cached_table(length: int, sigma: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return _build_table(length, sigma).to(device=device, dtype=dtype)


@functools.lru_cache(_CACHE_SIZE)
@torch.inference_mode(False)
def _cached_spectrum(length: int, sigma: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.view_as_real(_build_spectrum(length, sigma)).to(device=device, dtype=dtype)


def step_table_at(length: int, sigma: Float[Tensor, ""]) -> Float[Tensor, "2 three_length"]:
    """`step_table` in float64 for a sigma that is a tensor: built where it is, without waiting for its value."""
    return _build_table(length, sigma)


def step_spectrum_at(length: int, sigma: Float[Tensor, ""]) -> Float[Tensor, "2 freqs 2"]:
    """`step_spectrum` in float64, likewise."""
    return torch.view_as_real(_build_spectrum(length, sigma))


def _build_spectrum(length: int, sigma: float | Tensor) -> Tensor:
    """c_k = g(k) exp(i pi k / n) / (2i sin(pi k / n)) and 2 pi i k / n * c_k, with c_0 = 0; float64."""
    device = sigma.device if isinstance(sigma, Tensor) else "cpu"
    k = torch.arange(1, length // 2 + 1, dtype=torch.float64, device=device)
    smoothing = torch.exp(-0.5 * (k / sigma) ** 2)
    phase = math.pi * k / length
    value = torch.polar(smoothing / (2 * torch.sin(phase)), phase - math.pi / 2)
    slope = value * (2j * math.pi / length) * k
    return torch.nn.functional.pad(torch.stack([value, slope]), (1, 0))


def _build_table(length: int, sigma: float | Tensor) -> Tensor:
    periodic, slope = torch.fft.irfft(_build_spectrum(length, sigma), n=length)  # (length,) each
    x = torch.arange(length, dtype=torch.float64, device=periodic.device) + 0.5
    # Without smoothing S is the plain staircase; the sum above says so only up to rounding, and boxcars should be
    # exact.
    smooth = periodic + x / length - 0.5
    if isinstance(sigma, Tensor):
        centred = torch.where(sigma.isinf(), 0.0, smooth)
    else:
        centred = torch.zeros_like(x) if math.isinf(sigma) else smooth
    return torch.stack([torch.cat([centred - 2, centred - 1, centred]), (slope + 1 / length).repeat(3)])


def table_spectrum(table: Float[Tensor, "2 three_length"]) -> Float[Tensor, "freqs 2"]:
    """What `step_spectrum` holds of S, from the table."""
    length = table.shape[1] // 3
    x = torch.arange(length, dtype=table.dtype, device=table.device) + 0.5
    return torch.view_as_real(torch.fft.rfft(table[0, 2 * length :] + 0.5 - x / length))


def sliding_rows(table: Float[Tensor, " three_length"]) -> Float[Tensor, "starts length"]:
    """A view whose row 2 length - s holds the table's samples at j - s, j = 0 .. length-1, for whole shifts s."""
    return table.unfold(0, table.shape[0] // 3, 1)


def real_rows(spectrum: Float[Tensor, "freqs 2"], phase: Complex[Tensor, "*k freqs"], length: int) -> Tensor:
    """The periodic function of that spectrum at j + 1/2, shifted by `phase`, for any real shift."""
    return torch.fft.irfft(torch.view_as_complex(spectrum) * phase, n=length)


def phase_factor(shift: Float[Tensor, "*k"], length: int) -> Complex[Tensor, "*k freqs"]:
    """exp(-2 pi i f shift / length) for the frequencies f = 0 .. length // 2: (*k, freqs).

    The whole part of the shift is reduced exactly in integers; in float32 the product f * shift would lose four digits.
    """
    f = torch.arange(length // 2 + 1, device=shift.device)
    whole = shift.detach().round()
    turns = (f * whole.long()[..., None]) % length + f * (shift - whole)[..., None]
    angle = turns * (-2 * math.pi / length)
    return torch.complex(torch.cos(angle), torch.sin(angle))

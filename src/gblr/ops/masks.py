"""Boxcar masks (paper Eq. 2), Gaudi masks (Eqs. 5-6) and straight-through rounding (A.5.1)."""

import torch
from jaxtyping import Float, Real
from torch import Tensor

from gblr.ops.checks import are_whole, check_length, check_sigma, check_structure
from gblr.ops.masked_content import masked_content
from gblr.ops.step import phase_factor, step_spectrum


def boxcar_mask(
    width: Real[Tensor, "*k"] | float, location: Real[Tensor, "*k"] | float, length: int
) -> Float[Tensor, "*k {length}"]:
    """Cyclic run of `width` ones starting at `location` (paper Eq. 2). Both are in elements; `location` is cyclic.

    >>> boxcar_mask(torch.tensor([2, 3]), torch.tensor([1, 4]), length=6)
    tensor([[0., 1., 1., 0., 0., 0.],
            [1., 0., 0., 0., 1., 1.]])
    """
    width, location = check_structure(width, location, length)
    w, l = _exact(width), _exact(location)
    first = l.ceil()
    offset = (torch.arange(length, dtype=first.dtype, device=first.device) - first[..., None]) % length
    # a location between two elements leaves exactly `width` of them inside, unless the width is no whole number either
    reach = torch.where(w == w.round(), w, w - (first - l))
    return (offset < reach[..., None]).to(_mask_dtype(width, location))


def gaudi_mask(
    width: Real[Tensor, "*k"] | float, location: Real[Tensor, "*k"] | float, sigma: float, length: int
) -> Float[Tensor, "*k {length}"]:
    """Smooth boxcar, differentiable in `width` and `location` (paper Eqs. 5-6). Tends to `boxcar_mask` as `sigma`
    grows.

    `width` (0 to `length`) and `location` (cyclic) are in elements and may be real; `math.inf` means no smoothing.
    Frequencies are 0 .. length // 2, conjugate-symmetric above, so the mask is real. Gradients are exact everywhere, at
    width 0 and width `length` too.

    >>> mask = gaudi_mask(torch.tensor([3.0]), torch.tensor([2.0]), sigma=2.0, length=8)
    >>> [round(value, 2) for value in mask[0].tolist()]
    [-0.01, 0.21, 0.79, 1.01, 0.79, 0.21, -0.01, 0.01]
    >>> gaudi_mask(torch.tensor([3.0]), torch.tensor([2.0]), sigma=torch.inf, length=8)
    tensor([[0., 0., 1., 1., 1., 0., 0., 0.]])
    """
    width, location = check_structure(width, location, length)
    sigma = check_sigma(sigma)
    dtype = _mask_dtype(width, location)
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    w, l = width.to(compute), location.to(compute)
    if are_whole(width, location):
        ones = w.new_ones(()).expand(*w.shape, length)
        return masked_content(ones, w, l, sigma, whole=True).to(dtype)
    spectrum = torch.view_as_complex(step_spectrum(length, sigma, compute, w.device)[0])
    steps = spectrum * phase_factor(l, length) * (1 - phase_factor(w, length))  # (*k, freqs): up at l, down at l + w
    return (torch.fft.irfft(steps, n=length) + w[..., None] / length).to(dtype)


def round_ste(x: Float[Tensor, "*k"], align: int = 1, length: int | None = None) -> Float[Tensor, "*k"]:
    """Rounds to the nearest multiple of `align`; the gradient passes straight through (paper A.5.1).

    With `length` the end of the axis counts as a multiple too, so that a full width stays possible where `align` does
    not divide the axis (and a location there means location 0), and nothing is rounded beyond it.

    >>> round_ste(torch.tensor([3.4, 11.0, 94.0]), align=8, length=100)
    tensor([  0.,   8.,  96.])
    >>> round_ste(torch.tensor([99.0]), align=8, length=100)
    tensor([100.])
    """
    if align < 1:
        raise ValueError(f"`align` must be at least 1; got {align}.")
    if length is not None:
        check_length(length)
    value = x.detach()
    # the bracket is exactly 0; x + (rounded - x) would not be exactly whole
    return nearest_multiple(value, align, length) + (x - value)


def nearest_multiple(value: Float[Tensor, "*k"], align: int, length: int | None) -> Float[Tensor, "*k"]:
    """`round_ste` without a gradient."""
    rounded = value.round() if align == 1 else (value / align).round() * align
    if length is None:
        return rounded
    last = length // align * align  # the largest multiple on the axis
    rounded = rounded.clamp(max=last)
    return rounded if last == length else torch.where(value > (last + length) / 2, length, rounded)


def _mask_dtype(width: Tensor, location: Tensor) -> torch.dtype:
    dtype = torch.promote_types(width.dtype, location.dtype)
    return dtype if dtype.is_floating_point else torch.get_default_dtype()


def _exact(t: Tensor) -> Tensor:
    """In a dtype that knows every position of an axis: bfloat16 has but the even ones above 256."""
    return t.to(torch.promote_types(t.dtype, torch.float32) if t.is_floating_point() else torch.long)

import math

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from hypothesis import given
from hypothesis import strategies as st

from gblr.ops import checks
from gblr.ops.masks import boxcar_mask, gaudi_mask, round_ste
from tests.helpers import (
    SIGMAS,
    all_whole,
    assert_close,
    compiled,
    fft_mask,
    raises_value_error,
    random_real,
    random_whole,
)
from tests.shape_hook import shapes_unchecked

LENGTHS = [1, 2, 3, 7, 8, 12, 13]
f64 = torch.float64


def ones_by_definition(width: int, location: int, length: int) -> list[float]:
    """Eq. 2 read aloud: 1 where l <= j + a n < l + w for a = 0 or 1."""
    return [
        float(any(location <= j + a * length < location + width for a in (0, 1))) for j in range(length)
    ]  # fmt: skip


# boxcar_mask


@pytest.mark.parametrize("make", [boxcar_mask, lambda w, l, n: gaudi_mask(w, l, 2.0, n)])
def test_plain_numbers_are_widths_and_locations_too(make):
    expected = make(torch.tensor([3.0]), torch.tensor([6.0]), 8)[0]
    assert_close(make(3.0, 6.0, 8), expected)
    assert_close(make(3, 6, 8), expected)
    assert_close(make(torch.tensor([3.0, 3.0]), 6, 8), expected.expand(2, 8))
    with raises_value_error("`width`"):
        make(9, 6, 8)


@pytest.mark.parametrize("length", LENGTHS)
def test_boxcar_is_equation_2_for_every_width_and_location(length):
    width, location = all_whole(length)
    expected = [ones_by_definition(int(w), int(l), length) for w, l in zip(width, location, strict=True)]
    assert torch.equal(boxcar_mask(width, location, length), torch.tensor(expected, dtype=f64))


@given(length=st.integers(1, 40), location=st.integers(-100, 100), data=st.data())
def test_boxcar_has_width_ones_and_wraps_around(length, location, data):
    width = data.draw(st.integers(0, length))
    mask = boxcar_mask(torch.tensor(width), torch.tensor(location), length)
    assert mask.sum() == width
    assert torch.equal(mask, boxcar_mask(torch.tensor(width), torch.tensor(0), length).roll(location))


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int8, torch.int32, torch.int64, torch.bfloat16, torch.float16, torch.float32, f64]
)
def test_boxcar_is_exact_for_every_dtype_on_a_long_axis(dtype):
    mask = boxcar_mask(torch.tensor([10], dtype=dtype), torch.tensor([112], dtype=dtype), 3001)
    assert mask[0].nonzero().flatten().tolist() == list(range(112, 122))
    assert mask.dtype == (dtype if dtype.is_floating_point else torch.get_default_dtype())


def test_boxcar_is_exact_for_a_bfloat16_location_beyond_its_spacing_of_one():
    location = torch.tensor([1024], dtype=torch.bfloat16)
    mask = boxcar_mask(torch.tensor([10], dtype=torch.bfloat16), location, 3001)
    assert mask[0].nonzero().flatten().tolist() == list(range(1024, 1034))


@pytest.mark.parametrize("location_dtype", [torch.int32, torch.int64, torch.float32])
@pytest.mark.parametrize(("dtype", "length"), [(torch.bfloat16, 600), (torch.float16, 5000)])
def test_boxcar_is_exact_for_half_precision_widths_at_locations_of_another_dtype(dtype, length, location_dtype):
    width = torch.tensor([2, length // 2, length], dtype=dtype)
    mask = boxcar_mask(width, torch.tensor([5, length - 1, 3], dtype=location_dtype), length)
    assert mask.float().sum(1).tolist() == width.tolist()


@pytest.mark.parametrize("location", [1e-20, 1e-9, -1e-9, 0.25, 7.9999999])
@pytest.mark.parametrize("dtype", [torch.float32, f64])
def test_boxcar_has_width_ones_between_two_elements_too(location, dtype):
    mask = boxcar_mask(torch.arange(9, dtype=dtype), torch.full((9,), location, dtype=dtype), 8)
    assert mask.sum(1).tolist() == list(range(9))


# gaudi_mask: values


@pytest.mark.parametrize("sigma", SIGMAS)
@pytest.mark.parametrize("length", LENGTHS)
def test_gaudi_agrees_with_the_fft_form_for_every_whole_width_and_location(length, sigma):
    width, location = all_whole(length)
    assert_close(gaudi_mask(width, location, sigma, length), fft_mask(width, location, sigma, length))


@pytest.mark.parametrize("sigma", SIGMAS)
@pytest.mark.parametrize("make", [random_whole, random_real])
@pytest.mark.parametrize("length", [97, 768])
def test_gaudi_agrees_with_the_fft_form_on_long_axes(length, make, sigma, generator):
    width, location = make(length, 40, generator)
    assert_close(gaudi_mask(width, location, sigma, length), fft_mask(width, location, sigma, length))


@pytest.mark.parametrize("sigma", SIGMAS)
@pytest.mark.parametrize("length", LENGTHS)
def test_gaudi_agrees_with_the_fft_form_for_real_parameters(length, sigma, generator):
    width, location = random_real(length, 30, generator)
    assert_close(gaudi_mask(width, location, sigma, length), fft_mask(width, location, sigma, length))


@pytest.mark.parametrize("make", [random_whole, random_real])
@pytest.mark.parametrize("sigma", [1.0, 100.0, math.inf])
def test_gaudi_in_float32_agrees_with_the_fft_form_in_float64(make, sigma, generator):
    width, location = (t.float() for t in make(768, 40, generator))
    mask = gaudi_mask(width, location, sigma, 768)
    assert mask.dtype == torch.float32
    assert_close(mask, fft_mask(width, location, sigma, 768))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gaudi_in_half_precision_is_the_rounded_exact_mask(dtype, generator):
    width, location = (t.to(dtype) for t in random_real(96, 10, generator))
    mask = gaudi_mask(width, location, 5.0, 96)
    assert mask.dtype == dtype
    assert_close(mask, fft_mask(width, location, 5.0, 96))


def test_gaudi_takes_integer_tensors():
    width, location = torch.tensor([3, 0, 8]), torch.tensor([6, 1, 2])
    assert_close(gaudi_mask(width, location, 2.0, 8), fft_mask(width, location, 2.0, 8))


@pytest.mark.parametrize("length", [*LENGTHS, 768])
def test_gaudi_without_smoothing_is_exactly_the_boxcar(length, generator):
    width, location = all_whole(length) if length < 100 else random_whole(length, 50, generator)
    mask = gaudi_mask(width.float(), location.float(), math.inf, length)
    assert torch.equal(mask, boxcar_mask(width.float(), location.float(), length))


@pytest.mark.parametrize("sigma", [1.0, math.inf])
@pytest.mark.parametrize("make", [random_whole, random_real])
def test_gaudi_sums_to_the_width(make, sigma, generator):
    width, location = make(97, 20, generator)
    assert_close(gaudi_mask(width, location, sigma, 97).sum(-1), width)


@given(
    length=st.integers(1, 30),
    turns=st.integers(-3, 3),
    shift=st.integers(0, 29),
    width_frac=st.floats(0, 1),
    location_frac=st.floats(0, 1),
    whole=st.booleans(),
    sigma=st.sampled_from(SIGMAS),
)
def test_a_shifted_location_rolls_the_mask_around_the_axis(
    length, turns, shift, width_frac, location_frac, whole, sigma
):
    width, location = torch.tensor([width_frac, location_frac], dtype=f64) * length
    if whole:
        width, location = width.round(), location.round()
    moved = gaudi_mask(width, location + shift + turns * length, sigma, length)
    assert_close(moved, gaudi_mask(width, location, sigma, length).roll(shift, -1))


@given(shape=st.lists(st.integers(0, 3), max_size=3), length=st.integers(1, 9), whole=st.booleans())
def test_masks_keep_the_batch_shape(shape, length, whole):
    generator = torch.Generator().manual_seed(1)
    width, location = torch.rand(2, *shape, dtype=f64, generator=generator) * length
    if whole:
        width, location = width.round(), location.round()
    mask = gaudi_mask(width, location, 2.0, length)
    assert mask.shape == boxcar_mask(width, location, length).shape == (*shape, length)
    assert_close(mask, fft_mask(width, location, 2.0, length) if mask.numel() else mask)


def test_one_width_broadcasts_over_many_locations():
    width, location = torch.tensor(3.0, dtype=f64), torch.arange(8.0, dtype=f64)
    with shapes_unchecked():  # the annotation speaks of equal shapes
        mask = gaudi_mask(width, location, 2.0, 8)
    assert_close(mask, fft_mask(width.expand(8), location, 2.0, 8))


# gaudi_mask: gradients


@pytest.fixture
def widths_unchecked(monkeypatch):
    """Finite differences at width 0 and width n step over the ends."""
    monkeypatch.setattr(checks, "_check_width_values", lambda width, length: None)


@pytest.mark.parametrize("sigma", SIGMAS)
@pytest.mark.parametrize("length", [1, 7, 8])
def test_gaudi_passes_gradcheck_at_every_whole_width_and_some_real_ones(length, sigma, generator, widths_unchecked):
    ends = torch.arange(length + 1, dtype=f64)
    middle = torch.rand(3, dtype=f64, generator=generator) * length
    for width in (ends, middle):  # apart, as one real number sends all of them to the FFT form
        location = torch.randint(0, length, width.shape, generator=generator).double()
        inputs = (width.requires_grad_(), location.requires_grad_())
        assert torch.autograd.gradcheck(lambda w, l: gaudi_mask(w, l, sigma, length), inputs)


@pytest.mark.parametrize("sigma", SIGMAS)
@pytest.mark.parametrize("make", [random_whole, random_real])
@pytest.mark.parametrize("length", [97, 768])
def test_gaudi_gradients_agree_with_autograd_through_the_fft_form(length, make, sigma, generator):
    width, location = (t.requires_grad_() for t in make(length, 20, generator))
    upstream = torch.randn(20, length, dtype=f64, generator=generator) / length
    actual = torch.autograd.grad(gaudi_mask(width, location, sigma, length), (width, location), upstream)
    expected = torch.autograd.grad(fft_mask(width, location, sigma, length), (width, location), upstream)
    for a, e in zip(actual, expected, strict=True):
        assert_close(a, e)


# compile, vmap, fake tensors


@pytest.mark.parametrize("make", [random_whole, random_real])
def test_masks_compile_to_one_graph_with_their_gradients(make, generator):
    width, location = make(12, 5, generator)
    upstream = torch.randn(5, 12, dtype=f64, generator=generator)
    for mask in (boxcar_mask, lambda w, l, n: gaudi_mask(w, l, 2.0, n)):
        run = compiled(lambda w, l, mask=mask: mask(w, l, 12))
        assert_close(run(width, location), mask(width, location, 12))
    inputs = width.requires_grad_(), location.requires_grad_()
    actual = torch.autograd.grad(run(*inputs), inputs, upstream)
    expected = torch.autograd.grad(fft_mask(*inputs, 2.0, 12), inputs, upstream)
    for a, e in zip(actual, expected, strict=True):
        assert_close(a, e)


def test_gaudi_compiles_for_integer_tensors():
    width, location = torch.tensor([0, 3, 8]), torch.tensor([6, 1, 2])
    run = compiled(lambda w, l: gaudi_mask(w, l, 2.0, 8))
    assert_close(run(width, location), gaudi_mask(width, location, 2.0, 8))


@pytest.mark.parametrize("make", [random_whole, random_real])
@pytest.mark.parametrize("in_dims", [(0, 0), (0, None), (None, 0)])
def test_masks_agree_with_a_loop_under_vmap(make, in_dims, generator):
    width, location = (t.reshape(4, 3) for t in make(9, 12, generator))
    args = [t if dim == 0 else t[1] for t, dim in zip((width, location), in_dims, strict=True)]
    pairs = [[t[i] if dim == 0 else t for t, dim in zip(args, in_dims, strict=True)] for i in range(4)]
    for mask in (lambda w, l: gaudi_mask(w, l, 2.0, 9), lambda w, l: boxcar_mask(w, l, 9)):
        assert_close(torch.func.vmap(mask, in_dims)(*args), torch.stack([mask(*pair) for pair in pairs]))


@pytest.mark.parametrize("make", [random_whole, random_real])
def test_gaudi_has_derivatives_in_forward_mode(make, generator):
    inputs = make(9, 6, generator)
    directions = [torch.randn(6, generator=generator, dtype=f64) for _ in inputs]
    _, expected = torch.func.jvp(lambda w, l: gaudi_mask(w, l, 2.0, 9), inputs, tuple(directions))
    with forward_ad.dual_level():
        duals = (forward_ad.make_dual(*pair) for pair in zip(inputs, directions, strict=True))
        tangent = forward_ad.unpack_dual(gaudi_mask(*duals, 2.0, 9)).tangent
    assert tangent is not None
    assert_close(tangent, expected)


def test_gaudi_gives_gradients_per_sample_under_vmap(generator):
    width, location = random_real(9, 6, generator)
    actual = torch.func.vmap(torch.func.grad(lambda w, l: gaudi_mask(w, l, 2.0, 9)[3], argnums=(0, 1)))(width, location)
    inputs = width.requires_grad_(), location.requires_grad_()
    expected = torch.autograd.grad(fft_mask(*inputs, 2.0, 9)[:, 3].sum(), inputs)
    for a, e in zip(actual, expected, strict=True):
        assert_close(a, e)


def test_masks_have_shapes_on_the_meta_device_and_on_fake_tensors():
    width = torch.empty(3, 2, device="meta")
    assert gaudi_mask(width, width, 2.0, 8).shape == boxcar_mask(width, width, 8).shape == (3, 2, 8)
    with torch._subclasses.FakeTensorMode():
        assert gaudi_mask(torch.ones(3), torch.ones(3), 2.0, 8).shape == (3, 8)


# wrong input

CALLS = [lambda w, l, n: boxcar_mask(w, l, n), lambda w, l, n: gaudi_mask(w, l, 2.0, n)]
both_masks = pytest.mark.parametrize("mask", CALLS, ids=["boxcar", "gaudi"])


@both_masks
def test_a_negative_width_is_refused(mask):
    with raises_value_error("`width`", "[0, 8]", "-1", "3"):
        mask(torch.tensor([3.0, -1.0]), torch.tensor([1.0, 1.0]), 8)


@both_masks
def test_a_width_over_the_length_is_refused(mask):
    with raises_value_error("`width`", "[0, 8]", "8.5"):
        mask(torch.tensor([8.5]), torch.tensor([1.0]), 8)


@both_masks
def test_integer_widths_are_checked_too(mask):
    with raises_value_error("`width`", "[0, 8]", "9"):
        mask(torch.tensor([9]), torch.tensor([1]), 8)


@both_masks
def test_a_nan_width_is_refused(mask):
    with raises_value_error("`width`", "[0, 8]", "NaN"):
        mask(torch.tensor([3.0, math.nan]), torch.tensor([1.0, 1.0]), 8)


@both_masks
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_location_that_is_not_finite_is_refused(mask, bad):
    with raises_value_error("`location`", "finite", "NaN"):
        mask(torch.tensor([3.0, 3.0]), torch.tensor([1.0, bad]), 8)


@both_masks
def test_shapes_that_do_not_match_are_refused(mask):
    with raises_value_error("`width`", "`location`", "(3,)", "(4,)"):
        mask(torch.ones(3), torch.ones(4), 8)


@both_masks
@pytest.mark.parametrize("length", [0, -2])
def test_a_length_below_one_is_refused(mask, length):
    with raises_value_error("`length`", "1", length):
        mask(torch.zeros(1), torch.zeros(1), length)


@both_masks
@pytest.mark.parametrize("dtype", [torch.bool, torch.complex64])
def test_dtypes_that_are_no_numbers_on_an_axis_are_refused(mask, dtype):
    with raises_value_error("`width`", dtype):
        mask(torch.ones(1, dtype=dtype), torch.ones(1), 8)
    with raises_value_error("`location`", dtype):
        mask(torch.ones(1), torch.ones(1, dtype=dtype), 8)


@pytest.mark.parametrize("sigma", [0.0, -1.0, math.nan, -math.inf])
def test_a_sigma_that_is_not_positive_is_refused(sigma):
    with raises_value_error("`sigma`", "0", sigma):
        gaudi_mask(torch.tensor([3.0]), torch.tensor([1.0]), sigma, 8)


@both_masks
def test_values_are_not_checked_under_vmap_but_shapes_are(mask):
    out = torch.func.vmap(lambda w, l: mask(w, l, 8))(torch.tensor([9.0, math.nan]), torch.tensor([1.0, 1.0]))
    assert out.shape == (2, 8)
    with raises_value_error("`width`", "`location`", "(3,)", "(4,)"):
        torch.func.vmap(lambda w, l: mask(w, l, 8))(torch.ones(2, 3), torch.ones(2, 4))


@both_masks
def test_values_are_not_checked_under_compile_but_shapes_are(mask):
    assert compiled(lambda w, l: mask(w, l, 8))(torch.tensor([9.0, -1.0]), torch.tensor([1.0, 1.0])).shape == (2, 8)
    torch._dynamo.reset()
    run = torch.compile(lambda w, l: mask(w, l, 8), backend="eager")  # with fullgraph the error would be dynamo's own
    with raises_value_error("`width`", "`location`", "(3,)", "(4,)"):
        run(torch.ones(3), torch.ones(4))


def test_values_are_not_read_while_a_cuda_graph_is_captured(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert gaudi_mask(torch.tensor([9.0]), torch.tensor([0.5]), 2.0, 8).shape == (1, 8)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with raises_value_error("`width`", "[0, 8]"):
        gaudi_mask(torch.tensor([9.0]), torch.tensor([0.5]), 2.0, 8)


# round_ste


@given(x=st.floats(-50, 150), align=st.integers(1, 9))
def test_rounding_gives_the_nearest_multiple(x, align):
    rounded = round_ste(torch.tensor(x, dtype=f64), align).item()
    assert rounded % align == 0
    assert abs(rounded - x) <= align / 2 + 1e-12


@given(fraction=st.floats(0, 1), length=st.integers(1, 100), align=st.integers(1, 20), single=st.booleans())
def test_rounding_on_an_axis_gives_the_nearest_multiple_or_the_end(fraction, length, align, single):
    x = torch.tensor(fraction * length, dtype=torch.float32 if single else f64)
    allowed = {*range(0, length + 1, align), length}
    rounded = round_ste(x, align, length).item()
    assert rounded in allowed
    assert abs(rounded - x.item()) <= min(abs(a - x.item()) for a in allowed) + 1e-4


def test_rounding_passes_the_gradient_straight_through():
    x = torch.tensor([0.2, 3.7, 97.0, 99.9], requires_grad=True)
    upstream = torch.tensor([1.0, -2.0, 3.0, 4.0])
    for rounded in (round_ste(x), round_ste(x, align=8), round_ste(x, align=8, length=100)):
        assert torch.equal(torch.autograd.grad(rounded, x, upstream)[0], upstream)


def test_rounded_values_are_exactly_whole_in_float32():
    x = torch.rand(10_000, generator=torch.Generator().manual_seed(0)) * 768
    rounded = round_ste(x.requires_grad_())
    assert torch.equal(rounded, x.round())


def test_rounding_refuses_an_align_or_a_length_below_one():
    with raises_value_error("`align`", "1", "0"):
        round_ste(torch.tensor([2.5]), align=0)
    with raises_value_error("`length`", "1", "0"):
        round_ste(torch.tensor([2.5]), length=0)

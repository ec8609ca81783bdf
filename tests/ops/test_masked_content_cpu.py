"""The compiled CPU kernels of masked_content of all instruction sets that this machine has, judged by the reference."""

import math
import os
import subprocess
import sys

import pytest
import torch

from gblr.ops import native
from gblr.ops.masked_content import cpu, library, masked_content, reference
from gblr.ops.step import step_table
from tests.helpers import peak_temporary_bytes

AWKWARD = [(1, 1, 1), (3, 2, 7), (5, 1, 63), (4, 3, 100), (3, 2, 1500), (40, 1, 768)]  # blocks, block_rank, length
each_sigma = pytest.mark.parametrize("sigma", [1.0, 20.0, math.inf])
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@pytest.fixture(scope="module", params=["avx2", "avx512"])
def kernels(request):
    if request.param not in native._CHOICES.get(torch.backends.cpu.get_cpu_capability(), ()):
        pytest.skip(f"this processor has no {request.param}")
    library, reason = native._open(request.param)
    if library is None:
        pytest.skip(reason)
    return cpu.Kernels(library)


@pytest.fixture
def unwritten_is_nan(monkeypatch):
    """An output that a kernel forgets shows."""
    empty_like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: empty_like(*a, **k).fill_(math.nan))


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def inputs(blocks, block_rank, length, sigma, dtype, generator):
    """(grad, content, width, location, table)."""
    content, grad = (torch.randn(blocks, block_rank, length, generator=generator).to(dtype) for _ in range(2))
    width = torch.randint(0, length + 1, (blocks,), generator=generator).float()
    location = torch.randint(-2 * length, 3 * length, (blocks,), generator=generator).float()
    width[:3] = torch.tensor([0.0, length, 1.0])[: len(width)]  # dead, full, a single element
    return grad, content, width, location, step_table(length, sigma, torch.float32, torch.device("cpu"))


def assert_same_bits(actual, expected):
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(actual.signbit() & ~actual.isnan(), expected.signbit() & ~expected.isnan())


def assert_gradients_agree(kernels, grad, content, width, location, table, needs=(True, True)):
    """Bit for bit for contents; within the rounding of a sum in float32 for widths and locations."""
    found = kernels.backward(grad, content, width, location, table, *needs)
    plain = reference.backward(grad, content, width, location, table, *needs)
    exact = reference.backward(*(t.double() for t in (grad, content, width, location, table)), *needs)
    assert_same_bits(found[0], plain[0])
    # sizes of the sums' terms bound the error; the sums themselves may cancel
    scale = (grad.double() * content.double()).abs().sum((1, 2)) * table[1].abs().max() if needs[1] else torch.ones(0)
    for got, want in zip(found[1:], exact[1:], strict=True):
        assert got.dtype == torch.float32 and got.shape == want.shape
        assert ((got - want).abs() <= 1e-6 * scale).all()


# values and gradients


@each_sigma
@each_dtype
@pytest.mark.parametrize(("blocks", "block_rank", "length"), AWKWARD)
def test_the_kernels_agree_with_the_definition(
    kernels, unwritten_is_nan, blocks, block_rank, length, sigma, dtype, generator
):
    grad, *rest = inputs(blocks, block_rank, length, sigma, dtype, generator)
    assert_same_bits(kernels.forward(*rest), reference.forward(*rest))
    for needs in ((True, True), (True, False), (False, True)):
        assert_gradients_agree(kernels, grad, *rest, needs=needs)


@each_dtype
@pytest.mark.parametrize("shape", [(0, 1, 8), (0, 3, 8), (2, 0, 8)])
def test_there_may_be_nothing_to_do(kernels, shape, dtype, generator):
    grad, *rest = inputs(*shape, 2.0, dtype, generator)
    assert kernels.forward(*rest).shape == shape
    for needs in ((True, True), (True, False), (False, True), (False, False)):
        assert_gradients_agree(kernels, grad, *rest, needs=needs)


def test_every_bfloat16_is_read_and_rounded_as_torch_does(kernels, generator):
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16).reshape(128, 1, 512)
    _, _, *rest = inputs(128, 1, 512, 1.0, torch.bfloat16, generator)
    assert every.isnan().any() and every.isinf().any()
    assert_same_bits(kernels.forward(every, *rest), reference.forward(every, *rest))


@each_dtype
def test_infinite_and_undefined_contents_come_out_as_in_the_definition(kernels, dtype, generator):
    _, content, *rest = inputs(6, 2, 100, math.inf, dtype, generator)
    content[:, :, ::7], content[:, :, 3::11] = math.inf, math.nan  # where the mask is 0 too: inf * 0 is no 0
    content[:, :, 5::13] = -0.0
    assert_same_bits(kernels.forward(content, *rest), reference.forward(content, *rest))


def test_strided_tensors_are_read_correctly(kernels, generator):
    grad, content, width, location, table = inputs(4, 2, 33, 3.0, torch.float32, generator)
    strided = [t.transpose(0, 2).contiguous().transpose(0, 2) for t in (grad, content)]
    structure = [torch.stack([t, -t], 1)[:, 0] for t in (width, location)]
    assert not any(t.is_contiguous() for t in strided + structure)
    plain = kernels.backward(grad, content, width, location, table, True, True)
    for got, want in zip(kernels.backward(*strided, *structure, table, True, True), plain, strict=True):
        assert_same_bits(got, want)
    assert_same_bits(kernels.forward(strided[1], *structure, table), kernels.forward(content, width, location, table))
    summed = kernels.backward(grad[:1, :1, :1].expand_as(grad), content, width, location, table, True, True)
    assert summed[0].is_contiguous() and summed[0].shape == content.shape


def test_locations_far_from_the_axis_are_reduced_without_loss(kernels, generator):
    _, content, width, _, table = inputs(50, 1, 97, 2.0, torch.float32, generator)
    location = torch.randint(-(2**24), 2**24, (50,), generator=generator).float()
    location[0], location[1] = 97 * 2**17 - 1, -97 * 2**17 + 1
    assert_same_bits(
        kernels.forward(content, width, location, table), reference.forward(content, width, location, table)
    )


@pytest.mark.parametrize("sigma", [1.0, math.inf])
def test_moving_a_full_block_has_no_gradient_at_all(kernels, sigma, generator):
    grad, content, width, location, table = inputs(6, 2, 97, sigma, torch.float32, generator)
    width[:] = torch.tensor([97.0, 1.0, 96.0, 97.0, 50.0, 97.0])
    _, _, grad_location = kernels.backward(grad, content, width, location, table, True, True)
    assert torch.equal(grad_location == 0, width == 97)


@pytest.mark.parametrize("name", ["width", "location"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_block_that_would_lead_out_of_the_table_is_an_error_and_not_a_crash(kernels, name, value, generator):
    grad, content, width, location, table = inputs(4, 2, 100, 2.0, torch.float32, generator)
    {"width": width, "location": location}[name][2] = value
    with pytest.raises(ValueError, match=r"`width` must lie in \[0, 100\] and `location` be finite"):
        kernels.forward(content, width, location, table)
    with pytest.raises(ValueError, match=r"`width` must lie in \[0, 100\] and `location` be finite"):
        kernels.backward(grad, content, width, location, table, True, True)


@pytest.mark.parametrize("value", [-1.0, 101.0])
def test_a_width_beside_the_axis_is_an_error(kernels, value, generator):
    _, content, width, location, table = inputs(4, 2, 100, 2.0, torch.float32, generator)
    width[2] = value
    with pytest.raises(ValueError, match=r"`width` must lie in \[0, 100\]"):
        kernels.forward(content, width, location, table)


# threads


@each_dtype
def test_the_number_of_threads_changes_no_bit(kernels, dtype, generator, request):
    grad, *rest = inputs(130, 3, 300, 5.0, dtype, generator)  # enough for several threads
    one = kernels.forward(*rest), *kernels.backward(grad, *rest, True, True)
    request.getfixturevalue("two_threads")
    two = kernels.forward(*rest), *kernels.backward(grad, *rest, True, True)
    for a, b in zip(one, two, strict=True):
        assert_same_bits(a, b)


def test_an_invalid_block_of_another_thread_is_found_too(kernels, two_threads, generator):
    _, content, width, location, table = inputs(130, 3, 300, 5.0, torch.float32, generator)
    for k in (0, 129):
        broken = width.index_fill(0, torch.tensor([k]), math.nan)
        with pytest.raises(ValueError, match="`width`"):
            kernels.forward(content, broken, location, table)


# the choice


def choice(*, dtype=torch.float32, structure=torch.float32, table=None, location=None):
    content, width = torch.ones(2, 1, 8, dtype=dtype), torch.ones(2, dtype=structure)
    location = width if location is None else location
    table = step_table(8, 2.0, structure, torch.device("cpu")) if table is None else table
    return library._implementation(content, width, location, table)


needs_kernels = pytest.mark.skipif(native._load()[0] is None, reason="no compiled CPU kernels here")


@needs_kernels
def test_the_operator_uses_the_kernels_for_what_they_know():
    assert choice() is choice(dtype=torch.bfloat16) is cpu.kernels()
    assert choice(dtype=torch.float16) is choice(dtype=torch.float64, structure=torch.float64) is reference
    assert choice(table=torch.ones(2, 5, 2)) is reference  # a spectrum, for real parameters
    assert choice(location=torch.ones(2, dtype=torch.float64)) is reference
    assert choice(table=torch.ones(2, 21)) is reference  # of another axis: the reference says so


@needs_kernels
def test_nothing_is_allocated_besides_the_results(generator):
    grad, content, width, location, _ = inputs(64, 2, 256, 2.0, torch.float32, generator)
    tensors = [t.requires_grad_() for t in (content, width, location)]
    kept = [masked_content(*tensors, 2.0, whole=True)]
    forward, _ = peak_temporary_bytes(lambda: kept.append(masked_content(*tensors, 2.0, whole=True)) or kept)
    backward, _ = peak_temporary_bytes(lambda: kept.append(torch.autograd.grad(kept[-1], tensors, grad)) or kept)
    assert forward == backward == 0


WITHOUT_KERNELS = """
import warnings, torch
from gblr.ops.masked_content import masked_content
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    content = torch.ones(2, 1, 4, requires_grad=True)
    for _ in range(3):
        out = masked_content(content, torch.tensor([2.0, 4.0]), torch.tensor([3.0, 1.0]), torch.inf, whole=True)
        out.sum().backward()
print([str(w.message) for w in caught], out.tolist(), content.grad.tolist())
"""


def test_without_kernels_plain_torch_does_the_work_and_says_so_once():
    environment = os.environ | {"GBLR_CPU_KERNELS": "none", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", WITHOUT_KERNELS]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.count("runs without its compiled CPU kernels: switched off by GBLR_CPU_KERNELS=none") == 1
    assert (
        "[[[1.0, 0.0, 0.0, 1.0]], [[1.0, 1.0, 1.0, 1.0]]] [[[3.0, 0.0, 0.0, 3.0]], [[3.0, 3.0, 3.0, 3.0]]]"
        in done.stdout
    )

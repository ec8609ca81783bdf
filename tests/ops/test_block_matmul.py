"""The product of packed blocks, by the compiled kernels of all instruction sets that this machine has."""

import math
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gblr.matrices.packed import PackedGBLR
from gblr.matrices.structure import Structure
from gblr.ops import native
from gblr.ops.block_matmul import block_matmul, cpu, pack_blocks, plan_blocks
from tests.helpers import raises_value_error
from tests.ops.packed_blocks import STYLES, TOKENS, assert_is_product, plan_of, random_packed, values_of
from tests.shape_hook import shapes_unchecked

needs_kernels = pytest.mark.skipif(native._load()[0] is None, reason="no compiled CPU kernels here")
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@pytest.fixture(scope="module", params=["avx2", "avx512"])
def kernels(request):
    """Makes them the kernels at work. Memory that they ask for is full of NaN: what they do not write shows."""
    if request.param not in native._CHOICES.get(torch.backends.cpu.get_cpu_capability(), ()):
        pytest.skip(f"this processor has no {request.param}")
    library, reason = native._open(request.param)
    if library is None:
        pytest.skip(reason)
    cpu.declare(library)
    new_empty = torch.Tensor.new_empty
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "_library", lambda: library)
        patch.setattr(torch.Tensor, "new_empty", lambda *a, **k: new_empty(*a, **k).fill_(math.nan))
        yield request.param


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def product(matrix: PackedGBLR, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    plan = plan_of(matrix)
    return block_matmul(x, values_of(matrix, plan), plan, bias, matrix.shape[0], matrix.num_lines)


matrices = st.builds(
    random_packed,
    st.integers(1, 200),
    st.integers(1, 200),
    st.integers(0, 40),
    st.sampled_from([1, 2, 3, 4, 5, 16]),
    style=st.sampled_from(STYLES),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**31),
)


# values


@settings(max_examples=150)
@given(matrix=matrices, tokens=st.sampled_from(TOKENS), with_bias=st.booleans(), seed=st.integers(0, 2**31))
def test_the_product_is_that_of_the_dense_matrix(kernels, matrix, tokens, with_bias, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, matrix.shape[1], generator=generator).to(matrix.u.dtype)
    bias = torch.randn(matrix.shape[0], generator=generator).to(matrix.u.dtype) if with_bias else None
    assert_is_product(product(matrix, x, bias), matrix, x, bias)


@each_dtype
@pytest.mark.parametrize(("out_features", "in_features"), [(1, 1), (768, 3072), (3072, 768)])
@pytest.mark.parametrize("tokens", [1, 3, 8, 50])
def test_large_and_tiny_matrices(kernels, out_features, in_features, tokens, dtype, generator):
    matrix = random_packed(out_features, in_features, 90, 2, dtype=dtype)
    x, bias = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((tokens, in_features), (out_features,)))
    assert_is_product(product(matrix, x, bias), matrix, x, bias)


@each_dtype
def test_without_blocks_there_is_the_bias(kernels, dtype):
    matrix, bias = random_packed(70, 30, 0, dtype=dtype), torch.arange(70.0).to(dtype)
    for tokens in TOKENS:
        x = torch.full((tokens, 30), math.nan, dtype=dtype)
        assert torch.equal(product(matrix, x, bias), bias.expand(tokens, 70))
        assert torch.equal(product(matrix, x), torch.zeros(tokens, 70, dtype=dtype))


@pytest.mark.parametrize(("out_features", "in_features"), [(0, 7), (7, 0), (0, 0)])
def test_an_axis_may_be_empty(kernels, out_features, in_features):
    none = torch.zeros(5, dtype=torch.long)
    structure = Structure(none, none + 3, none, none - 3)
    matrix = PackedGBLR(structure, torch.ones(0), torch.ones(0), 2, (out_features, in_features))
    for tokens in (0, 1, 9):
        y = product(matrix, torch.ones(tokens, in_features), torch.arange(out_features).float())
        assert torch.equal(y, torch.arange(out_features).float().expand(tokens, out_features))


@each_dtype
def test_x_may_have_any_strides_and_axes(kernels, dtype, generator):
    matrix = random_packed(45, 24, 9, 2, dtype=dtype)
    x = torch.randn(2, 3, 5, 24, generator=generator).to(dtype)
    expected = product(matrix, x.reshape(30, 24)).view(2, 3, 5, 45)
    assert torch.equal(product(matrix, x), expected)
    strided = torch.stack([x, -x], -1)[..., 0], x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    for other in strided:
        assert not other.is_contiguous() and torch.equal(product(matrix, other), expected)
    assert torch.equal(product(matrix, x[:, 1:2, ::2]), product(matrix, x[:, 1:2, ::2].contiguous()))
    one = product(matrix, x[1, 2, 3])
    assert one.shape == (45,) and torch.equal(one, product(matrix, x[1, 2, 3][None])[0])
    assert torch.equal(product(matrix, x[0, 0, :1].expand(4, 24)), product(matrix, x[0, 0, [0, 0, 0, 0]]))
    assert product(matrix, x[:0]).shape == (0, 3, 5, 45)


@each_dtype
def test_bias_and_values_may_have_any_strides(kernels, dtype, generator):
    matrix = random_packed(45, 24, 9, 2, dtype=dtype)
    x, bias = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((6, 24), (45,)))
    plan = plan_of(matrix)
    values = values_of(matrix, plan)
    plain = block_matmul(x, values, plan, bias, 45, 18)
    every_second = (torch.stack([t, -t], 1)[:, 0] for t in (values, bias))
    assert torch.equal(block_matmul(x, next(every_second), plan, next(every_second), 45, 18), plain)
    same = block_matmul(x, values, plan, bias[:1].expand(45), 45, 18)
    assert torch.equal(same, block_matmul(x, values, plan, bias[:1].repeat(45), 45, 18))


def test_locations_are_cyclic(kernels):
    near = random_packed(50, 33, 20, 2, style="identical")
    far = PackedGBLR(
        Structure(
            near.structure.row_width,
            near.structure.row_location - 50 * 2**36,
            near.structure.col_width.double(),
            near.structure.col_location.double() + 33 * 2**31,
        ),
        near.u,
        near.v,
        2,
        near.shape,
    )
    assert torch.equal(plan_of(near), plan_of(far))


# NaN and infinity: a product with zeros is one where the layout has zeros


@each_dtype
@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("tokens", [4, 8, 70])
def test_what_is_no_number_stays_in_its_token(kernels, tokens, poison, dtype, generator):
    matrix = random_packed(100, 60, 30, 2, dtype=dtype)
    x = torch.randn(tokens, 60, generator=generator).to(dtype)
    clean = product(matrix, x)
    x[3, 20] = poison
    y = product(matrix, x)
    others = torch.arange(tokens) != 3
    assert torch.equal(y[others], clean[others])
    reached = matrix.to_dense()[:, 20] != 0
    assert not y[3][reached].isfinite().any()  # it is not lost either


@pytest.mark.parametrize("tokens", [1, 6])
def test_nan_reaches_no_further_than_the_neighbours_of_a_block(kernels, tokens):
    """Lines share zeros with others of their group, and outputs with those of their strip of 8. A dense product would
    carry a NaN into every output."""
    one = torch.tensor
    s = Structure(one([5, 40]), one([10, 80]), one([20, 30]), one([0, 64]))
    matrix = PackedGBLR(s, torch.ones(45), torch.ones(50), 1, (200, 100))
    x = torch.ones(tokens, 100)
    x[0, 5] = math.nan  # of the first block alone, which gives the outputs 10 .. 14
    y = product(matrix, x)
    assert y[0].isnan().nonzero().flatten().tolist() == list(range(8, 16))
    assert not y[1:].isnan().any()
    x[0, 5], x[0, 30] = 1.0, math.nan  # of no block at all
    assert not product(matrix, x).isnan().any()


# the layout


@settings(max_examples=100)
@given(matrix=matrices)
def test_every_number_is_in_the_plan_once_and_padding_is_zero(kernels, matrix):
    plan = plan_of(matrix)
    u, v = (torch.arange(1, 1 + t.numel(), dtype=torch.int32).view(torch.float32) for t in (matrix.u, matrix.v))
    v = (v.view(torch.int32) + len(u)).view(torch.float32)  # bits 1, 2, ...: all different, none lost by arithmetic
    values = pack_blocks(u, v, plan)
    bits = values.view(torch.int32)
    assert torch.equal(bits[bits != 0].sort().values, torch.arange(1, 1 + len(u) + len(v), dtype=torch.int32))
    back = cpu.crop(values, plan, len(u), len(v))
    assert torch.equal(back[0].view(torch.int32), u.view(torch.int32))
    assert torch.equal(back[1].view(torch.int32), v.view(torch.int32))
    # what gblr_plan_make relies on when it says that all indices fit into 32 bits
    assert len(values) <= 2 * (len(u) + len(v)) + 256 * matrix.num_lines + 16


@settings(max_examples=50)
@given(matrix=matrices)
def test_factors_are_spread_and_gathered_bit_by_bit(kernels, matrix):
    plan = plan_of(matrix)
    values = values_of(matrix, plan)
    u, v = cpu.spread(values, plan, matrix.num_lines, *matrix.shape)
    expected = matrix.factors()
    assert torch.equal(u, expected[0]) and torch.equal(v, expected[1])
    assert torch.equal(cpu.gather(u, v, plan, len(values)), values)


def padding(out_features, in_features, num_blocks, shares, block_rank=1):
    generator = torch.Generator().manual_seed(0)

    def side(length):
        low, high = (max(1, int(share * length)) for share in shares)
        width = torch.randint(low, high + 1, (num_blocks,), generator=generator)
        return width, torch.randint(0, length, (num_blocks,), generator=generator)

    rows, cols = side(out_features), side(in_features)
    plan = plan_blocks(*rows, *cols, block_rank, (out_features, in_features))
    return cpu.num_values(plan) / (block_rank * int(rows[0].sum() + cols[0].sum()))


def test_padding_is_a_small_share(kernels):
    assert padding(768, 768, 390, (0.1, 0.5)) < 1.08  # cost 0.3
    assert padding(3072, 768, 768, (0.1, 0.5)) < 1.04
    assert padding(768, 768, 24, (0.1, 0.5), block_rank=16) < 1.05
    assert padding(768, 768, 40, (0.1, 0.5)) < 1.15
    assert padding(768, 768, 5, (0.001, 0.01)) < 3  # narrow blocks far from each other share nothing


# threads: few tests with small work, as two threads on a busy machine wait for each other for long


def by_threads(threads, matrix, x, bias):
    plan = plan_of(matrix)
    values = values_of(matrix, plan)
    results = []
    for number in (1, 2, 3):
        threads(number)
        results.append(block_matmul(x, values, plan, bias, matrix.shape[0], matrix.num_lines))
    threads(1)
    return results


@pytest.mark.parametrize(("tokens", "dtype"), [(1, torch.float32), (4, torch.bfloat16), (7, torch.float32)])
def test_threads_that_share_a_few_tokens_change_no_bit(kernels, threads, tokens, dtype, generator):
    matrix = random_packed(900, 1800, 1000, dtype=dtype)  # 1.3 million numbers: enough for two threads at one token
    x, bias = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((tokens, 1800), (900,)))
    one, two, three = by_threads(threads, matrix, x, bias)
    assert_is_product(one, matrix, x, bias)
    assert torch.equal(one, two) and torch.equal(one, three)


@pytest.mark.parametrize(("tokens", "dtype"), [(17, torch.float32), (50, torch.bfloat16), (700, torch.float32)])
def test_threads_with_tokens_of_their_own_change_rounding_at_most(kernels, threads, tokens, dtype, generator):
    matrix = random_packed(300, 400, 250, 2, dtype=dtype)
    x, bias = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((tokens, 400), (300,)))
    for y in by_threads(threads, matrix, x, bias):
        assert_is_product(y, matrix, x, bias)


# what does not fit is said, and nothing is touched


def test_wrong_arguments_are_refused(kernels):
    matrix = random_packed(40, 30, 8, 2)
    plan = plan_of(matrix)
    values, x, bias = values_of(matrix, plan), torch.ones(3, 30), torch.ones(40)

    def refused(text, x=x, values=values, plan=plan, bias=bias, out_features=40):
        with shapes_unchecked(), pytest.raises(RuntimeError, match=text):
            block_matmul(x, values, plan, bias, out_features, 16)

    refused("29 columns.*do not fit the plan", x=x[:, 1:])
    refused("do not fit the plan", values=values[1:])
    refused("41 outputs.*do not fit the plan", out_features=41, bias=None)
    refused(r"`bias` \(40,\); got .*\(39,\)", bias=bias[1:])
    refused(r"`bias` \(40,\); got .*\(40, 1\)", bias=bias[:, None])
    refused(r"`x` must be \(..., in\)", x=torch.tensor(1.0))
    refused("must have the dtype of the layer; got torch.bfloat16", x=x.bfloat16())
    refused("must have the dtype of the layer.*torch.float64 bias", bias=bias.double())
    refused("float32 and bfloat16, not torch.float64", x=x.double(), values=values.double(), bias=None)
    refused("`plan` must be what `plan_blocks` gives", plan=plan.long())
    refused("`plan` must be what `plan_blocks` gives", plan=plan[:0])
    refused("`plan` must be what `plan_blocks` gives", plan=torch.stack([plan, plan], 1)[:, 0])
    refused("do not fit the plan", plan=plan_of(random_packed(40, 30, 8, 2, seed=1)))


def test_contents_of_other_blocks_are_refused(kernels):
    matrix = random_packed(40, 30, 8, 2)
    plan = plan_of(matrix)
    values = values_of(matrix, plan)
    sizes = f"{matrix.u.numel() + 1} numbers of u, {matrix.v.numel()} of v"
    with pytest.raises(RuntimeError, match=f"{sizes} .* do not fit the plan: it was made for other blocks"):
        pack_blocks(torch.ones(matrix.u.numel() + 1), matrix.v, plan)
    for u, v in ((matrix.u, matrix.v[1:]), (matrix.v, matrix.u), (matrix.u[:0], matrix.v[:0])):
        with pytest.raises(RuntimeError, match="do not fit the plan"):
            pack_blocks(u, v, plan)
    with pytest.raises(RuntimeError, match="do not fit the plan"):
        cpu.crop(values, plan, matrix.u.numel() - 1, matrix.v.numel() + 1)
    with pytest.raises(RuntimeError, match="do not fit the plan"):
        cpu.spread(values, plan, matrix.num_lines, 30, 40)
    with pytest.raises(RuntimeError, match=r"same dtype; got torch\.float32 and torch\.bfloat16"):
        pack_blocks(matrix.u, matrix.v.bfloat16(), plan)
    with pytest.raises(RuntimeError, match=r"float32 and bfloat16, not torch\.float16"):
        pack_blocks(matrix.u.half(), matrix.v.half(), plan)


@pytest.mark.parametrize(
    ("side", "width", "said"), [(0, 41, "row"), (0, -1, "row"), (2, 31, "column"), (2, -5, "column")]
)
def test_widths_beyond_the_axis_are_refused(kernels, side, width, said):
    sides = [torch.ones(3, dtype=torch.long) for _ in range(4)]
    sides[side][1] = width
    with raises_value_error(f"{said} widths must lie in 0 .. {40 if side == 0 else 30}", width):
        plan_blocks(*sides, 1, (40, 30))


def test_more_numbers_than_32_bits_can_count_are_refused(kernels):
    many, none = torch.full((8,), 2**27), torch.zeros(8, dtype=torch.long)
    with raises_value_error("2^31"):
        plan_blocks(many, none, many, none, 1, (2**27, 2**27))


@needs_kernels
def test_without_kernels_the_product_says_so(monkeypatch):
    matrix = random_packed(40, 30, 8, 2)
    plan, x = plan_of(matrix), torch.ones(3, 30)
    values = values_of(matrix, plan)
    monkeypatch.setattr(cpu, "_library", lambda: None)
    for call in (lambda: plan_of(matrix), lambda: block_matmul(x, values, plan, None, 40, 16)):
        with pytest.raises(RuntimeError, match=r"kernels are not there; `gblr\.ops\.native\.cpu_kernels"):
            call()


@needs_kernels
def test_nothing_outside_of_the_tensors_is_read_or_written():
    """In a process of its own: unreadable pages around every tensor end it at the first touch."""
    command = [sys.executable, "-m", "tests.ops.guarded_block_matmul"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=120)
    assert done.returncode == 0, (done.returncode, done.stdout[-500:], done.stderr[-2000:])
    assert "nothing was touched" in done.stdout


# autograd and the dispatcher


@pytest.mark.parametrize("shape", [(30,), (5, 30), (2, 3, 30), (0, 30)])
@pytest.mark.parametrize("block_rank", [1, 3])
def test_gradients_are_those_of_the_dense_matrix(kernels, shape, block_rank, generator):
    matrix = random_packed(40, 30, 12, block_rank)
    tensors = torch.randn(*shape, generator=generator), matrix.u, matrix.v, torch.randn(40, generator=generator)
    plan = plan_of(matrix)

    def packed(x, u, v, bias):
        return block_matmul(x, pack_blocks(u, v, plan), plan, bias, 40, matrix.num_lines)

    def dense(x, u, v, bias):
        other = PackedGBLR(matrix.structure, u, v, block_rank, (40, 30))
        return torch.nn.functional.linear(x, other.to_dense(), bias)

    assert_same_gradients(packed, dense, tensors)


def assert_same_gradients(function, exact, tensors):
    """First and second derivatives, those of `exact` in float64."""
    found, expected = ([] for _ in range(2))
    for run, dtype, into in ((function, torch.float32, found), (exact, torch.float64, expected)):
        leaves = [t.to(dtype).requires_grad_() for t in tensors]
        first = torch.autograd.grad(run(*leaves).square().sum(), leaves, create_graph=True)
        with warnings.catch_warnings(action="error"):  # an operator without a derivative warns
            second = torch.autograd.grad(sum(g.square().sum() for g in first), leaves)
        into += [*first, *second]
    for a, e in zip(found, expected, strict=True):
        assert a.dtype == torch.float32
        assert (a - e).detach().norm() <= 1e-5 * e.detach().norm()


def test_only_what_is_asked_for_gets_gradients(kernels, generator):
    matrix = random_packed(40, 30, 12)
    plan = plan_of(matrix)
    values, x, bias = values_of(matrix, plan), torch.randn(5, 30, generator=generator), torch.randn(40)
    for wanted in (x, values, bias):
        wanted.requires_grad_()
        block_matmul(x, values, plan, bias, 40, 12).sum().backward()
        assert wanted.grad is not None and bool(wanted.grad.any())
        assert sum(t.grad is not None for t in (x, values, bias)) == 1
        wanted.requires_grad_(False).grad = None


@needs_kernels
def test_the_operators_pass_torch_s_own_checks(generator):
    matrix = random_packed(20, 15, 6, 2)
    plan, num_lines = plan_of(matrix), matrix.num_lines
    u, v = (t.clone().requires_grad_() for t in (matrix.u, matrix.v))
    values = values_of(matrix, plan).requires_grad_()
    x, bias = (torch.randn(*shape, generator=generator).requires_grad_() for shape in ((2, 3, 15), (20,)))
    factors = [t.detach().requires_grad_() for t in matrix.factors()]
    ops = torch.ops.gblr
    for op, args in (
        (ops.block_matmul, (x, values, plan, bias, 20, num_lines)),
        (ops.block_matmul, (x.detach()[0, 0], values, plan, None, 20, num_lines)),
        (ops.pack_blocks, (u, v, plan, len(values))),
        (ops.pack_blocks, (*factors, plan, len(values))),
        (ops.crop_blocks, (values, plan, len(u), len(v))),
        (ops.spread_blocks, (values, plan, num_lines, 20, 15)),
    ):
        with shapes_unchecked():
            torch.library.opcheck(op.default, args)


def test_the_quick_way_and_the_operator_give_the_same_bits(kernels, generator):
    matrix = random_packed(40, 30, 12)
    plan, x = plan_of(matrix), torch.randn(5, 30, generator=generator)
    values = values_of(matrix, plan)
    operator = torch.ops.gblr.block_matmul(x, values, plan, None, 40, 12)
    assert torch.equal(block_matmul(x, values, plan, None, 40, 12), operator)
    assert torch.equal(cpu.BoundMatmul(values, plan, 30, 40)(x, None), operator)

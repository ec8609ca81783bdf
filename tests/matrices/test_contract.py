"""What every format promises. A new format adds one line to MATRICES in plain.py."""

import copy
import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gblr
from gblr.matrices.base import StructuredMatrix
from tests.helpers import assert_close, compiled, raises_value_error
from tests.matrices.plain import MATRICES, Meter, randn

SHAPES = [(12, 9), (9, 12), (8, 8), (4, 16), (7, 5), (1, 1), (1, 6)]
every_format = pytest.mark.parametrize("format", MATRICES.values(), ids=MATRICES)


def contents(matrix: StructuredMatrix) -> list[torch.Tensor]:
    found = []
    matrix.map_tensors(lambda t: found.append(t) or t if t.is_floating_point() else t)
    return found


def with_contents(matrix: StructuredMatrix, tensors) -> StructuredMatrix:
    rest = iter(tensors)
    return matrix.map_tensors(lambda t: next(rest) if t.is_floating_point() else t)


def test_every_public_format_is_under_contract(generator):
    public = {value for value in vars(gblr).values() if isinstance(value, type) and issubclass(value, StructuredMatrix)}
    assert {type(format.make(6, 6, generator)) for format in MATRICES.values()} == public


@every_format
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("batch", [(), (5,), (2, 3), (0,)])
def test_matmul_agrees_with_dense(format, shape, batch, generator):
    matrix = format.make(*shape, generator)
    x = randn(*batch, shape[1], generator=generator)
    assert matrix.shape == matrix.to_dense().shape == shape
    assert matrix.matmul(x).shape == (*batch, shape[0])
    assert_close(matrix.matmul(x), x @ matrix.to_dense().T)


@every_format
@given(out_features=st.integers(1, 14), in_features=st.integers(1, 14), seed=st.integers(0, 9))
def test_matmul_agrees_with_dense_for_any_size(format, out_features, in_features, seed):
    generator = torch.Generator().manual_seed(seed)
    matrix = format.make(out_features, in_features, generator)
    x = randn(3, in_features, generator=generator)
    assert_close(matrix.matmul(x), x @ matrix.to_dense().T)


@every_format
@pytest.mark.parametrize("shape", SHAPES)
def test_rows_can_be_scaled(format, shape, generator):
    matrix = format.make(*shape, generator)
    factor = 0.5 + torch.rand(shape[0], generator=generator, dtype=matrix.to_dense().dtype)
    scaled = matrix.scale_rows(factor)
    assert type(scaled) is type(matrix) and scaled.num_mults == matrix.num_mults
    assert_close(scaled.to_dense(), factor[:, None] * matrix.to_dense())


@every_format
def test_strided_input_is_read_correctly(format, generator):
    matrix = format.make(12, 9, generator)
    x = randn(9, 5, generator=generator).T
    assert not x.is_contiguous()
    assert_close(matrix.matmul(x), matrix.matmul(x.contiguous()))


@every_format
@pytest.mark.parametrize("shape", SHAPES)
def test_num_mults_and_num_params_are_what_a_plain_loop_needs(format, shape, generator):
    matrix = format.make(*shape, generator)
    x, meter = randn(shape[1], generator=generator), Meter()
    y = format.loop(matrix, x.tolist(), meter)
    assert_close(matrix.matmul(x), torch.tensor(y, dtype=torch.float64))
    assert (matrix.num_mults, matrix.num_params) == (meter.num_mults, len(meter.weights_used))
    assert matrix.relative_cost == pytest.approx(meter.num_mults / (shape[0] * shape[1]))
    assert isinstance(matrix.num_mults, int) and isinstance(matrix.num_params, int)


@every_format
@pytest.mark.parametrize("shape", SHAPES)
def test_the_transpose_is_the_transpose_at_the_same_cost(format, shape, generator):
    matrix = format.make(*shape, generator)
    x = randn(3, shape[0], generator=generator)
    assert type(matrix.T) is type(matrix) and matrix.T.shape == shape[::-1]
    assert_close(matrix.T.to_dense(), matrix.to_dense().T)
    assert_close(matrix.T.matmul(x), x @ matrix.to_dense())
    assert_close(matrix.T.T.to_dense(), matrix.to_dense())
    assert (matrix.T.num_mults, matrix.T.num_params) == (matrix.num_mults, matrix.num_params)


@every_format
def test_the_transpose_copies_nothing(format, generator):
    matrix = format.make(12, 9, generator)
    assert {t.data_ptr() for t in contents(matrix.T)} == {t.data_ptr() for t in contents(matrix)}


@every_format
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_every_dtype_multiplies_in_its_own_precision(format, dtype, generator):
    exact = format.make(12, 9, generator).map_tensors(lambda t: t / 4 if t.is_floating_point() else t)
    matrix = exact.to(dtype)
    x = randn(5, 9, generator=generator)
    assert matrix.to_dense().dtype == matrix.matmul(x.to(dtype)).dtype == matrix.T.to_dense().dtype == dtype
    assert_close(matrix.to_dense(), exact.to_dense())
    assert_close(matrix.matmul(x.to(dtype)), exact.matmul(x))


@every_format
def test_moving_to_another_dtype_or_device_leaves_indices_alone(format, generator):
    matrix = format.make(12, 9, generator)
    kinds = []
    matrix.to(torch.float32).map_tensors(lambda t: kinds.append(t.dtype) or t)
    expected = []
    matrix.map_tensors(lambda t: expected.append(torch.float32 if t.is_floating_point() else t.dtype) or t)
    assert kinds == expected
    on_meta = matrix.to("meta", torch.float32)
    assert on_meta.matmul(torch.empty(5, 9, device="meta")).shape == (5, 12)


@every_format
def test_matmul_is_differentiable_in_contents_and_input(format, generator):
    matrix = format.make(6, 4, generator)
    inputs = [t.requires_grad_() for t in (*contents(matrix), randn(2, 4, generator=generator))]
    assert torch.autograd.gradcheck(lambda *t: with_contents(matrix, t[:-1]).matmul(t[-1]), inputs)
    assert torch.autograd.gradcheck(lambda *t: with_contents(matrix, t).to_dense(), inputs[:-1])


@every_format
def test_matmul_compiles_to_one_graph_with_its_gradients(format, generator):
    matrix = format.make(12, 9, generator)
    inputs = [t.requires_grad_() for t in (*contents(matrix), randn(5, 9, generator=generator))]

    def product(*tensors):
        return with_contents(matrix, tensors[:-1]).matmul(tensors[-1])

    run = compiled(product)
    assert_close(run(*inputs), product(*inputs))
    actual, expected = (torch.autograd.grad(f(*inputs).pow(2).sum(), inputs) for f in (run, product))
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-11, atol=1e-11)


@every_format
def test_vmap_agrees_with_a_batch(format, generator):
    matrix = format.make(12, 9, generator)
    x = randn(4, 2, 9, generator=generator)
    assert_close(torch.func.vmap(matrix.matmul)(x), matrix.matmul(x))


@every_format
def test_autocast_multiplies_in_its_dtype(format, generator):
    matrix = format.make(12, 9, generator).map_tensors(lambda t: t / 4 if t.is_floating_point() else t)
    matrix, x = matrix.to(torch.float32), randn(5, 9, generator=generator).float()
    with torch.autocast("cpu", torch.bfloat16):
        y = matrix.matmul(x)
    assert y.dtype == torch.bfloat16
    assert_close(y, matrix.matmul(x))


@every_format
def test_matrices_are_frozen(format, generator):
    matrix = format.make(12, 9, generator)
    for field in dataclasses.fields(matrix):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(matrix, field.name, None)


@every_format
def test_a_deep_copy_is_equal_and_independent(format, generator):
    matrix = format.make(12, 9, generator)
    twin = copy.deepcopy(matrix)
    for t in contents(matrix):
        t.mul_(2)
    assert not torch.equal(twin.to_dense(), matrix.to_dense())
    assert {t.data_ptr() for t in contents(twin)}.isdisjoint(t.data_ptr() for t in contents(matrix))


@every_format
def test_an_input_that_does_not_fit_is_refused(format, generator):
    matrix = format.make(12, 9, generator)
    with raises_value_error("`x`", "in_features", 9, (5, 8)):
        matrix.matmul(torch.ones(5, 8, dtype=torch.float64))
    with raises_value_error("`x`", 9, ()):
        matrix.matmul(torch.tensor(1.0, dtype=torch.float64))


@every_format
def test_a_matrix_prints_its_size_and_cost(format, generator):
    matrix = format.make(12, 9, generator)
    assert repr(matrix) == f"{type(matrix).__name__}(12 x 9, relative_cost={matrix.num_mults / 108:.3f})"

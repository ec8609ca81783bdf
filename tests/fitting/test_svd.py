import pytest
import torch

from gblr.fitting.svd import balance, squared_error, weighted_svd
from tests.fitting.baselines import randn, random_gram

SHAPES = [(7, 12), (12, 7), (9, 9), (1, 5), (5, 1)]


@pytest.mark.parametrize("shape", SHAPES)
def test_plain_singular_values_and_truncations_are_those_of_lapack(shape, generator):
    weight = randn(2, *shape, generator=generator)
    u, s, v = weighted_svd(weight, None)
    left, values, right = torch.linalg.svd(weight, full_matrices=False)
    torch.testing.assert_close(s, values, rtol=1e-6, atol=1e-6)
    for rank in range(min(shape) + 1):
        expected = (left[..., :rank] * values[:, None, :rank]) @ right[:, :rank]
        torch.testing.assert_close(u[:, :rank].mT @ v[:, :rank], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_weighted_singular_values_and_truncations_are_those_of_the_weight_times_the_factor(shape, generator):
    weight, gram = randn(2, *shape, generator=generator), random_gram(2, shape[1], generator)
    factor = torch.linalg.cholesky(gram)
    u, s, v = weighted_svd(weight, gram)
    left, values, right = torch.linalg.svd(weight @ factor, full_matrices=False)
    torch.testing.assert_close(s, values, rtol=1e-6, atol=1e-6)
    for rank in range(min(shape) + 1):
        truncated = (left[..., :rank] * values[:, None, :rank]) @ right[:, :rank]
        expected = torch.linalg.solve_triangular(factor, truncated, upper=False, left=False)
        torch.testing.assert_close(u[:, :rank].mT @ v[:, :rank], expected, rtol=1e-5, atol=1e-5)
        error = squared_error(weight - u[:, :rank].mT @ v[:, :rank], gram)
        torch.testing.assert_close(error, s[:, rank:].square().sum(1), rtol=1e-5, atol=1e-8)


def test_the_dtype_of_the_weight_comes_back(generator):
    for part in weighted_svd(randn(1, 4, 6, generator=generator).float(), None):
        assert part.dtype == torch.float32


def test_balancing_evens_the_norms_and_keeps_the_product(generator):
    u, v = randn(3, 5, generator=generator) * 100, randn(3, 7, generator=generator)
    u[1] = 0  # a dead row has no norm to share
    a, b = balance(u, v)
    torch.testing.assert_close(a.mT @ b, u.mT @ v)
    torch.testing.assert_close(a[[0, 2]].norm(dim=-1), b[[0, 2]].norm(dim=-1))
    assert torch.equal(b[1], v[1])


def test_the_squared_error_is_that_of_the_outputs(generator):
    error, x = randn(1, 4, 6, generator=generator), randn(50, 6, generator=generator)
    torch.testing.assert_close(squared_error(error, (x.T @ x)[None])[0], (x @ error[0].T).square().sum())
    torch.testing.assert_close(squared_error(error, None)[0], error.square().sum())

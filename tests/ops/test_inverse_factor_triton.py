"""The GPU kernel for small factors, by Triton's interpreter. test_masked_content_triton.py compiles it."""

import pytest
import torch

from tests.ops.interpreted import interpreted_kernels

pytest.importorskip("triton")
JITTER = 1e-6


@pytest.fixture(scope="module")
def interpreted():
    return interpreted_kernels("inverse_factor")


@pytest.mark.parametrize("size", [2, 3, 4, 16, 21, 32])
def test_it_is_the_inverse_of_the_cholesky_factor(interpreted, size, generator):
    rows = torch.randn(5, size, 2 * size, generator=generator, dtype=torch.float64)
    gram = rows @ rows.mT
    damped = gram + JITTER * gram.diagonal(dim1=1, dim2=2).mean(1)[:, None, None] * torch.eye(size)
    expected = torch.linalg.inv(torch.linalg.cholesky(damped))
    torch.testing.assert_close(interpreted.inverse_factor(gram, JITTER, torch.float64), expected)
    found = interpreted.inverse_factor(gram, JITTER, torch.float32)
    torch.testing.assert_close(found, expected.float())
    assert (found.triu(1) == 0).all()


def test_rounding_that_makes_it_unsymmetric_does_not_matter(interpreted, generator):
    rows = torch.randn(2, 8, 16, generator=generator, dtype=torch.float64)
    gram = rows @ rows.mT
    skew = 1e-3 * torch.randn(2, 8, 8, generator=generator, dtype=torch.float64)
    found = interpreted.inverse_factor(gram + skew - skew.mT, JITTER, torch.float64)
    torch.testing.assert_close(found, interpreted.inverse_factor(gram, JITTER, torch.float64))


def test_dependent_rows_are_kept_solvable_and_what_has_no_factor_is_nan(interpreted):
    row = torch.ones(1, 3, 1, dtype=torch.float64)
    assert interpreted.inverse_factor(row @ row.mT, JITTER, torch.float64).isfinite().all()
    assert interpreted.inverse_factor(-torch.eye(3, dtype=torch.float64)[None], JITTER, torch.float64).isnan().any()

"""What the tests of the baseline fits share."""

import torch
from torch import Tensor

import gblr.fitting.blast
import gblr.fitting.low_rank
import gblr.fitting.monarch
import gblr.fitting.pixelfly  # noqa: F401  each registers its fit
from gblr.fitting.config import Config
from gblr.fitting.fit import fit_batch, num_ticks, prepare_gram
from gblr.fitting.svd import squared_error
from gblr.matrices.base import StructuredMatrix


def randn(*shape: int, generator: torch.Generator) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def random_gram(batch: int, size: int, generator: torch.Generator) -> Tensor:
    """Of inputs that are correlated and of very unlike size."""
    x = randn(batch, 3 * size, size, generator=generator) * torch.logspace(0, -1.5, size, dtype=torch.float64)
    x = x @ torch.linalg.qr(randn(batch, size, size, generator=generator))[0]
    return prepare_gram(x.mT @ x)


def fit_all(config: Config, weight: Tensor, gram: Tensor | None = None, mults: list[float] | None = None):
    """The fitted batch; checks what holds for every fit: shape, dtype, cost, ticks."""
    batch, out_features, in_features = weight.shape
    budget = torch.tensor(mults or [config.relative_cost * out_features * in_features] * batch, dtype=torch.float64)
    ticks: list[None] = []
    matrices = fit_batch(config, weight, gram, budget, lambda: ticks.append(None))
    assert len(ticks) == num_ticks(config)
    assert len(matrices) == batch
    for matrix, limit in zip(matrices, budget.tolist(), strict=True):
        assert matrix.shape == (out_features, in_features)
        assert matrix.to_dense().dtype == weight.dtype
        assert 0 < matrix.num_mults <= limit + 1e-6
    return matrices


def errors(matrices: list[StructuredMatrix], weight: Tensor, gram: Tensor | None = None) -> Tensor:
    """Relative, (b,)."""
    dense = torch.stack([matrix.to_dense() for matrix in matrices])
    return (squared_error(weight - dense, gram) / squared_error(weight, gram)).sqrt()


def assert_batch_equals_single(config: Config, weight: Tensor, gram: Tensor | None, mults: list[float]) -> None:
    together = fit_all(config, weight, gram, mults)
    for i, matrix in enumerate(together):
        (alone,) = fit_all(config, weight[i : i + 1], None if gram is None else gram[i : i + 1], mults[i : i + 1])
        assert alone.num_mults == matrix.num_mults
        torch.testing.assert_close(matrix.to_dense(), alone.to_dense(), rtol=1e-7, atol=1e-7)


def assert_inputs_are_used(config: Config, weight: Tensor, gram: Tensor, margin: float) -> None:
    """The weighted fit has at most `margin` times the weighted error of the plain fit, for every matrix; and a Gram
    matrix that is a multiple of the identity changes nothing.
    """
    plain = fit_all(config, weight)
    weighted = fit_all(config, weight, gram)
    assert bool((errors(weighted, weight, gram) <= margin * errors(plain, weight, gram)).all())
    identity = 3 * torch.eye(weight.shape[-1], dtype=weight.dtype).expand(len(weight), -1, -1)
    for a, b in zip(plain, fit_all(config, weight, identity), strict=True):
        assert_close_enough(b.to_dense(), a.to_dense())


def assert_close_enough(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)

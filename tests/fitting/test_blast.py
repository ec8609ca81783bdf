import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gblr.fitting.config import BlastConfig, LowRankConfig
from gblr.fitting.fit import fit
from gblr.matrices.blast import BlastMatrix
from tests.fitting.baselines import (
    assert_batch_equals_single,
    assert_inputs_are_used,
    errors,
    fit_all,
    randn,
    random_gram,
)
from tests.helpers import raises_value_error


@given(st.integers(1, 30), st.integers(1, 30), st.floats(0.05, 1), st.integers(1, 5))
def test_rank_and_tiles_follow_from_budget_and_shape(out_features, in_features, cost, num_tiles):
    weight = torch.randn(1, out_features, in_features, generator=torch.Generator().manual_seed(0))
    b = max(n for n in range(1, num_tiles + 1) if out_features % n == in_features % n == 0)
    rank = math.floor(cost * weight.numel() / (out_features + in_features + b * b))
    config = BlastConfig(cost, num_tiles=num_tiles, steps=2)
    if rank == 0:
        with raises_value_error("BLAST", f"{out_features} x {in_features}"):
            fit_all(config, weight)
        return
    (matrix,) = fit_all(config, weight)
    assert (matrix.rank, tuple(matrix.s.shape[:2])) == (rank, (b, b))


def planted(tile_out, tile_in, num_tiles, rank, generator):
    sizes = ((num_tiles, tile_out, rank), (num_tiles, tile_in, rank), (num_tiles, num_tiles, rank))
    return BlastMatrix(*(randn(*size, generator=generator) for size in sizes))


@pytest.mark.parametrize("weighted", [False, True])
def test_most_blast_matrices_are_recovered(weighted, generator):
    """Not all: the problem has local minima, and about a third of such starts ends in one."""
    weight = torch.stack([planted(12, 9, 3, 2, generator).to_dense() for _ in range(8)])
    gram = random_gram(8, 27, generator) if weighted else None
    config = BlastConfig(2 * (36 + 27 + 9) / (36 * 27) + 1e-9, num_tiles=3, steps=300)
    found = errors(fit_all(config, weight, gram), weight, gram)
    assert int((found < 1e-3).sum()) >= 5


@pytest.mark.parametrize("weighted", [False, True])
def test_tile_structure_is_worth_more_than_rank(weighted, generator):
    weight = torch.stack([planted(16, 12, 4, 8, generator).to_dense() for _ in range(2)])
    gram = random_gram(2, 48, generator) if weighted else None
    cost = 8 * (64 + 48 + 16) / (64 * 48) + 1e-9
    ours = errors(fit_all(BlastConfig(cost), weight, gram), weight, gram)
    low_rank = errors(fit_all(LowRankConfig(cost), weight, gram), weight, gram)
    assert bool((ours < 0.5 * low_rank).all())


@pytest.mark.parametrize("weighted", [False, True])
def test_it_never_ends_above_low_rank_of_the_same_rank(weighted, generator):
    weight = torch.randn(3, 24, 20, generator=generator)
    gram = random_gram(3, 20, generator).float() if weighted else None
    start = errors(fit_all(BlastConfig(0.6, steps=0), weight, gram), weight, gram)
    rank = int(0.6 * 480 / (44 + 16))
    low_rank = errors(fit_all(LowRankConfig(rank * 44 / 480 + 1e-9), weight, gram), weight, gram)
    torch.testing.assert_close(start, low_rank, rtol=1e-5, atol=1e-5)
    for steps in (1, 3, 20):
        now = errors(fit_all(BlastConfig(0.6, steps=steps), weight, gram), weight, gram)
        assert bool((now <= start + 1e-6).all())
        start = now


def test_a_matrix_of_lower_rank_than_the_budget_pays_for_is_kept(generator):
    weight = randn(1, 24, 1, generator=generator) @ randn(1, 1, 20, generator=generator)
    assert errors(fit_all(BlastConfig(0.6), weight), weight).item() < 1e-6
    assert bool(fit_all(BlastConfig(0.6), torch.zeros(1, 24, 20))[0].to_dense().eq(0).all())


def test_factors_bear_the_rounding_to_half_precision():
    """A fit whose last factors grow and cancel: rounded to bfloat16 they would have twice the error."""
    torch.manual_seed(19)
    weight = torch.nn.Linear(32, 32).weight.detach().bfloat16()
    for _ in range(2):
        torch.nn.Linear(32, 32)
    x = torch.randn(64, 32)
    exact, rounded = (fit(weight.to(dtype), BlastConfig(0.5), x.T @ x) for dtype in (torch.float32, torch.bfloat16))
    error, rounded_error = (
        float((x @ (m.to(torch.float32).to_dense() - weight.float()).T).norm()) for m in (exact, rounded)
    )
    assert rounded_error < 1.1 * error


def test_inputs_lower_the_error_of_outputs(generator):
    weight, gram = randn(2, 16, 24, generator=generator), random_gram(2, 24, generator)
    assert_inputs_are_used(BlastConfig(0.5, steps=10), weight, gram, margin=0.9)


def test_a_batch_gives_each_matrix_its_own_rank(generator):
    weight, gram = randn(3, 12, 12, generator=generator), random_gram(3, 12, generator)
    assert_batch_equals_single(BlastConfig(0.5, num_tiles=2, steps=5), weight, gram, [60, 112, 28])


def test_a_budget_below_rank_1_is_refused_with_the_smallest_cost():
    with raises_value_error("BLAST", "12 x 8", "0.375", "0.292", "`num_tiles`"):
        fit(torch.ones(12, 8), BlastConfig(0.3))
    with raises_value_error("`num_tiles`", 0):
        BlastConfig(0.5, num_tiles=0)

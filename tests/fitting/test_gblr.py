"""What `fit` promises for a `GaudiConfig`; how it gets there may change."""

import copy
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gblr.conversion.convert import convert_
from gblr.conversion.filters import linear_layers
from gblr.fitting.config import GaudiConfig, LowRankConfig
from gblr.fitting.fit import fit, num_ticks, prepare_gram, rank_choices
from gblr.fitting.svd import squared_error
from gblr.matrices.gblr import GBLRMatrix
from tests.fitting.baselines import assert_batch_equals_single, errors, fit_all, randn, random_gram
from tests.fitting.planted import planted_blocks, relative_error
from tests.helpers import raises_value_error

INITS = ["correlation", "low_rank", "full"]
SIZES = st.integers(6, 24)


def svd_error(weight: torch.Tensor, gram: torch.Tensor | None, rank: int) -> float:
    """Squared error of the truncated SVD, weighted by `gram`, by LAPACK."""
    scaled = weight if gram is None else weight @ torch.linalg.cholesky(gram)
    return float(torch.linalg.svdvals(scaled)[rank:].square().sum())


def random_weight(out_features: int, in_features: int, decay: float, generator: torch.Generator) -> torch.Tensor:
    """Singular values that fall by `decay` each: from flat to nearly low rank."""
    weight = randn(out_features, in_features, generator=generator)
    u, s, v = torch.linalg.svd(weight, full_matrices=False)
    return u @ torch.diag(s * decay ** torch.arange(len(s))) @ v


@settings(max_examples=60)
@given(
    out_features=SIZES, in_features=SIZES, cost=st.floats(0.15, 1), seed=st.integers(0, 99),
    init=st.sampled_from(INITS), refine=st.sampled_from(["descent", "descent", "none", "gradient"]),
    block_rank=st.sampled_from([1, 1, 2, 4]), align=st.sampled_from([1, 1, 4]), weighted=st.booleans(),
    decay=st.sampled_from([1.0, 0.8, 0.4]),
)  # fmt: skip
def test_a_fit_keeps_its_budget_and_is_never_worse_than_the_svd_of_the_same_cost(
    out_features, in_features, cost, seed, init, refine, block_rank, align, weighted, decay
):
    generator = torch.Generator().manual_seed(seed)
    weight = random_weight(out_features, in_features, decay, generator)
    gram = random_gram(1, in_features, generator)[0] if weighted else None
    budget = cost * weight.numel()
    config = GaudiConfig(cost, init=init, refine=refine, block_rank=block_rank, align=align, steps=2, smoothing_std=2.0)
    if budget < 2 * align * block_rank:
        with raises_value_error("`relative_cost`"):
            fit(weight, config, gram)
        return
    matrix = fit(weight, config, gram)
    assert matrix.shape == weight.shape and matrix.block_rank == block_rank
    assert matrix.num_mults <= budget + 1e-6
    damped = None if gram is None else prepare_gram(gram[None])[0]
    error = float(squared_error((weight - matrix.to_dense())[None], None if gram is None else damped[None]))
    slack = 1e-9 * svd_error(weight, damped, 0)
    whole_blocks = int(budget // (block_rank * (out_features + in_features)))  # a block costs its whole rank
    assert error <= svd_error(weight, damped, block_rank * whole_blocks) + slack


@pytest.mark.parametrize("align", [1, 4])
@pytest.mark.parametrize("shape", [(24, 16), (18, 30)])
@pytest.mark.parametrize("weighted", [False, True])
def test_blocks_start_and_end_on_multiples_of_align_or_take_the_axis(align, shape, weighted, generator):
    weight = randn(*shape, generator=generator)
    gram = random_gram(1, shape[1], generator)[0] if weighted else None
    for init, refine in itertools.product(INITS, ["descent", "gradient", "none"]):
        config = GaudiConfig(0.5, init=init, refine=refine, align=align, steps=2, smoothing_std=3.0)
        s = fit(weight, config, gram).structure
        sides = ((s.row_width, s.row_location, shape[0]), (s.col_width, s.col_location, shape[1]))
        for width, location, length in sides:
            assert bool(((width % align == 0) | (width == length)).all()) and bool((width > 0).all())
            assert bool((location % align == 0).all()), (init, refine)


@pytest.mark.parametrize("weighted", [False, True])
def test_blocks_of_high_rank_use_the_budget_and_beat_the_svd(weighted, generator):
    """A budget between two whole numbers of blocks is spent all the same, and triangular factors buy rank."""
    weight = random_weight(160, 160, 0.98, generator)
    gram = random_gram(1, 160, generator) if weighted else None
    for cost in (0.45, 0.7):
        config = GaudiConfig(cost, block_rank=8, steps=6, max_growth=300)
        found = fit(weight, config, None if gram is None else gram[0])
        low_rank = fit(weight, LowRankConfig(cost), None if gram is None else gram[0])
        ours, other = (float(squared_error((weight - m.to_dense())[None], gram)) for m in (found, low_rank))
        assert ours < other
        assert 0.999 * cost < found.relative_cost <= cost


@pytest.mark.parametrize("block_rank, align", [(1, 1), (1, 8), (8, 1), (8, 8)])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", [(48, 64), (64, 40)])
def test_a_fit_leaves_less_of_its_budget_than_the_smallest_block_costs(block_rank, align, weighted, shape, generator):
    """In a batch of budgets between less than one whole block and many."""
    weight = torch.stack([random_weight(*shape, decay, generator) for decay in (1.0, 0.97, 0.9, 0.97)])
    gram = random_gram(4, shape[1], generator) if weighted else None
    budget = [share * weight[0].numel() for share in (0.2, 0.33, 0.5, 0.71)]
    found = fit_all(GaudiConfig(0.5, block_rank=block_rank, align=align, steps=3), weight, gram, budget)
    left = [mults - matrix.num_mults for mults, matrix in zip(budget, found, strict=True)]
    assert all(0 <= rest < 2 * block_rank * align for rest in left), left


@pytest.mark.parametrize("init", INITS)
@pytest.mark.parametrize("block_rank", [1, 2])
def test_a_planted_matrix_is_recovered_much_better_than_by_svd(init, block_rank, generator):
    weight = planted_blocks(32, 32, generator).to_dense()
    config = GaudiConfig(0.6, init=init, block_rank=block_rank, steps=10, smoothing_std=3.0)
    ours, low_rank = fit(weight, config), fit(weight, LowRankConfig(0.6))
    assert relative_error(ours, weight) < 0.7 * relative_error(low_rank, weight)


@pytest.mark.parametrize("init", INITS)
@pytest.mark.parametrize("block_rank", [1, 4, 16])
def test_the_default_refinement_beats_svd_on_a_flat_spectrum(init, block_rank, generator):
    weight = torch.randn(48, 48, generator=generator)
    rank = int(0.5 * 48 * 48 / (96 * block_rank)) * block_rank
    svd = svd_error(weight.double(), None, max(rank, 1)) ** 0.5 / float(weight.norm())
    ours = relative_error(fit(weight, GaudiConfig(0.5, init=init, block_rank=block_rank, steps=4)), weight)
    assert ours < (0.97 if block_rank == 1 else 1.0) * svd


def test_a_matrix_that_fits_into_the_budget_is_found_exactly(generator):
    u, v = torch.randn(3, 24, generator=generator), torch.randn(3, 20, generator=generator)
    weight = u.T @ v
    assert relative_error(fit(weight, GaudiConfig(0.3, steps=2)), weight) < 1e-4


@pytest.mark.parametrize("shape", [(24, 24), (16, 32), (32, 16)])
def test_at_the_cost_of_dense_the_error_is_far_below_that_of_svd(shape, generator):
    """Dense cost affords half of all ranks; blocks use it better."""
    weight = torch.randn(*shape, generator=generator)
    ours = relative_error(fit(weight, GaudiConfig(1.0, steps=12)), weight)
    assert ours < 0.75 * relative_error(fit(weight, LowRankConfig(1.0)), weight)


def test_more_cost_gives_less_error(generator):
    weight = torch.randn(32, 32, generator=generator)
    found = [relative_error(fit(weight, GaudiConfig(cost, steps=3)), weight) for cost in (0.2, 0.4, 0.6, 0.8)]
    assert found == sorted(found, reverse=True) and found[-1] < 0.5 * found[0]


@pytest.mark.parametrize("init", INITS)
@pytest.mark.parametrize("refine", ["descent", "none"])
def test_a_batch_gives_what_each_matrix_gives_alone(init, refine, generator):
    weight = randn(3, 16, 12, generator=generator)
    weight[1] *= 100
    config = GaudiConfig(0.5, init=init, refine=refine, steps=2, smoothing_std=2.0)
    # from the SVD start the dearest matrix of a batch says how many blocks all may use
    assert_batch_equals_single(config, weight, None, [96, 96, 96] if init == "low_rank" else [60, 96, 120])


def test_a_weighted_batch_gives_what_each_matrix_gives_alone(generator):
    weight, gram = randn(2, 16, 12, generator=generator), random_gram(2, 12, generator)
    assert_batch_equals_single(GaudiConfig(0.5, steps=2), weight, gram, [96, 120])


def test_inputs_lower_the_error_of_the_outputs(generator):
    weight, gram = randn(2, 24, 20, generator=generator), random_gram(2, 20, generator)
    config = GaudiConfig(0.4, steps=4)
    plain, weighted = fit_all(config, weight), fit_all(config, weight, gram)
    assert bool((errors(weighted, weight, gram) < 0.7 * errors(plain, weight, gram)).all())


def test_the_number_of_blocks_is_limited_on_request(generator):
    matrix = fit(torch.randn(24, 24, generator=generator), GaudiConfig(0.5, num_blocks=5, steps=2))
    assert matrix.num_blocks <= 5


def test_no_dead_block_is_returned_and_factors_are_balanced(generator):
    matrix = fit(torch.randn(24, 24, generator=generator), GaudiConfig(0.3, steps=3))
    assert isinstance(matrix, GBLRMatrix) and bool(matrix.structure.live.all())
    torch.testing.assert_close(matrix.u.norm(dim=-1), matrix.v.norm(dim=-1), rtol=1e-4, atol=1e-5)


def test_fits_are_repeatable(generator):
    weight = torch.randn(24, 24, generator=generator)
    first, second = (fit(weight, GaudiConfig(0.3, steps=3)) for _ in range(2))
    assert torch.equal(first.to_dense(), second.to_dense())


@pytest.mark.parametrize("shape", [(1, 8), (8, 1), (2, 2)])
def test_tiny_weights(shape, generator):
    weight = torch.randn(*shape, generator=generator)
    matrix = fit(weight, GaudiConfig(1.0, steps=2))
    assert matrix.num_mults <= weight.numel() and relative_error(matrix, weight) < 1


@pytest.mark.parametrize("init", INITS)
@pytest.mark.parametrize("refine", ["descent", "gradient", "none"])
def test_a_weight_of_zeros_gives_zeros(init, refine):
    matrix = fit(torch.zeros(16, 12), GaudiConfig(0.5, init=init, refine=refine, steps=2))
    assert not bool(matrix.to_dense().any()) and matrix.num_mults <= 96


def test_a_budget_below_one_block_is_refused_with_the_cost_of_one():
    with raises_value_error("`relative_cost`", "16 x 12", "block_rank", "align", "0.3333"):
        fit(torch.ones(16, 12), GaudiConfig(0.3, block_rank=4, align=8))


@pytest.mark.parametrize("shape", [(40, 3), (3, 40), (1, 24), (24, 1), (5, 5)])
@pytest.mark.parametrize("init", ["correlation", "low_rank", "full"])
def test_blocks_have_no_higher_rank_than_the_weight_can(shape, init, generator):
    weight = torch.randn(shape, generator=generator)
    config = GaudiConfig(0.9, block_rank=16, init=init, steps=2)
    matrix = fit(weight, config, gram=torch.eye(shape[1]))
    assert matrix.block_rank == min(shape) and matrix.relative_cost <= 0.9
    assert rank_choices(config, shape)[-1].rank == min(shape)
    layer = nn.Sequential(nn.Linear(shape[1], shape[0]))
    for one in (config, GaudiConfig(0.9, block_rank=16, init="scratch")):
        model = copy.deepcopy(layer)
        convert_(model, one, linear_layers(include=("0",)))
        assert model[0].block_rank == min(shape)


@pytest.mark.parametrize("refine", ["descent", "gradient"])
def test_no_steps_are_none(refine, generator):
    config = GaudiConfig(0.5, init="low_rank", refine=refine, steps=0)
    assert num_ticks(config) == 0 and num_ticks(GaudiConfig(0.5, refine=refine)) > 0
    weight = randn(1, 24, 20, generator=generator)
    start = errors(fit_all(GaudiConfig(0.5, init="low_rank", refine="none"), weight), weight)
    assert bool((errors(fit_all(config, weight), weight) <= start).all())

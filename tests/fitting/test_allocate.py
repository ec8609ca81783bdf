import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gblr.fitting.allocate import Choice, allocate
from gblr.fitting.config import GaudiConfig
from gblr.fitting.fit import rank_choices
from gblr.fitting.gauge import triangular_cost
from tests.helpers import raises_value_error

LAYERS = st.lists(st.tuples(st.integers(0, 99), st.integers(1, 4), st.integers(1, 5)), min_size=1, max_size=3)


def spectrum(seed: int, length: int) -> torch.Tensor:
    values = torch.rand(length, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) + 0.01
    return values.sort(descending=True).values


def equal_steps(steps, count) -> list[list[Choice]]:
    return [[Choice(r, r * step) for r in range(1, count + 1)] for step in steps]


def left_over(spectra, ranks) -> float:
    return sum(float(s[r:].square().sum() / s.square().sum()) for s, r in zip(spectra, ranks, strict=True))


@given(LAYERS, st.floats(0.3, 1))
def test_nothing_better_can_be_had_for_the_cost_it_reaches(layers, share):
    spectra = [spectrum(seed, length) for seed, length, _ in layers]
    steps = [float(step) for _, _, step in layers]
    dense = [step * len(s) for s, step in zip(spectra, steps, strict=True)]
    total = max(share * sum(dense), sum(steps))
    choices = [[Choice(r + 1, (r + 1) * step) for r in range(len(s))] for s, step in zip(spectra, steps, strict=True)]
    budgets = allocate(spectra, choices, dense, total)
    ranks = [round(budget / step) for budget, step in zip(budgets, steps, strict=True)]
    assert all(1 <= rank <= len(s) for rank, s in zip(ranks, spectra, strict=True))
    assert sum(budgets) <= total + 1e-9

    best_within = {}
    for choice in itertools.product(*(range(1, len(s) + 1) for s in spectra)):
        cost = sum(r * step for r, step in zip(choice, steps, strict=True))
        best_within[choice] = (cost, left_over(spectra, choice))
    ours = left_over(spectra, ranks)
    optimum = min(error for cost, error in best_within.values() if cost <= total + 1e-9)
    if len(set(steps)) == 1:
        assert ours <= optimum + 1e-12
    else:  # knapsack: at most the gain of the one step that did not fit is lost
        assert ours <= optimum + max(float(s[1] ** 2 / s.square().sum()) if len(s) > 1 else 0 for s in spectra)
    for i, (rank, s) in enumerate(zip(ranks, spectra, strict=True)):
        assert rank == len(s) or sum(budgets) + steps[i] > total - 1e-9  # no step that fits is left


def test_energy_goes_before_size_and_positions_count():
    flat, steep = torch.ones(8), torch.tensor([1.0, *[0.01] * 7])
    assert allocate([flat, steep], equal_steps([10, 10], 8), [80, 80], total=90) == [80.0, 10.0]
    assert allocate([100 * steep, flat], equal_steps([10, 10], 8), [80, 80], total=90) == [10.0, 80.0]
    # the same layer at four times the positions: each rank costs four times as much
    assert allocate([flat, flat], equal_steps([40, 10], 8), [320, 80], total=120) == [40.0, 80.0]


def test_no_layer_costs_more_than_dense():
    full = torch.ones(10)
    assert allocate([full, full], equal_steps([20, 20], 10), [100, 100], total=1000) == [100.0, 100.0]
    assert allocate([torch.ones(1)], equal_steps([9], 1), [8], total=8) == [8]


def test_a_layer_of_zeros_gets_rank_1():
    assert allocate([torch.zeros(4), torch.ones(4)], equal_steps([1, 1], 4), [4, 4], total=5) == [1.0, 4.0]


def test_totals_that_cannot_be_met_are_refused():
    with raises_value_error("rank 1 in every layer", "0.25", "0.2", "`relative_cost`"):
        allocate([torch.ones(4), torch.ones(4)], equal_steps([1, 1], 4), [4, 4], total=1.6)
    with raises_value_error("`spectra`", 2, 1):
        allocate([torch.ones(4), torch.ones(4)], equal_steps([1], 4), [4, 4], total=8)


@pytest.mark.parametrize("num_blocks", [None, 3, 1000])
def test_no_choice_has_more_ranks_than_the_matrix_and_all_cost_more_than_those_before(num_blocks):
    for block_rank, shape in ((1, (8, 8)), (4, (8, 8)), (4, (8, 20)), (16, (8, 8))):
        choices = rank_choices(GaudiConfig(0.5, block_rank=block_rank, num_blocks=num_blocks), shape)
        ranks, costs = zip(*choices, strict=True)
        assert ranks[0] == 1 and ranks[-1] <= min(8, (num_blocks or 8) * block_rank)
        assert all(one < next_one for one, next_one in itertools.pairwise(costs))


def test_layers_whose_ranks_grow_cheaper_are_given_more():
    """Of equal spectra, that in triangular form can use more."""
    falling = torch.linspace(1, 0.8, 8)
    triangular = [Choice(r, triangular_cost(r, (8, 8), 1, 1)) for r in range(1, 9)]
    plain = [Choice(r, 16 * r) for r in range(1, 9)]
    budgets = allocate([falling, falling], [triangular, plain], [72, 72], total=72 + 16)
    assert budgets[0] > budgets[1] and sum(budgets) <= 88


def test_what_pays_for_no_choice_goes_to_the_layer_that_would_gain_most_by_one():
    spectra = [torch.tensor([2.0, 1.0]), torch.tensor([2.0, 1.9])]
    assert allocate(spectra, equal_steps([10, 10], 2), [20, 20], 27) == [10, 17]
    assert allocate(spectra, equal_steps([10, 10], 2), [20, 20], 44) == [20, 20]

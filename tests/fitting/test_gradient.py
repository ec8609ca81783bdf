import pytest
import torch

from gblr.fitting.config import GaudiConfig
from gblr.fitting.fit import fit
from gblr.fitting.gradient import project
from tests.fitting.baselines import random_gram
from tests.fitting.planted import planted, planted_blocks, relative_error


def test_widths_within_the_budget_are_left_alone():
    width = torch.full((2, 2, 3), 0.5)
    price = torch.tensor([[[16.0], [12.0]]])
    assert torch.equal(project(width, price, torch.tensor([42.0, 100.0])), width)


def test_widths_above_the_budget_are_shrunk_by_one_threshold_to_meet_it(generator):
    width = torch.rand(3, 2, 5, generator=generator)
    price = torch.tensor([[[16.0], [12.0]]])
    budget = torch.tensor([5.0, 20.0, 50.0])
    shrunk = project(width, price, budget)
    cost = (shrunk * price).sum((1, 2))
    assert bool((cost <= budget + 1e-3).all()) and bool((cost > 0.99 * budget).all())
    for before, after in zip(width, shrunk, strict=True):
        moved = (before - after)[after > 0]
        assert float(moved.max() - moved.min()) < 1e-5
        assert bool((before[after == 0] <= moved.max() + 1e-5).all())


@pytest.mark.parametrize("init", ["correlation", "low_rank", "full"])
@pytest.mark.parametrize("make", [planted, lambda *args: planted_blocks(*args, num_blocks=3).to_dense()])
def test_gradient_refinement_is_never_worse_than_its_start_and_keeps_the_budget(init, make, generator):
    weight = make(24, 24, generator)
    options = {"relative_cost": 0.5, "init": init, "smoothing_std": 2.0}
    start = fit(weight, GaudiConfig(refine="none", **options))
    refined = fit(weight, GaudiConfig(refine="gradient", steps=20, **options))
    assert refined.num_mults <= 0.5 * 24 * 24
    assert relative_error(refined, weight) <= relative_error(start, weight) + 1e-6


@pytest.mark.parametrize("init", ["correlation", "low_rank"])
def test_gradient_refinement_improves_on_its_start(init, generator):
    weight = torch.randn(32, 32, generator=generator)
    options = {"relative_cost": 0.5, "init": init, "smoothing_std": 2.0}
    start = fit(weight, GaudiConfig(refine="none", **options))
    refined = fit(weight, GaudiConfig(refine="gradient", steps=150, **options))
    assert relative_error(refined, weight) < 0.97 * relative_error(start, weight)


def test_gradient_refinement_uses_the_inputs(generator):
    weight, gram = torch.randn(16, 16, generator=generator), random_gram(1, 16, generator)[0].float()
    config = GaudiConfig(0.5, refine="gradient", init="low_rank", steps=30)
    plain, weighted = (weight - fit(weight, config, gram=g).to_dense() for g in (None, gram))
    assert float(((weighted @ gram) * weighted).sum()) < 0.9 * float(((plain @ gram) * plain).sum())


def test_gradient_refinement_is_repeatable(generator):
    weight = planted(16, 24, generator)
    config = GaudiConfig(0.5, refine="gradient", steps=15)
    first, second = fit(weight, config), fit(weight, config)
    assert torch.equal(first.to_dense(), second.to_dense())

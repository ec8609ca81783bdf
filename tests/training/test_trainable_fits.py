"""Fits are a start for training: steps of a usual size must not undo them."""

import pytest
import torch
from torch import nn

import gblr
from gblr.experiments import minilm_stsb
from gblr.fitting.config import STIFF_GROWTH, TRAINABLE_GROWTH
from gblr.workflows.settings import Settings
from gblr.workflows.variants import config_of


def tuned(max_growth: float, block_rank: int, generator: torch.Generator) -> tuple[float, float, float]:
    """Growth of the factors, and the error of a layer before and after some steps towards what it was fitted to."""
    turn = torch.linalg.qr(torch.randn(96, 96, generator=generator))[0]
    weight = torch.randn(96, 96, generator=generator) * torch.logspace(0, -1, 96) @ turn
    model = nn.Sequential(nn.Linear(96, 96, bias=False))
    model[0].weight.data.copy_(weight)
    gblr.convert_(model, gblr.GaudiConfig(0.7, block_rank=block_rank, max_growth=max_growth))
    matrix = model[0].to_matrix()
    blocks = (matrix.u @ matrix.u.mT) * (matrix.v @ matrix.v.mT)
    optimizer = torch.optim.AdamW(gblr.param_groups(model, lr=1e-3, structure_lr=1e-3))
    x = torch.randn(1024, 96, generator=generator)
    goal = x @ weight.T
    errors = []
    for _ in range(30):
        loss = (model(x) - goal).square().sum() / goal.square().sum()
        errors.append(loss.item() ** 0.5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float((blocks.sum() / weight.square().sum()).sqrt()), errors[0], max(errors[-10:])


@pytest.mark.parametrize("block_rank", [1, 8])
def test_by_default_they_bear_it_and_stiff_ones_do_not_but_are_nearer(block_rank, generator):
    state = generator.get_state()
    growth, before, after = tuned(TRAINABLE_GROWTH, block_rank, generator)
    assert growth <= TRAINABLE_GROWTH and after < 1.1 * before
    generator.set_state(state)
    stiff_growth, stiff_before, stiff_after = tuned(STIFF_GROWTH, block_rank, generator)
    assert stiff_growth > TRAINABLE_GROWTH and stiff_before < before and stiff_after > 1.2 * stiff_before
    assert gblr.GaudiConfig(0.5).max_growth == TRAINABLE_GROWTH


def test_factors_are_never_smaller_than_their_product():
    with pytest.raises(ValueError, match=r"`max_growth` must be at least 1.*0\.5"):
        gblr.GaudiConfig(0.5, max_growth=0.5)


@pytest.mark.parametrize(("epochs", "growth"), [(0.0, STIFF_GROWTH), (2.0, TRAINABLE_GROWTH), (None, TRAINABLE_GROWTH)])
def test_compress_takes_what_suits_what_follows(epochs, growth):
    config = config_of(Settings("model", "data", epochs=epochs), "gaudi")
    assert isinstance(config, gblr.GaudiConfig) and config.max_growth == growth


def test_text_runs_are_trained_from_fits_that_bear_it():
    runs = minilm_stsb.RECIPE.runs(1)
    for name, run in runs.items():
        if run.method == "gaudi":
            assert run.max_growth == (TRAINABLE_GROWTH if run.epochs or "trainable" in name else STIFF_GROWTH), name
    waits_for = runs["minilm-gblr-16-global-trainable-0.5-seed0"]
    assert runs["minilm-gblr-16-global-distilled-0.5-seed0"].fit == waits_for.fit

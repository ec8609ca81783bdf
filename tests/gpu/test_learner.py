"""The learner on a CUDA device: no step waits for it, a captured step learns to the end. Run with `pytest -m gpu`."""

import math
from contextlib import contextmanager

import pytest
import torch

from gblr.conversion.cost import cost
from gblr.conversion.harden import harden_
from gblr.training.budget import Budget
from gblr.training.learner import StructureLearner
from gblr.training.param_groups import param_groups
from tests.training.models import IMAGES, SHARP, SOFT, gaudi_layers, mixed_model, one_step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
METHODS = ["projection", "shrinkage"]
STEPS = 10


@contextmanager
def no_waiting():
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def budget_of(method: str) -> Budget:
    return Budget(relative_cost=0.5, method=method, max_shrinkage=1.0)


def groups_of(model: torch.nn.Module, tensor_rates: bool = False) -> list[dict]:
    groups = param_groups(model, lr=0.01, structure_lr=0.02)
    return [g | {"lr": torch.tensor(g["lr"], device="cuda")} for g in groups] if tensor_rates else groups


def assert_budget_met(learner: StructureLearner, model: torch.nn.Module) -> None:
    assert learner.step == STEPS
    reported = learner.relative_cost
    harden_(model.eval())
    assert reported == pytest.approx(cost(model, IMAGES.cuda()).relative_cost)
    assert 0 < reported <= 0.5


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("sigma", [SHARP, SOFT], ids=["sharp", "soft"])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_step_does_not_wait_for_the_device(method, sigma, frozen):
    model, x = mixed_model(2, relative_cost=0.8).cuda(), IMAGES.cuda()
    gaudi_layers(model)[-1].requires_grad_(not frozen)
    optimizer = torch.optim.AdamW(groups_of(model))
    learner = StructureLearner(model, optimizer, budget_of(method), sigma, total_steps=STEPS)
    for step in range(STEPS):
        optimizer.zero_grad()
        (model(x) - 1).square().mean().backward()
        if step < 2:  # positions are counted, plans of the FFT made
            optimizer.step()
        else:
            with no_waiting():
                optimizer.step()
    assert_budget_met(learner, model)


def test_a_step_that_the_scaler_skips_changes_nothing_and_does_not_wait():
    model, x = mixed_model(2).cuda(), IMAGES.cuda()
    optimizer = torch.optim.AdamW(groups_of(model), fused=True)
    learner = StructureLearner(model, optimizer, budget_of("projection"), SHARP, total_steps=STEPS)
    scaler = torch.amp.GradScaler("cuda", init_scale=4.0)
    for step in range(STEPS + 1):
        optimizer.zero_grad()
        scaler.scale((model(x) - 1).square().mean()).backward()
        if step == 5:
            gaudi_layers(model)[0].u.grad[0] = math.inf
        before = [p.detach().clone() for p in model.parameters()]
        with no_waiting() if step >= 2 else torch.enable_grad():
            scaler.step(optimizer)
        scaler.update()
        same = all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
        assert same == (step == 5)
    assert_budget_met(learner, model)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("frozen", [False, True])
def test_a_captured_step_learns_to_the_end_of_the_schedule(method, frozen):
    """Forward, backward, optimizer and learner in one CUDA graph, replayed: sigma and the budget move inside it."""
    model, x = mixed_model(2, relative_cost=0.8).cuda(), IMAGES.cuda()
    gaudi_layers(model)[0].requires_grad_(not frozen)
    optimizer = torch.optim.AdamW(groups_of(model, tensor_rates=method == "shrinkage"), capturable=True)
    learner = StructureLearner(model, optimizer, budget_of(method), SHARP, total_steps=STEPS)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            one_step(model, optimizer, x)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad()
    with torch.cuda.graph(graph):
        one_step(model, optimizer, x)
    assert learner.step == 3
    sigmas = []
    for _ in range(STEPS - 3):
        graph.replay()
        sigmas.append(float(gaudi_layers(model)[0].sigma))
    assert sigmas == sorted(sigmas) and sigmas[0] < sigmas[1] and sigmas[-1] == math.inf
    assert_budget_met(learner, model)

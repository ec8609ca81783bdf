"""A run that was stopped and resumed is the run that was not."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from gblr.training.budget import Budget
from gblr.training.learner import StructureLearner
from tests.helpers import raises_value_error
from tests.training.models import (
    IMAGES,
    ROWS,
    SHARP,
    SOFT,
    adamw,
    changed,
    learner_of,
    mixed_model,
    mlp,
    one_step,
    snapshot,
    train,
)

STEPS = 8


class Run:
    """A training program: dropout, shuffled data, a schedule of the rate, and all of its state in `save`."""

    def __init__(self, **options: Any):
        self.model = nn.Sequential(nn.Dropout(0.1), *mlp(block_rank=2))
        self.optimizer = adamw(self.model)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, STEPS)
        self.order = torch.Generator().manual_seed(1)
        self.options = options
        self.learner: StructureLearner | None = None

    def attach(self) -> StructureLearner:
        self.learner = learner_of(self.model, self.optimizer, total_steps=STEPS, **self.options)
        return self.learner

    def train(self, steps: int) -> None:
        for _ in range(steps):
            batch = ROWS[torch.randperm(len(ROWS), generator=self.order)[:3]]
            self.optimizer.zero_grad()
            (self.model(batch) - 1).square().mean().backward()
            self.optimizer.step()
            self.scheduler.step()

    def save(self) -> dict[str, Any]:
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "learner": self.learner.state_dict(),
            "order": self.order.get_state(),
            "rng": torch.get_rng_state(),
        }
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        return torch.load(file, weights_only=True)

    def load_all_but_the_optimizer(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.order.set_state(state["order"])
        torch.set_rng_state(state["rng"])


def by_optimizer(run: Run, state: dict[str, Any]) -> None:
    run.attach()
    run.load_all_but_the_optimizer(state)
    run.optimizer.load_state_dict(state["optimizer"])


def by_optimizer_before_the_model(run: Run, state: dict[str, Any]) -> None:
    run.attach()
    run.optimizer.load_state_dict(state["optimizer"])
    run.load_all_but_the_optimizer(state)


def by_learner(run: Run, state: dict[str, Any]) -> None:
    run.attach()
    run.load_all_but_the_optimizer(state)
    run.optimizer.load_state_dict({k: v for k, v in state["optimizer"].items() if k != "gblr_learner"})
    assert run.learner.step == 0
    run.learner.load_state_dict(state["learner"])


def by_learner_made_last(run: Run, state: dict[str, Any]) -> None:
    run.load_all_but_the_optimizer(state)
    run.optimizer.load_state_dict(state["optimizer"])
    run.attach().load_state_dict(state["learner"])


WAYS = [by_optimizer, by_optimizer_before_the_model, by_learner, by_learner_made_last]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize(
    ("stop", "method", "sigma"),
    [(0, "projection", SHARP), (1, "shrinkage", SOFT), (4, "projection", SOFT), (7, "shrinkage", SHARP)],
)
def test_a_run_stopped_and_resumed_gives_the_same_bits(way: Callable, stop, method, sigma):
    options = {"budget": Budget(relative_cost=0.3, method=method), "sigma": sigma}
    straight = Run(**options)
    straight.attach()
    straight.train(stop)
    state = straight.save()
    straight.train(STEPS - stop)

    resumed = Run(**options)
    way(resumed, state)
    resumed.train(STEPS - stop)
    assert resumed.learner.state_dict() == straight.learner.state_dict()
    expected = snapshot(straight.model)
    for name, value in snapshot(resumed.model).items():
        assert torch.equal(value, expected[name]), name
    assert resumed.learner.metrics()["relative_cost"] == straight.learner.metrics()["relative_cost"] <= 0.3


def test_the_state_is_plain_and_rides_in_that_of_the_optimizer():
    model = mlp()
    learner = learner_of(model)
    train(learner, model, steps=2)
    state = learner.state_dict()
    assert learner.optimizer.state_dict()["gblr_learner"] == state
    assert state["step"] == 2 and state["total_steps"] == 8 and state["positions"] == [5.0, 5.0]
    assert isinstance(state["start"], float)


def test_an_optimizer_state_without_a_learner_leaves_it_alone():
    model = mlp()
    learner = learner_of(model)
    train(learner, model, steps=2)
    learner.optimizer.load_state_dict(adamw(model).state_dict())
    assert learner.step == 2


def test_counts_on_example_inputs_come_back():
    budget = Budget(relative_cost=0.5, scope="model")
    first, second = (learner_of(mixed_model(), budget=budget, example_inputs=IMAGES) for _ in range(2))
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict()


def test_measured_times_are_kept_and_not_measured_again():
    """Two measurements never agree: layers would change their price in the middle of a run."""
    first, second = (learner_of(mlp(), budget=Budget(seconds=10.0), example_inputs=ROWS) for _ in range(2))
    times = first.state_dict()["layer_times"]
    assert len(times) == 2 and times != second.state_dict()["layer_times"]
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict()


def test_the_default_shrinkage_is_that_of_the_rates_at_the_beginning():
    budget = Budget(relative_cost=0.3, method="shrinkage")
    first, second = (learner_of(m, adamw(m, structure_lr=lr), budget=budget) for m, lr in ((mlp(), 0.1), (mlp(), 0.01)))
    assert second.state_dict() != first.state_dict()
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict()


def test_the_callback_keeps_its_steps_after_resuming():
    model, found = mlp(), []
    first = learner_of(model, every=3)
    train(first, model, steps=2)
    model = mlp()
    second = learner_of(model, every=3, callback=lambda metrics: found.append(metrics["step"]))
    second.load_state_dict(first.state_dict())
    train(second, model, steps=5)
    assert found == [3, 6]


def test_a_state_of_other_layers_or_another_length_is_refused():
    model = mlp()
    learner = learner_of(model)
    train(learner, model, steps=1)
    state = learner.state_dict()
    with raises_value_error("2", "4", "layers"):
        learner_of(mixed_model()).load_state_dict(state)
    with raises_value_error("8", "9", "`total_steps`"):
        learner_of(mlp(), total_steps=9).load_state_dict(state)


def test_a_state_of_another_kind_of_budget_is_refused():
    """Costs at the start would be taken for parameters: nothing was cut until the end."""
    model = mlp()
    learner = learner_of(model)
    train(learner, model, steps=1)
    with raises_value_error("`relative_cost`", "`num_params`"):
        learner_of(mlp(), budget=Budget(num_params=200)).load_state_dict(learner.state_dict())
    old = {key: value for key, value in learner.state_dict().items() if key != "counts"}
    learner_of(mlp()).load_state_dict(old)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda three: pickle.loads(pickle.dumps(three))])
@pytest.mark.parametrize("done", [0, 3])
def test_a_copy_with_model_and_optimizer_learns_on_by_itself(copied, done):
    """Hooks stay behind when an optimizer is copied: such a copy met no budget, and said nothing."""
    model = mlp()
    learner = learner_of(model)
    train(learner, model, steps=done)
    other, optimizer, twin = copied((model, learner.optimizer, learner))
    before = snapshot(other)
    train(learner, model, steps=STEPS - done)
    assert changed(other, before) == [] and twin.optimizer is optimizer
    train(twin, other, steps=STEPS - done)
    assert twin.state_dict() == learner.state_dict() and twin.relative_cost <= 0.3
    assert all(torch.equal(value, snapshot(model)[name]) for name, value in snapshot(other).items())
    view = copy.copy(learner)
    one_step(model, learner.optimizer)
    assert learner.step == view.step == STEPS + 1  # one of them acts

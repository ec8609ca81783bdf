import math

import pytest
import torch

from gblr.training.budget import Budget
from gblr.training.plan import Plan
from gblr.training.schedules import SigmaSchedule
from gblr.training.train_config import TrainConfig
from tests.shape_hook import shapes_unchecked


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"epochs": 0}, "`epochs` must be above 0"),
        ({"max_steps": 0}, "`max_steps` must be at least 1"),
        ({"batch_size": 0}, "`batch_size` must be at least 1"),
        ({"accumulate": 0}, "`accumulate` must be at least 1"),
        ({"lr": -1.0}, "`lr` must be 0 or above"),
        ({"lr": math.nan}, "`lr` must be 0 or above"),
        ({"schedule": "step"}, "`schedule` must be one of 'cosine', 'linear', 'constant'; got 'step'"),
        ({"precision": "fp8"}, "`precision` must be one of"),
        ({"parallel": "tp"}, "`parallel` must be one of 'ddp', 'fsdp'"),
        ({"warmup": 5}, "`warmup` is a share"),
        ({"clip_norm": 0.0}, "`clip_norm` must be above 0"),
        ({"label_smoothing": 1.0}, "`label_smoothing` must lie in"),
        ({"mixup": -0.1}, "`mixup` must be 0 or above"),
        ({"ema": 1.0}, "`ema` is a decay in"),
        ({"eval_every": 0.0}, "`eval_every` must be above 0"),
        ({"sigma": SigmaSchedule()}, "give a `budget` too"),
    ],
)
def test_settings_that_make_no_sense_are_refused(options, words):
    with shapes_unchecked(), pytest.raises(ValueError, match=words.replace("[", r"\[")):
        TrainConfig(**options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"epochs": "3"}, "`epochs` must be a number; got '3'"),
        ({"lr": "1e-3"}, "`lr` must be a number"),
        ({"batch_size": 1.5}, "`batch_size` must be a whole number"),
        ({"budget": 0.3}, "`budget` must be a gblr.Budget"),
    ],
)
def test_what_is_no_number_or_budget_is_told(options, words):
    with shapes_unchecked(), pytest.raises(TypeError, match=words):
        TrainConfig(**options)


def test_differences_name_the_fields_and_leave_out_what_changes_nothing():
    config = TrainConfig(lr=0.1, budget=Budget(relative_cost=0.3), num_workers=2, parallel="fsdp")
    stored = TrainConfig(lr=0.2, budget=Budget(relative_cost=0.4)).to_plain()
    found = config.differences(stored)
    assert [text.split()[0] for text in found] == ["`lr`", "`budget`"]
    assert found[0] == "`lr` was 0.2 and is 0.1"
    assert config.differences(config.to_plain()) == []


def test_a_field_that_a_stored_config_lacks_is_a_difference():
    stored = TrainConfig().to_plain()
    del stored["clip_norm"]
    assert TrainConfig().differences(stored) == ["`clip_norm` was None and is 1.0"]


def test_devices_and_infinities_survive_being_stored():
    sigma = SigmaSchedule.constant(math.inf)
    config = TrainConfig(budget=Budget(seconds=0.1, device=torch.device("cpu")), sigma=sigma)
    assert config.differences(config.to_plain()) == []
    assert config.to_plain()["sigma"]["last"] == math.inf


def test_a_plan_counts_optimizer_steps():
    plan = Plan.of(TrainConfig(epochs=2.5, accumulate=3, eval_every=0.5, checkpoint_every=2), num_batches=13)
    assert (plan.steps_per_epoch, plan.total_steps) == (4, 10)
    assert [step for step in range(10) if plan.reports(step)] == [1, 3, 5, 7, 9]
    assert [step for step in range(10) if plan.saves(step)] == [7, 9]  # the last step always


def test_max_steps_counts_instead_of_epochs():
    assert Plan.of(TrainConfig(epochs=7, max_steps=3), num_batches=2).total_steps == 3


def test_an_epoch_must_hold_a_step():
    with pytest.raises(ValueError, match="2 batches, too few for one step: `accumulate` is 3"):
        Plan.of(TrainConfig(accumulate=3), num_batches=2)

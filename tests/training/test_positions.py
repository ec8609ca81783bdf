import copy
import io

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from gblr.conversion.cost import cost
from gblr.conversion.harden import harden_
from gblr.layers.gaudi import GaudiLinear
from gblr.ops import prox
from gblr.training.budget import Budget
from gblr.training.positions import PositionCounter, with_stand_ins
from tests.shape_hook import shapes_unchecked
from tests.training.models import (
    IMAGES,
    ROWS,
    gaudi_layers,
    learner_of,
    mixed_model,
    mlp,
    no_values_read,
    one_step,
    train,
)


class Repeating(nn.Module):
    """Applies its first layer four times and its last never."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.often, self.once, self.never = GaudiLinear(12, 12), GaudiLinear(12, 30), GaudiLinear(12, 12)

    def forward(self, x):
        for _ in range(4):
            x = torch.tanh(self.often(x))
        return self.once(x)


def has_hooks(model: nn.Module) -> bool:
    return any(layer._forward_hooks for layer in gaudi_layers(model))


def test_all_calls_of_a_layer_count_and_hooks_are_taken_off():
    model = Repeating()
    counter = PositionCounter(gaudi_layers(model))
    model(ROWS)
    counter.stop()
    assert counter.counts() == [4 * 5, 5, 0] and not has_hooks(model)
    model(ROWS)
    assert counter.counts() == [4 * 5, 5, 0]


def test_micro_batches_add_up_and_evaluation_does_not_count():
    model = mixed_model(1)
    counter = PositionCounter(gaudi_layers(model))
    model(IMAGES)
    model.eval()(IMAGES)
    model.train()(IMAGES[:3])
    assert counter.counts() == [7 * layer.positions for layer in cost(model, IMAGES).converted]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_what_a_checkpoint_computes_again_does_not_count_again(use_reentrant):
    model = mlp()
    counter = PositionCounter(gaudi_layers(model))
    x = ROWS.clone().requires_grad_()
    y = checkpoint(model[0], x, use_reentrant=use_reentrant)
    model[2](torch.tanh(y)).square().sum().backward()
    assert counter.counts() == [5, 5]


def test_parts_in_evaluation_mode_count_too():
    model = Repeating()
    model.often.eval()
    counter = PositionCounter(gaudi_layers(model))
    for _ in range(2):
        with torch.no_grad():
            model.never.eval()(ROWS[:3])  # a part that passes no gradient on, in each of two micro-batches
        model(ROWS)
    assert counter.counts() == [2 * 4 * 5, 2 * 5, 3]


def test_a_layer_that_no_step_reaches_is_neither_counted_nor_cut():
    model = Repeating()
    model(ROWS)
    model.never(ROWS)  # in an earlier run
    before = model.never.width_frac.detach().clone()
    learner = learner_of(model)
    train(learner, model)
    assert learner.state_dict()["positions"] == [20.0, 5.0, 0.0] and torch.equal(model.never.width_frac, before)
    reported = learner.relative_cost
    harden_(model.eval())
    assert reported == pytest.approx(cost(model, ROWS).relative_cost) and 0.28 < reported <= 0.3


@pytest.mark.parametrize("resumes", [False, True])
def test_a_layer_that_a_later_step_reaches_counts_as_the_others_on_average(resumes):
    assert with_stand_ins([20.0, 0.0, 5.0]) == [20.0, 12.5, 5.0]
    model = Repeating()
    learner = learner_of(model, total_steps=20)
    train(learner, model, steps=3)
    if resumes:
        state = learner.optimizer.state_dict()
        learner.remove()
        learner = learner_of(model, learner.optimizer, total_steps=20)
        learner.optimizer.load_state_dict(state)
    start = learner.state_dict()["start"]
    model.once = nn.Sequential(model.never, model.once)  # a router that sends it something
    train(learner, model, steps=1)
    assert learner.state_dict()["positions"] == [20.0, 5.0, 12.5] and not has_hooks(model)
    assert learner.state_dict()["start"] == pytest.approx(start + 12.5 * 12 * 12)  # it begins at the dense cost
    train(learner, model, steps=16)
    assert learner.is_done and 0.28 < learner.relative_cost <= 0.3
    assert model.never.width_frac.mean() < 0.9


def test_watching_for_a_layer_reads_no_value_on_the_host(monkeypatch):
    monkeypatch.setattr(prox, "can_read_values", lambda *_: False)  # on the CPU one read saves a search
    model = Repeating()
    learner = learner_of(model)
    train(learner, model, steps=1)
    assert has_hooks(model)
    with no_values_read():
        learner._after_step()


def test_in_a_budget_of_parameters_all_layers_count():
    model = Repeating()
    learner = learner_of(model, budget=Budget(num_params=300))
    train(learner, model)
    harden_(model.eval())
    assert sum(p.numel() for p in model.parameters()) <= 300


@pytest.mark.parametrize("compiled", [False, True])
def test_a_part_in_evaluation_mode_keeps_the_budget(compiled):
    torch._dynamo.reset()
    model = nn.Sequential(mlp(), nn.Tanh(), GaudiLinear(8, 8))
    model[0].eval()
    learner = learner_of(model, budget=Budget(relative_cost=0.3, weights="price"))
    with shapes_unchecked():
        train(learner, torch.compile(model, backend="eager") if compiled else model)
    reported = learner.relative_cost
    assert learner.state_dict()["positions"] == [5.0] * 3
    harden_(model.eval())
    assert reported == pytest.approx(cost(model, ROWS).relative_cost) and reported <= 0.3


@pytest.mark.parametrize("resumes", [False, True])
def test_after_an_empty_batch_the_next_one_is_counted(resumes):
    model = mixed_model(1)
    learner = learner_of(model)
    model[1].eval()  # it would refuse an empty batch
    model(IMAGES[:0]).sum().backward()
    learner.optimizer.step()
    assert 0 < learner.relative_cost < 1 and learner.state_dict()["start"] is None
    if resumes:
        state = learner.optimizer.state_dict()
        learner.remove()
        learner = learner_of(model, learner.optimizer)
        learner.optimizer.load_state_dict(state)
    one_step(model, learner.optimizer, IMAGES)
    assert learner.step == 2
    assert learner.state_dict()["positions"] == [4 * layer.positions for layer in cost(model, IMAGES).converted]


def test_copies_of_the_model_are_not_counted_and_can_be_saved():
    model = mlp()
    learner = learner_of(model)
    averaged, twin = AveragedModel(model), copy.deepcopy(model)
    averaged(ROWS)
    twin(ROWS)
    torch.save(averaged, file := io.BytesIO())
    file.seek(0)
    torch.load(file, weights_only=False)(ROWS)
    train(learner, model, steps=1)
    assert learner.state_dict()["positions"] == [5.0, 5.0]


def test_calls_in_a_compiled_graph_are_not_seen_and_the_last_stands_in_for_all_layers():
    torch._dynamo.reset()
    model = mlp()
    counter = PositionCounter(gaudi_layers(model))
    with shapes_unchecked():
        first = torch.compile(model[0], backend="eager", fullgraph=True)
        for x in (ROWS[:2], ROWS):
            model[2](first(x))
    assert counter.counts() == [5, 5]


@pytest.mark.parametrize("inputs", [None, ROWS])
def test_a_layer_that_is_applied_several_times_keeps_the_budget(inputs):
    model = Repeating()
    del model.never
    learner = learner_of(model, example_inputs=inputs)
    train(learner, model)
    reported = learner.relative_cost
    harden_(model.eval())
    assert reported == pytest.approx(cost(model, ROWS).relative_cost) and 0.28 < reported <= 0.3


def test_the_learner_counts_in_its_first_step_only():
    model = mlp()
    learner = learner_of(model)
    assert has_hooks(model)
    train(learner, model, steps=1)
    assert not has_hooks(model)
    state = learner.state_dict()
    learner.remove()

    learner = learner_of(model, learner.optimizer)
    assert has_hooks(model)
    learner.load_state_dict(state)
    assert not has_hooks(model)
    learner.remove()

    learner_of(model, learner.optimizer).remove()
    assert not has_hooks(model)

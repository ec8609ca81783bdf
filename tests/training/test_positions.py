import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gblr.conversion.cost import cost
from gblr.conversion.harden import harden_
from gblr.layers.gaudi import GaudiLinear
from gblr.training.positions import PositionCounter
from tests.shape_hook import shapes_unchecked
from tests.training.models import IMAGES, ROWS, gaudi_layers, learner_of, mixed_model, mlp, train


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
    assert counter.stop() == [4 * 5, 5, 1] and not has_hooks(model)
    model(ROWS)
    assert counter.stop() == [4 * 5, 5, 1]


def test_micro_batches_add_up_and_evaluation_does_not_count():
    model = mixed_model(1)
    counter = PositionCounter(gaudi_layers(model))
    model(IMAGES)
    model.eval()(IMAGES)
    model.train()(IMAGES[:3])
    assert counter.stop() == [7 * layer.positions for layer in cost(model, IMAGES).converted]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_what_a_checkpoint_computes_again_does_not_count_again(use_reentrant):
    model = mlp()
    counter = PositionCounter(gaudi_layers(model))
    x = ROWS.clone().requires_grad_()
    y = checkpoint(model[0], x, use_reentrant=use_reentrant)
    model[2](torch.tanh(y)).square().sum().backward()
    assert counter.stop() == [5, 5]


def test_calls_in_a_compiled_graph_are_not_seen_and_the_last_stands_in_for_all_layers():
    torch._dynamo.reset()
    model = mlp()
    counter = PositionCounter(gaudi_layers(model))
    with shapes_unchecked():
        first = torch.compile(model[0], backend="eager", fullgraph=True)
        for x in (ROWS[:2], ROWS):
            model[2](first(x))
    assert counter.stop() == [5, 5]


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

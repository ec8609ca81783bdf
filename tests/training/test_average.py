import copy
import math

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import gblr
from gblr.layers.gaudi import GaudiLinear
from gblr.training.average import Average
from gblr.training.loop import train
from tests.helpers import assert_close
from tests.training.cases import make_config, make_data, make_net
from tests.training.models import ROWS, gaudi_layers, learner_of, mlp, one_step


def norm_and_gaudi():
    torch.manual_seed(0)
    return nn.Sequential(nn.BatchNorm1d(4), GaudiLinear(4, 6))


def move(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(0.0, 1.0)
        model[0].running_mean.add_(1.0)
        model[0].num_batches_tracked.add_(1)
        model[1].set_sigma(3.0)


def test_contents_and_statistics_are_averaged_and_structure_is_not():
    model = norm_and_gaudi()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    average = Average(model, 0.75)
    move(model)
    now = {name: value.clone() for name, value in model.state_dict().items()}
    average.update(step=1000)
    with average.applied():
        inside = {name: value.clone() for name, value in model.state_dict().items()}
    same = {"1.width_frac", "1.location_frac", "1.sigma", "0.num_batches_tracked"}
    for name, value in inside.items():
        if name in same:
            assert torch.equal(value, now[name]), name
        else:
            assert_close(value, 0.75 * before[name] + 0.25 * now[name])
        assert torch.equal(model.state_dict()[name], now[name]), name  # its own again


def test_the_first_steps_are_forgotten_fast():
    model = nn.Linear(2, 2, bias=False)
    average = Average(model, 0.999)
    with torch.no_grad():
        model.weight.fill_(1.0)
    average._mean[0].zero_()
    average.update(step=0)
    assert_close(average._mean[0], torch.full((2, 2), 0.9))  # decay (1 + 0) / (10 + 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_average_of_a_model_in_half_precision_does_not_stall(dtype):
    model = nn.Linear(2, 2, bias=False, dtype=dtype)
    with torch.no_grad():
        model.weight.zero_()
        average = Average(model, 0.999)
        model.weight.fill_(1.0)
    for _ in range(2000):
        average.update(step=10000)
    with average.applied():
        inside = model.weight.detach().clone()
    assert_close(inside, torch.full((2, 2), 1 - 0.999**2000))
    assert torch.equal(model.weight, torch.ones(2, 2, dtype=dtype))
    average.restart()
    with average.applied():
        assert torch.equal(model.weight, torch.ones(2, 2, dtype=dtype))


class Versioned(nn.Linear):
    """Has more in its state than tensors."""

    def get_extra_state(self):
        return {"version": 2}

    def set_extra_state(self, state):
        pass


def test_only_tensors_are_averaged():
    model = nn.Sequential(Versioned(8, 4))
    result = train(model, make_data(), make_data(50), make_config(epochs=2, ema=0.9))
    assert result.history[-1]["loss"] < result.history[0]["loss"]


def test_an_error_inside_gives_the_own_weights_back():
    model = norm_and_gaudi()
    average = Average(model, 0.5)
    move(model)
    now = model[1].u.detach().clone()
    with pytest.raises(RuntimeError), average.applied():
        assert not torch.equal(model[1].u, now)
        raise RuntimeError
    assert torch.equal(model[1].u, now)
    average.restart()
    with average.applied():
        assert torch.equal(model[1].u, now)


def test_evaluation_sees_the_average_and_training_does_not():
    data, test = make_data(), make_data(50)
    nets = make_net(), make_net()
    plain = train(nets[0], data, test, make_config(epochs=4))
    averaged = train(nets[1], data, test, make_config(epochs=4, ema=0.9))
    assert [row["train_loss"] for row in plain.history] == [row["train_loss"] for row in averaged.history]
    assert [row["loss"] for row in plain.history] != [row["loss"] for row in averaged.history]
    for name, value in nets[0].state_dict().items():
        assert torch.equal(value, nets[1].state_dict()[name]), name


@pytest.mark.parametrize("decay", [0.9, None])
@pytest.mark.parametrize("training", [True, False])
def test_an_average_of_all_buffers_has_the_masks_of_its_sigma(decay, training):
    """torch's, with use_buffers=True, averages the tables of masks too: saved and loaded it was another model, and
    hardened it cost several times as much.
    """
    model, averaging = mlp(), None if decay is None else get_ema_multi_avg_fn(decay)
    learner = learner_of(model)
    average = AveragedModel(model, multi_avg_fn=averaging, use_buffers=True).train(training)
    for _ in range(learner.total_steps):
        one_step(model, learner.optimizer)
        average.update_parameters(model)
    loaded = mlp(seed=1)
    loaded.load_state_dict(average.module.state_dict())
    assert all(math.isinf(layer.sigma) for layer in gaudi_layers(loaded))
    with torch.no_grad():
        assert torch.equal(average(ROWS), loaded(ROWS))
    hardened = copy.deepcopy(average.module)
    gblr.harden_(hardened)
    gblr.harden_(loaded)
    assert gblr.cost(hardened, ROWS).relative_cost == gblr.cost(loaded, ROWS).relative_cost


@pytest.mark.parametrize("look", [copy.deepcopy, lambda model: model.eval(), lambda model: model.double().float()])
def test_an_average_that_becomes_the_model_has_the_masks_of_its_sigma(look):
    """Lightning copies the average into the model at the end, by `.data`: nothing tells of that."""
    model, expected = mlp(), mlp()
    learner = learner_of(model)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    for _ in range(learner.total_steps):
        one_step(model, learner.optimizer)
        average.update_parameters(model)
    ours, theirs = ([*each.parameters(), *each.buffers()] for each in (model, average.module))
    for mine, averaged in zip(ours, theirs, strict=True):
        mine.data.copy_(averaged.data)
    expected.load_state_dict(model.state_dict())
    assert torch.equal(look(model)(ROWS), expected(ROWS))
    gblr.harden_(model)
    gblr.harden_(expected)
    assert gblr.cost(model, ROWS).relative_cost == gblr.cost(expected, ROWS).relative_cost

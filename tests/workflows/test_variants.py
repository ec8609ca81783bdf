import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import gblr
from gblr.models.resnet_cifar import CifarResNet
from gblr.training.train_config import FITTED_STRUCTURE_LR
from gblr.workflows import variants
from gblr.workflows.settings import Settings
from gblr.workflows.variants import Variant, sigma_of, where_of
from tests.shape_hook import shapes_unchecked


def test_patterns_that_choose_nothing_are_told_with_near_matches_for_convolutions_too():
    where = where_of(Settings("model", "data", convolutions=True, include=("layer",)))
    with pytest.raises(ValueError, match=r"no linear or convolution layer. Patterns: layer \(near matches: layer3"):
        gblr.convert_(CifarResNet(depth=8), gblr.LowRankConfig(0.5), where)


def test_convolutions_are_chosen_beside_linear_layers():
    where = where_of(Settings("model", "data", convolutions=True, exclude=("layer1", "layer2")))
    model = CifarResNet(depth=8)
    chosen = [name for name, module in model.named_modules() if where(module, name)]
    assert chosen == ["conv1", "layer3.0.conv1", "layer3.0.conv2", "linear"]


def test_fitted_blocks_stay_sharp_unless_they_shall_learn_where_to_be():
    layers = [gblr.GaudiLinear(64, 100)]
    slow, fast = (gblr.TrainConfig(structure_lr=rate) for rate in (FITTED_STRUCTURE_LR, 5e-3))
    fitted, scratch = Settings("model", "data", epochs=1.0), Settings("model", "data", epochs=1.0, from_scratch=True)
    assert sigma_of(fitted, slow, layers) == gblr.SigmaSchedule.constant(math.inf)
    assert sigma_of(fitted, fast, layers) == gblr.SigmaSchedule(32.0, 32.0)
    assert sigma_of(scratch, slow, layers) == gblr.SigmaSchedule(1.0, 32.0)


@pytest.mark.parametrize(
    ("options", "suits", "share"),
    [({}, 0.9, 0.9), ({}, 0.0, 0.0), ({"distill": 0.0}, 0.9, 0.0), ({"distill": 0.4}, 0.0, 0.4),
     ({"from_scratch": True}, 0.9, 0.0)],
)  # fmt: skip
def test_the_share_that_is_distilled_is_what_suits_the_data_or_what_was_asked(options, suits, share, tmp_path):
    task = SimpleNamespace(distill=suits)
    settings = Settings("model", "data", epochs=1.0, **options)
    with shapes_unchecked():
        assert Variant("gaudi", settings, task, None, tmp_path, print).distilled == share


def test_a_handful_of_training_steps_is_taken_slowly_and_told(tmp_path):
    """Adam's first steps are as long as the rate says; a rate that was asked for stays."""
    said = []

    def rate(num_samples, epochs, **options):
        defaults = {"lr": 3e-4, "batch_size": 10}
        task = SimpleNamespace(train_defaults=defaults, samples=range(num_samples))
        settings = Settings("model", "data", epochs=epochs, **options)
        with shapes_unchecked():
            return Variant("low-rank", settings, task, nn.Linear(2, 2), tmp_path, said.append)._train_config().lr

    assert rate(200, 1.0) == 3e-4 and rate(10, 1.0, lr=1e-3) == 1e-3 and rate(10, 1.0, from_scratch=True) == 3e-4
    assert not said
    assert rate(100, 1.0) == pytest.approx(1.5e-4) and rate(10, 0.5) == pytest.approx(1.5e-5)
    assert said[1].startswith("only 1 step of training: rate 1.5e-05 in place of 0.0003")


class Batches:
    def batch(self, size):
        return torch.zeros(size, 4)


def test_large_batches_are_timed_as_far_as_that_takes_a_minute(monkeypatch):
    """A language model on a CPU takes minutes for one batch of 64."""
    said = []
    models = {"dense": nn.Linear(4, 4), "small": nn.Linear(4, 4)}
    for slow, sizes in ((1e-3, ["1", "64"]), (0.5, ["1", "8"]), (30.0, ["1"])):
        monkeypatch.setattr(variants, "interleaved", lambda calls, *_, slow=slow, **__: [[slow] for _ in calls])
        with shapes_unchecked():
            found = variants.seconds_per_batch(models, Batches(), (1, 64), said.append)
        assert list(found) == list(models) and all(list(times) == sizes for times in found.values())
    assert said == ["  batches of 64 would take long: 8 instead", "  batches of 64 would take long"]

"""Methods of one comparison are told the same of the dense model, and it is measured for the first alone."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import gblr
from gblr.workflows import calibrated
from gblr.workflows.calibrated import SharedCalibration
from gblr.workflows.settings import Settings
from tests.shape_hook import shapes_unchecked

TASK = SimpleNamespace(calibration=lambda num: [torch.linspace(-1, 1, num * 8).view(num, 8)])


@pytest.fixture
def measured(monkeypatch):
    """How often the model was measured."""
    found = []

    def measure(*args):
        found.append(args)
        return gblr.calibrate(*args)

    monkeypatch.setattr(calibrated, "calibrate", measure)
    return found


def shared(file=None, **options):
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    with shapes_unchecked():
        return SharedCalibration(Settings("model", "data", **options), TASK, model, gblr.linear_layers(), file)


def test_it_is_measured_once_and_kept_until_it_is_forgotten(measured, tmp_path):
    calibration, said = shared(tmp_path / "work" / "calibration.safetensors"), []
    first, second = calibration.get(said.append), calibration.get(said.append)
    assert len(measured) == 1 and said == ["256 samples read for calibration", "calibrated before"]
    for name, statistics in first.statistics.items():
        assert torch.equal(statistics.gram, second.statistics[name].gram)
    calibration.forget()
    assert not list((tmp_path / "work").iterdir())
    calibration.forget()


def test_one_method_alone_leaves_no_file(measured, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    calibration = shared()
    assert calibration.get(print) is not None and not list(tmp_path.iterdir())
    calibration.forget()


@pytest.mark.parametrize("options", ({"calibration": 0}, {"from_scratch": True}))
def test_where_nothing_is_to_be_measured_there_is_nothing(measured, options):
    assert shared(**options).get(print) is None and not measured


def test_it_is_measured_as_the_settings_say(measured):
    found = shared(sensitivity=True, calibration=4, precision="bfloat16").get(print)
    assert found.sensitivity.keys() == found.statistics.keys() == {"0", "2"}
    assert {statistics.positions for statistics in found.statistics.values()} == {4}

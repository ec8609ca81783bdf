"""One measurement serves any number of conversions, and a file keeps it."""

import copy

import pytest
import torch
from torch import nn

import gblr
from gblr.conversion.tensor_files import CheckpointError
from tests.conversion.converted import TOKENS, bert
from tests.conversion.low_rank_models import random_mlp
from tests.helpers import raises_value_error
from tests.shape_hook import shapes_unchecked

WHERE = gblr.linear_layers(exclude=("pooler",))
CONFIGS = (gblr.LowRankConfig(0.5, allocation="global"), gblr.GaudiConfig(0.5), gblr.MonarchConfig(0.5))


def batches(generator):
    return [torch.randn(40, 16, generator=generator) for _ in range(3)]


def seeded_conversion(model, config, calibration, sensitivity):
    torch.manual_seed(0)  # for what is drawn where blocks are dead
    return gblr.convert_(model, config, WHERE, calibration, sensitivity=sensitivity)


@pytest.mark.parametrize("sensitivity", (False, True))
def test_conversions_by_a_measurement_are_those_by_the_batches(sensitivity, tmp_path):
    dense = bert()
    given = [TOKENS, {"input_ids": TOKENS, "attention_mask": torch.ones_like(TOKENS)}]
    measured = gblr.calibrate(dense, given, WHERE, sensitivity)
    measured.save(tmp_path / "there" / "measured.safetensors")
    for calibration in (measured, gblr.Calibration.load(tmp_path / "there" / "measured.safetensors")):
        for config in CONFIGS:
            ours, theirs = copy.deepcopy(dense), copy.deepcopy(dense)
            found, expected = (
                seeded_conversion(model, config, seen, sensitivity)
                for model, seen in ((ours, calibration), (theirs, given))
            )
            for (name, a), b in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
                assert torch.equal(a, b), name
            assert (found.title, found.notes) == (expected.title, expected.notes)
            assert found.sensitivity.keys() == expected.sensitivity.keys()


def test_a_measurement_serves_some_of_its_layers_and_its_sensitivity_waits_to_be_asked_for(generator):
    model, given = random_mlp(), batches(generator)
    measured = gblr.calibrate(model, given, sensitivity=True)
    assert set(measured.statistics) == set(measured.sensitivity) == {"0", "2", "4"}
    one, other = copy.deepcopy(model), copy.deepcopy(model)
    some = gblr.linear_layers(include=("2",))
    assert not gblr.convert_(one, gblr.LowRankConfig(0.5), some, measured).sensitivity
    gblr.convert_(other, gblr.LowRankConfig(0.5), some, given)
    assert torch.equal(one[2].weight, other[2].weight)


def test_inputs_that_layers_share_are_stored_once(tmp_path):
    dense = bert()
    measured = gblr.calibrate(dense, [TOKENS], WHERE)
    measured.save(tmp_path / "measured.safetensors")
    query = measured.statistics["encoder.layer.0.attention.self.query"].gram
    of_query_key_value = query.nbytes
    layers = len(measured.statistics)
    everything = sum(found.gram.nbytes for found in measured.statistics.values())
    assert (tmp_path / "measured.safetensors").stat().st_size < everything - 2 * of_query_key_value + 1000 * layers


def test_what_was_not_measured_is_told(generator):
    model, given = random_mlp(), batches(generator)
    measured = gblr.calibrate(model, given, gblr.linear_layers(include=("0",)))
    with raises_value_error("has nothing of '2'", "same `where`"):
        gblr.convert_(model, gblr.LowRankConfig(0.5), calibration=measured)
    with raises_value_error("no sensitivity", "gblr.calibrate"):
        gblr.convert_(model, gblr.LowRankConfig(0.5), calibration=measured, sensitivity=True)
    assert isinstance(model[0], nn.Linear) and isinstance(model[2], nn.Linear)


@pytest.mark.parametrize("sensitivity", (False, True))
def test_another_model_is_refused(generator, sensitivity):
    measured = gblr.calibrate(random_mlp(), batches(generator), sensitivity=sensitivity)
    other = nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 8))
    with raises_value_error("another model", "20 x 12"):
        gblr.convert_(other, gblr.LowRankConfig(0.5), calibration=measured, sensitivity=sensitivity)


def test_other_files_are_refused(tmp_path):
    model = random_mlp()
    gblr.save_pretrained(model, tmp_path)
    weights = next(tmp_path.glob("*.safetensors"))
    with pytest.raises(CheckpointError, match="no calibration"):
        gblr.Calibration.load(weights)
    weights.write_bytes(weights.read_bytes()[:50])
    for file in (weights, tmp_path / "nothing"):
        with pytest.raises(CheckpointError, match="truncated"):
            gblr.Calibration.load(file)


def test_calibrate_tells_what_it_cannot_do(generator):
    with shapes_unchecked(), pytest.raises(TypeError, match="must be a"):
        gblr.calibrate("bert", [])
    with raises_value_error("reached none"):
        gblr.calibrate(random_mlp(), [])
    with raises_value_error("chose no"):
        gblr.calibrate(random_mlp(), batches(generator), gblr.linear_layers(include=("query",)))


@pytest.mark.parametrize(
    "call", [gblr.calibrate, lambda model, given: gblr.convert_(model, gblr.LowRankConfig(0.5), None, given)]
)
def test_what_is_no_list_of_batches_is_told(call, tmp_path, generator):
    for given, words in [
        (tmp_path / "measured.safetensors", "`gblr.Calibration.load`"),
        (str(tmp_path / "measured.safetensors"), "`gblr.Calibration.load`"),
        ({"input": torch.randn(3, 12, generator=generator)}, "[batch]"),
        (7, "got int"),
    ]:
        with shapes_unchecked(), raises_value_error("`calibration` must yield batches", words):
            call(random_mlp(), given)

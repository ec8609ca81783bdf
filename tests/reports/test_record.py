import json
import math
import os

import numpy as np
import pytest

from gblr.reports.fields import RecordError
from gblr.reports.record import FILE_NAME, Metric, encode_blocks, load_record, parse_record, save_record
from tests.reports.sample_records import digits_run

LEAST = {"format": 1, "title": "a run"}


@pytest.fixture(scope="module")
def digits():
    return digits_run()


def test_a_record_survives_a_round_trip(digits, tmp_path):
    file = save_record(digits, tmp_path / "run")
    record = load_record(tmp_path / "run")
    assert file.name == FILE_NAME and load_record(file) == record
    assert record.title == digits["title"] and record.cost == 0.2 and record.metric == Metric("accuracy", "%", True)
    assert [result.name for result in record.results] == ["GBLR, learned", "low rank", "Monarch", "dense"]
    assert record.main is record.results[0] and record.dense is record.results[3]
    assert list(record.results[0].seconds_per_batch) == [1, 64]
    layer, given = record.layers[4], digits["layers"][4]
    assert layer.shape == (256, 64) and layer.live_blocks == len(layer.block_array()) and layer.rank == given["rank"]
    assert layer.singular == tuple(given["singular"]) and layer.form == "packed"
    assert record.environment["threads"] == "2"


def test_infinite_and_undefined_numbers_become_null(digits, tmp_path):
    record = load_record(save_record(digits, tmp_path))
    assert math.inf in digits["history"]["sigma"]
    assert record.history.sigma[-1] is None and record.history.sigma[0] == 1.0
    broken = digits | {"history": {"step": [0, 1], "loss": [1.0, math.nan]}}
    assert load_record(save_record(broken, tmp_path)).history.loss == (1.0, None)


def test_numbers_of_numpy_are_written(tmp_path):
    result = {"name": "x", "value": np.float32(0.5), "num_params": np.int64(3)}
    record = load_record(save_record(LEAST | {"results": [result], "history": {"step": np.arange(3)}}, tmp_path))
    assert record.results[0].value == 0.5 and record.results[0].num_params == 3
    assert record.history.step == (0.0, 1.0, 2.0)


def test_almost_everything_may_be_missing_empty_or_null():
    names = ("results", "layers", "by_type", "environment", "model", "data", "metric", "history")
    for empty in (None, [], {}):
        fitting = {n: empty for n in names if empty is None or isinstance(empty, list) == (n in names[:3])}
        record = parse_record(LEAST | fitting)
        assert record.results == record.layers == record.by_type == () and record.history.step == ()
        assert record.main is None and record.dense is None
    null = {"cost": None, "seconds": None, "command": None}
    assert parse_record(LEAST | null).cost is None and parse_record(LEAST | {"news": 1}).title == "a run"


def test_the_main_result_is_the_first_that_is_not_dense_if_none_says_so():
    record = parse_record(LEAST | {"results": [{"name": "Dense"}, {"name": "low rank"}]})
    assert record.main is record.results[1] and record.dense is record.results[0]


LAYER = {"name": "fc", "shape": [4, 6]}
DAMAGED = [
    ({"title": None}, "`title` is missing"),
    ({"title": 3}, "`title` must be a text; got 3"),
    ({"format": None}, "`format` is missing"),
    ({"format": 2}, "`format` is 2, this gblr reads 1; update gblr"),
    ({"cost": "low"}, "`cost` must be a number or null; got 'low'"),
    ({"cost": True}, "`cost` must be a number or null; got True"),
    ({"metric": []}, "`metric` must be an object"),
    ({"metric": {"higher_is_better": "yes"}}, "`metric.higher_is_better` must be true or false"),
    ({"environment": {"cpu": ["a"]}}, "`environment.cpu` must be a text or a number"),
    ({"results": {}}, "`results` must be a list of objects"),
    ({"results": [{"value": 1.0}]}, "`results[0].name` is missing"),
    ({"results": [{"name": "a"}, 7]}, "`results[1]` must be one of a list of objects; got 7"),
    ({"results": [{"name": "a", "num_params": 1.5}]}, "`results[0].num_params` must be a whole number; got 1.5"),
    (
        {"results": [{"name": "a", "seconds_per_batch": {"1": 0}}]},
        "`results[0].seconds_per_batch.1` must be a positive",
    ),
    ({"results": [{"name": "a", "seconds_per_batch": {"one": 1}}]}, "must have batch sizes as keys; got 'one'"),
    ({"timed_lengths": {"one": 7}}, "`timed_lengths` must have batch sizes as keys; got 'one'"),
    ({"timed_lengths": {"1": 7.5}}, "`timed_lengths.1` must be a whole number"),
    ({"layers": [{"name": "fc"}]}, "`layers[0].shape` must be [out, in]"),
    ({"layers": [{"name": "fc", "shape": [4, 0]}]}, "`layers[0].shape` must be [out, in]"),
    ({"layers": [LAYER | {"blocks": "AAAA"}]}, "`layers[0].blocks` must be base64"),
    ({"layers": [LAYER | {"blocks": "!"}]}, "`layers[0].blocks` must be base64"),
    ({"layers": [LAYER | {"blocks": encode_blocks(np.array([[4, 1, 0, 1]]))}]}, "a row interval outside of the shape"),
    ({"layers": [LAYER | {"blocks": encode_blocks(np.array([[0, 1, 0, 7]]))}]}, "a col interval outside of the shape"),
    ({"layers": [LAYER | {"singular": [1.0, None]}]}, "`layers[0].singular[1]` must be a number"),
    ({"by_type": [{"type": "q"}]}, "`by_type[0].layers` is missing"),
    ({"history": {"step": [0, 1], "loss": [1.0]}}, "`history.loss` must be as long as `step`, which has 2 entries"),
    ({"history": {"step": "0"}}, "`history.step` must be a list of numbers"),
    ({"history": {"value": [[1, 2], [3]]}}, "`history.value[1]` must be [step, value]; got [3]"),
]


@pytest.mark.parametrize(("part", "message"), DAMAGED, ids=[message for _, message in DAMAGED])
def test_an_error_names_the_field(part, message, tmp_path):
    (tmp_path / FILE_NAME).write_text(json.dumps(LEAST | part))
    with pytest.raises(RecordError) as error:
        load_record(tmp_path)
    assert message in str(error.value) and FILE_NAME in str(error.value)


def test_files_that_are_no_records_are_refused_with_their_name(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"run\.json is not there"):
        load_record(tmp_path)
    for text in ('{"format": 1, "tit', "[]", "", "\x00"):
        (tmp_path / FILE_NAME).write_text(text)
        with pytest.raises(RecordError, match=r"run\.json"):
            load_record(tmp_path)


def test_a_failed_write_leaves_the_old_record(tmp_path, monkeypatch):
    save_record(LEAST, tmp_path)
    with pytest.raises(RecordError, match="`title`"):
        save_record({"format": 1}, tmp_path)
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk is full")))
    with pytest.raises(OSError, match="disk is full"):
        save_record(LEAST | {"title": "new"}, tmp_path)
    assert load_record(tmp_path).title == "a run" and os.listdir(tmp_path) == [FILE_NAME]


def test_blocks_beyond_16_bits_are_refused():
    with pytest.raises(ValueError, match=r"must lie in \[0, 65535\]; got 0 to 65536"):
        encode_blocks(np.array([[0, 65536, 0, 1]]))

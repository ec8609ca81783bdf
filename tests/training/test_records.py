import json
import sys

import pytest

from gblr.training.loop import train
from gblr.training.records import Records, line_of
from tests.training.cases import make_config, make_data, make_net

ROW = {"step": 5, "epoch": 1.0, "seconds": 2.0, "lr": 0.1, "train_loss": 0.5, "sigma": float("inf")}


def test_rows_are_appended_and_those_after_the_checkpoint_are_dropped(tmp_path):
    records = Records(tmp_path, False, [])
    records.add(ROW)
    records.add(ROW | {"step": 10})
    again = Records(tmp_path, False, [ROW])
    again.add(ROW | {"step": 11})
    rows = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [5, 11] and rows[0] == ROW


def test_without_a_folder_rows_stay_in_memory():
    records = Records(None, False, [])
    records.add(ROW)
    records.close()
    assert records.rows == [ROW]


def test_tensorboard_shows_the_curves(tmp_path):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    result = train(make_net(), make_data(), make_data(50), make_config(epochs=2, tensorboard=True), out=tmp_path)
    events = reader.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    names = set(events.Tags()["scalars"])
    assert {"train_loss", "accuracy", "relative_cost", "sigma", "lr"} <= names
    shown = [(event.step, event.value) for event in events.Scalars("accuracy")]
    assert shown == [(row["step"], pytest.approx(row["accuracy"])) for row in result.history]


def test_tensorboard_needs_a_folder_and_itself(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="give `out`"):
        train(make_net(), make_data(), None, make_config(tensorboard=True))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match="pip install tensorboard"):
        train(make_net(), make_data(), None, make_config(tensorboard=True), out=tmp_path)


def test_a_line_shows_metrics_and_cost_first():
    line = line_of(ROW | {"loss": 0.4, "relative_cost": 0.3, "top5": 0.99}, 20)
    assert line == "epoch 1, step 5 of 20, 2 s: train_loss 0.5000, loss 0.4000, relative_cost 0.3000, top5 0.9900"


def test_every_evaluation_is_a_line(capsys):
    train(make_net(), make_data(), make_data(50), make_config(epochs=3))
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == "" and len(lines) == 3
    assert lines[1].startswith("epoch 2, step 10 of 15, ") and "accuracy" in lines[1] and "relative_cost" in lines[1]

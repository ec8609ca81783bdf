"""benchmarks/bench_calibration.py on a tiny model: both precisions are measured, and stored with their command."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gblr.experiments.text_tasks import generated_windows
from tests.conversion.converted import llama
from tests.shape_hook import shapes_unchecked

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
OURS = ("bench_calibration", "bench_cpu", "bench_masks", "cpu_cases", "cpu_models")


@pytest.fixture
def benchmark_module(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield __import__("bench_calibration")
    for name in OURS:
        sys.modules.pop(name, None)


def test_both_precisions_are_measured_and_stored(benchmark_module, monkeypatch, tmp_path):
    out, threads = tmp_path / "calibration.json", torch.get_num_threads()
    monkeypatch.setattr(benchmark_module, "load_model", lambda source: SimpleNamespace(model=llama()))
    task = generated_windows(vocabulary=50, length=12)
    monkeypatch.setattr(benchmark_module, "load_text_task", lambda *_: task)
    command = ["bench", "--model", "x", "--data", "x", "--rounds", "1", "--blocks", "1", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", command)
    with shapes_unchecked():
        benchmark_module.main()
    assert torch.get_num_threads() == 1
    torch.set_num_threads(threads)
    stored = json.loads(out.read_text())
    assert [row["precision"] for row in stored["rows"]] == ["float32", "bfloat16"]
    for row in stored["rows"]:
        assert row["refit"] > 0 and 0 < row["difference"] < 1
    assert stored["rows"][0]["difference"] != stored["rows"][1]["difference"]
    assert stored["command"].startswith("python benchmarks/bench_calibration.py --blocks 1 --rounds 1 --model")

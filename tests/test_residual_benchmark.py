"""benchmarks/bench_residual.py on a tiny model: both goals are tried from one fit, and stored with their command."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gblr.conversion import refit
from gblr.conversion.residual import residual_streams
from gblr.experiments.text_tasks import generated_windows
from tests.conversion.converted import llama
from tests.shape_hook import shapes_unchecked

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def benchmark_module(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield __import__("bench_residual")
    for name in ("bench_residual", "bench_cpu", "bench_masks", "cpu_cases", "cpu_models"):
        sys.modules.pop(name, None)


def test_both_goals_are_measured_and_stored(benchmark_module, monkeypatch, tmp_path):
    out, threads = tmp_path / "residual.json", torch.get_num_threads()
    task = generated_windows(vocabulary=50, length=12)
    task.tests["wikitext2"] = task.tests["generated"]
    monkeypatch.setattr(benchmark_module, "load_model", lambda source: SimpleNamespace(model=llama()))
    monkeypatch.setattr(benchmark_module, "load_text_task", lambda *_: task)
    monkeypatch.setattr(sys, "argv", ["bench", "--model", "x", "--data", "x", "--out", str(out)])
    with shapes_unchecked():
        benchmark_module.main()
    torch.set_num_threads(threads)
    stored = json.loads(out.read_text())
    assert [row["goal"] for row in stored["rows"]] == ["none", "outputs", "sums"]
    assert len({row["perplexity"] for row in stored["rows"]}) == 3
    assert refit.residual_streams is residual_streams
    assert stored["command"].startswith("python benchmarks/bench_residual.py")

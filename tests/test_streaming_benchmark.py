"""The memory benchmark with a tiny model: what it allows, and that the limit it sets is one."""

import sys
from pathlib import Path

import pytest

from tests.shape_hook import shapes_unchecked

ROOT = Path(__file__).parents[1]


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    with shapes_unchecked():
        yield __import__("bench_streaming")
    sys.modules.pop("bench_streaming", None)


def test_sizes_are_those_of_embedding_model_and_one_block(bench, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "LENGTH", 10)
    largest, model, activations = bench.sizes(bench.write_tiny(tmp_path / "tiny", vocabulary=1000))
    assert largest == 4 * 1000 * 64
    block = 4 * 64 * 64 + 3 * 64 * 128 + 2 * 64
    assert model == 4 * (2 * 1000 * 64 + 2 * block + 64)
    # q, k, v, o and down, two norms; gate, up and the activation
    assert activations == 4 * 10 * (7 * 64 + 3 * 128)


@pytest.mark.slow
def test_a_conversion_beyond_its_limit_fails_and_one_within_tells_what_it_took(bench, tmp_path):
    tiny = bench.write_tiny(tmp_path / "tiny", vocabulary=40_000)
    largest = 4 * 40_000 * 64
    enough = bench.run_case(tiny, "low rank", "", 3 * largest)
    assert enough["within"] and largest < enough["peak_bytes"] < 3 * largest
    refitted = bench.run_case(tiny, "low rank", "refitted", 4 * largest)
    assert refitted["within"] and refitted["peak_bytes"] > enough["peak_bytes"] / 2
    little = bench.run_case(tiny, "low rank", "", largest)  # with a thread that shows that it is at work
    assert not little["within"] and "memory" in little["error"]


def test_commands_name_what_was_asked_for(bench):
    assert bench.command(False, None).endswith("--model FILE.gguf --data DIR --out docs/results/streaming.json")
    assert "--refit --only 'low rank' --model" in bench.command(True, "low rank")
    assert bench.command(True, "low rank").endswith("docs/results/streaming-refit.json")

"""The language benchmark with a tiny model on the CPU: what its rows say, and that it times what it says."""

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch

from gblr.experiments.smollm2_wikitext import COSTS
from tests.shape_hook import shapes_unchecked

ROOT = Path(__file__).parents[1]
OURS = ("bench_language", "language_models", "bench_cpu", "gpu_models", "gpu_cases", "bench_masks", "cpu_cases")


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    threads = torch.get_num_threads()
    with shapes_unchecked():
        yield __import__("bench_language")
    torch.set_num_threads(threads)
    for name in (*OURS, "cpu_models"):
        sys.modules.pop(name, None)


@pytest.fixture
def models(bench):
    return sys.modules["language_models"]


def smoke_record(bench, folder, *options):
    assert bench.main(["--smoke", "--out", str(folder / "speed.json"), *options]) == 0
    return json.loads((folder / "speed.json").read_text())


def test_every_method_has_a_row_for_each_task_and_cost(bench, tmp_path, monkeypatch):
    monkeypatch.setenv("GBLR_COMMIT", "abc")
    record = smoke_record(bench, tmp_path)
    methods = ("low-rank", "monarch", "blast", "gblr-1", "gblr-16")
    variants = [("dense", 1.0), *((method, cost) for method in methods for cost in COSTS)]
    expected = [(task, *one) for task in ("reading", "writing") for one in variants]
    assert [(row["task"], row["method"], row["cost"]) for row in record["rows"]] == expected
    assert record["commit"] == "abc" and str(tmp_path) not in json.dumps(record)
    sizes = {(row["method"], row["cost"]): row["size_bytes"] for row in record["rows"]}
    for row in record["rows"]:
        dense = next(other for other in record["rows"] if (other["task"], other["method"]) == (row["task"], "dense"))
        assert row["over_dense"] == pytest.approx(row["tokens_per_second"] / dense["tokens_per_second"], rel=1e-2)
        assert 0.85 * row["cost"] < row["relative_cost"] < row["cost"] + 0.01
        assert sum(row["forms"].values()) == (7 if row["method"].startswith("gblr") else 0)
    assert all(sizes[method, 0.318] < sizes[method, 0.7] < sizes["dense", 1.0] for method in methods)
    check_table(record)


def check_table(record):
    table = runpy.run_path(str(ROOT / "docs/_build/results_tables.py"))["TABLES"]["language-speed-cpu.json", ""]
    _, _, dense, *lines = table(record).splitlines()
    assert len(lines) == 15 and dense.startswith("| dense | 1 | 1.000 | 0.3 |")
    row = next(row for row in record["rows"] if (row["task"], row["method"], row["cost"]) == ("writing", "blast", 0.5))
    (line,) = (line for line in lines if line.startswith("| BLAST | 0.5 |"))
    assert f"| {row['tokens_per_second']:,.0f} | {row['over_dense']:.2f} |" in line


def test_patterns_choose_methods_and_those_that_name_none_are_refused(bench, tmp_path):
    record = smoke_record(bench, tmp_path, "--only", "*-8")
    assert {row["method"] for row in record["rows"]} == {"dense", "low-rank-8", "blast-8"}
    assert "--only '*-8'" in record["command"]
    with pytest.raises(SystemExit, match="names no method"):
        bench.main(["--smoke", "--only", "butterfly"])


def test_ranks_for_gpus_are_multiples_of_eight(models):
    shapes = {"q": (576, 576), "up": (1536, 576)}
    for method in ("low-rank-8", "blast-8"):
        assert all(matrix.rank % 8 == 0 for matrix in models.matrices(method, 0.5, shapes).values())


@torch.no_grad()
def test_reading_is_causal_attention_over_the_whole_window(bench, models):
    setting = bench.Setting(torch.device("cpu"), smoke=True)
    model, tokens = setting.model(), setting.tokens(16)
    expected = model(tokens, use_cache=False).logits
    torch.testing.assert_close(models.reading(model, tokens)(), expected)


@torch.no_grad()
def test_writing_stays_at_its_place_in_the_cache(bench, models, monkeypatch):
    setting = bench.Setting(torch.device("cpu"), smoke=True)
    model = setting.model()
    cache, places = models.cache_with_places(model.config, 8, setting.device)
    monkeypatch.setattr(models, "cache_with_places", lambda *_: (cache, places))
    step = models.writing(model, setting.tokens(1), 8)
    _, second, third = (step() for _ in range(3))
    torch.testing.assert_close(second, third)
    for layer in cache.layers:
        assert int(layer.cumulative_length) == 5
        assert layer.keys.abs().sum((0, 1, 3)).nonzero().flatten().tolist() == [4]


def test_variants_share_what_is_not_converted(bench, models):
    dense = bench.Setting(torch.device("cpu"), smoke=True).model()
    one = models.variant(dense, "low-rank", 0.5)
    assert one.model.lm_head.weight is dense.model.embed_tokens.weight
    assert one.model.model.norm.weight is dense.model.norm.weight
    assert isinstance(dense.model.layers[0].mlp.up_proj, torch.nn.Linear)

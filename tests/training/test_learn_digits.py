"""The example that learns a ViT's structure on real digits: that it runs, and (slow) that it is as good as dense."""

import json
import runpy
import sys
from pathlib import Path
from statistics import mean

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "learn_digits.py"
pytest.importorskip("sklearn")


def run(monkeypatch, out, *options):
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "--out", str(out), *options])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    rows = json.loads((out / "digits.json").read_text())["rows"]
    return {method: [row for row in rows if row["method"] == method] for method in {row["method"] for row in rows}}


def test_it_runs_and_meets_its_budget(monkeypatch, tmp_path):
    found = run(monkeypatch, tmp_path, "--epochs", "1")
    assert set(found) == {"dense", "learned structure", "low rank"}
    assert all(row["relative_cost"] <= 0.2 for row in found["learned structure"] + found["low rank"])


@pytest.mark.slow
def test_learned_structure_keeps_the_accuracy_of_dense_at_a_fifth_of_its_cost(monkeypatch, tmp_path):
    found = run(monkeypatch, tmp_path, "--seeds", "2")
    accuracy = {method: mean(row["accuracy"] for row in rows) for method, rows in found.items()}
    assert accuracy["learned structure"] >= accuracy["dense"] - 0.5

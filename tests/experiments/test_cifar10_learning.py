import json
import sys
from dataclasses import replace

import pytest
import torch

from gblr.data.images import ImageSet
from gblr.experiments import cifar10_learning as experiment

TINY = {"width": 24, "depth": 1, "num_heads": 2}


@pytest.fixture
def data():
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (32, 3, 32, 32), dtype=torch.uint8, generator=generator)
    return ImageSet(images, torch.randint(0, 10, (32,), generator=generator))


@pytest.mark.parametrize(
    "name", ["dense", "low-rank-0.25", "gaudi-0.25-rank1-projection", "gaudi-0.08-rank1-shrinkage"]
)
def test_a_run_ends_at_its_cost_and_tells_what_it_did(name, data):
    run = replace(experiment.named_runs()[name], epochs=3, batch_size=16, warmup_epochs=1.0)
    row = experiment.perform(run, data, data, **TINY)
    assert row["reached_cost"] <= run.relative_cost and 0 <= row["accuracy"] <= 100
    assert row["accuracy"] == pytest.approx(row["soft_accuracy"])  # hardening is exact at the end of the schedule
    assert json.loads(json.dumps(row, allow_nan=False))["seed"] == 0
    assert ("curve" in row) == (run.method == "gaudi")
    assert ("max_shrinkage" in row and row["max_shrinkage"] is not None) == (run.budget == "shrinkage")


def test_low_rank_layers_start_with_the_variance_of_dense_ones():
    dense, low_rank = (
        experiment.build(run, width=96, depth=1, num_heads=2).blocks[0].fc1.weight.detach()
        for run in (experiment.Run("dense"), experiment.Run("low rank", 0.25))
    )
    assert float(low_rank.std()) == pytest.approx(float(dense.std()), rel=1e-3)


def test_mixed_classes_are_shares_and_follow_the_box(data):
    x, y = data.images[:8].float(), data.labels[:8]
    shares = set()
    for seed in range(10):
        mixed, target = experiment.cut_and_mix(x, y, torch.Generator().manual_seed(seed))
        torch.testing.assert_close(target.sum(1), torch.ones(8))
        kept = (mixed == x).all(1).float().mean(dim=(1, 2))  # of the image's own pixels; chance hits are rare
        own = target[torch.arange(8), y]
        assert (own >= kept - 0.02).all()
        shares.add(round(float(own.min()), 3))
    assert len(shares) > 3


def test_rates_warm_up_and_end_near_zero():
    shares = [experiment.lr_share(step, 100, 10) for step in range(100)]
    assert shares[9] == shares[10] == max(shares) == 1.0 and shares[0] == 0.1 and shares[-1] < 0.01


def test_results_are_written_a_line_per_row(tmp_path):
    experiment.write(tmp_path / "a.json", {"what": "runs"}, [{"name": "a", "sigma": [1.0, 2.0]}, {"name": "b"}])
    text = (tmp_path / "a.json").read_text()
    assert json.loads(text) == {"what": "runs", "rows": [{"name": "a", "sigma": [1.0, 2.0]}, {"name": "b"}]}
    assert text.count("\n") == 7


def test_runs_come_in_the_order_asked_for(monkeypatch, tmp_path):
    started = []
    monkeypatch.setattr(experiment, "smoke", lambda runs, out: started.extend(runs) or 0)
    monkeypatch.setattr(sys, "argv", ["x", "--smoke", "--out", str(tmp_path), "--only", "low*0.08", "dense", "low*"])
    experiment.main()
    assert started == ["low-rank-0.08", "dense", "low-rank-0.25"]


def test_the_smoke_run_needs_no_data(monkeypatch, tmp_path, capsys):
    options = ["cifar10_learning", "--smoke", "--out", str(tmp_path), "--only", "dense"]
    monkeypatch.setattr(sys, "argv", options)
    assert experiment.main() == 0
    assert "accuracy" in capsys.readouterr().out

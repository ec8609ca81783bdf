import json
import runpy
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from gblr.experiments import publish
from gblr.experiments.run import Run
from gblr.experiments.store import Store

DOCS = Path(__file__).parents[2] / "docs"
HOOK = runpy.run_path(str(DOCS / "_build" / "results_tables.py"))
README = runpy.run_path(str(DOCS / "_build" / "readme_table.py"), run_name="readme_table")
TYPES = {"q": {"layers": 2, "min": 10.0, "mean": 20.0, "max": 30.0, "dense": 1024.0, "relative_cost": 0.02}}


def record(name, accuracy, run, reached, **more):
    layers = {f"blocks.{i}.attention.query": {"shape": [32, 32], "rank": 5, "relative_cost": 0.1} for i in range(3)}
    return {
        "name": name, "recipe": "x", "config": run.to_dict(), "seed": run.seed, "commit": "abc", "device": "GPU",
        "torch": "2", "test": {"accuracy": accuracy, "loss": 1.0}, "train": {"accuracy": accuracy + 5, "loss": 0.5},
        "reached_cost": reached, "model_relative_cost": 0.9 * reached, "num_params": 7, "seconds": 9.0,
        "curve": {"epoch": [1], "train_loss": [2.0]}, "by_type": TYPES, "layers": layers, "before": None,
        "dense_start": None, **more,
    }  # fmt: skip


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Made-up results of a few runs, published into a folder that the hook reads; tests only look at it."""
    tmp_path = tmp_path_factory.mktemp("published")
    store = Store(tmp_path / "runs" / "cifar10-vit")
    for seed, (dense, ours, low) in enumerate(((80.0, 79.0, 70.0), (82.0, 81.0, 72.0))):
        store.write(f"vit384-dense-seed{seed}", record(f"vit384-dense-seed{seed}", dense, Run("vit384", "dense"), 1.0))
        name = f"vit384-gblr-1-0.3-seed{seed}"
        store.write(name, record(name, ours, Run("vit384", "gaudi", 0.3, seed=seed), 0.2996))
        for cost in (0.3, 0.08):
            name = f"vit384-low-rank-{cost}-seed{seed}"
            if (cost, seed) == (0.08, 1):
                continue
            run = Run("vit384", "low rank", cost, seed=seed)
            store.write(name, record(name, low - 30 * (0.3 - cost), run, cost - 0.002))
    trial = Run("vit384", "gaudi", 0.15, held_out=5000, lr=5e-4, seed=100)
    store.write("trial-vit384-gblr-1-lr0.0005", record("trial-vit384-gblr-1-lr0.0005", 60.0, trial, 0.15))
    blocks = {f"blocks.{i}.attention.query": np.array([[0, 4, 30, 8], [2, 3, 1, 5]]) for i in range(3)}
    store.save_blocks("vit384-gblr-1-0.3-seed0", blocks)
    resnet = Store(tmp_path / "runs" / "cifar10-resnet")
    name = "resnet20-low-rank-global-0.55-seed0"
    run = Run("resnet20", "low rank", 0.55, scope="model")
    before = {"before": {"accuracy": 81.5, "loss": 1.0}, "dense_start": {"accuracy": 91.7, "loss": 0.3}}
    resnet.write(name, record(name, 90.5, run, 0.54, **before))
    docs = tmp_path / "docs"
    (docs / "results").mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["publish", "--runs", str(tmp_path / "runs"), "--docs", str(docs)])
        assert publish.main() == 0
        patch.setitem(HOOK["render"].__globals__, "RESULTS", docs / "results")
        yield docs


def test_tables_have_means_and_spreads_over_seeds_and_the_cost_reached(published):
    table = HOOK["render"]("cifar10-vit.json").splitlines()
    assert table[0] == "| network | method | seeds | cost 1 | cost 0.08 | cost 0.3 |"
    assert "| vit384 | GBLR, block_rank 1 | 2 |  |  | **80.00 ± 1.41** (0.300) |" in table
    assert "| vit384 | low rank | 1 to 2 |  | 63.40 (0.078) | 71.00 ± 1.41 (0.298) |" in table
    assert any("`docs/results/cifar10-vit.json`, by `gblr reproduce cifar10-vit --data DIR`" in line for line in table)


def test_runs_with_a_change_stand_beside_what_they_change_and_the_best():
    kinds = {"gblr-1": 81.0, "gblr-16": 80.0, "pixelfly": 82.0, "changed-budget-end-0.8": 81.5}
    rows = [
        publish.row_of(record(f"mixer-{kind}-0.3-seed0", accuracy, Run("mixer", "gaudi", 0.3), 0.3))
        for kind, accuracy in kinds.items()
    ]
    shown, every = (HOOK["TABLES"]["cifar10-mixer.json", view]({"rows": rows}) for view in ("changes", ""))
    assert "| mixer | GBLR, block_rank 1, budget met after 80 % | 0.3 | 81.50 | 1.000 | 86.50 | 0.500 |" in shown
    assert "| mixer | GBLR, block_rank 1 | 0.3 | 81.00 |" in shown and "| mixer | Pixelfly | 0.3 | 82.00 |" in shown
    assert "block_rank 16" not in shown
    assert "budget met" not in every and "block_rank 16" in every


def test_trials_have_a_table_of_their_own(published):
    assert "| vit384 | GBLR, block_rank 1 | 0.15 | **60.00** |" in HOOK["render"]("cifar10-vit.json", "rates")
    assert "60.00" not in HOOK["render"]("cifar10-vit.json")


def test_the_analysis_shows_costs_by_type_and_the_gap(published):
    assert "| GBLR, block_rank 1 | 0.3 | q | 0.0 | 0.0 | 0.0 | 1.0 | 0.020 |" in HOOK["render"](
        "cifar10-analysis.json", "types"
    )
    gap = HOOK["render"]("cifar10-analysis.json", "gap")
    assert "| GBLR, block_rank 1 | 0.3 | 2 | 85.00 ± 1.41 | 80.00 ± 1.41 | 5.00 ± 0.00 |" in gap


def test_converted_models_are_shown_before_and_after_tuning(published):
    line = "| resnet20 | low rank, solved ranks (ALDS kind) | 0.55 | 0.540 | 0.486 | 91.70 | 81.50 | 90.50 |"
    assert line in HOOK["render"]("cifar10-resnet.json", "before")
    rows = json.loads((published / "results" / "cifar10-resnet.json").read_text())
    short = README["TABLES"]["cifar10-resnet.json"](rows).splitlines()
    assert short[0] == "| network | dense | low rank at 0.55 | GBLR at 0.55 |"
    assert short[2] == "| resnet20 | 91.70 | 81.50 to 90.50 |  |"
    rows["rows"].append(rows["rows"][-1] | {"kind": "low-rank-global-distilled", "accuracy": 91.25})
    short = README["TABLES"]["cifar10-resnet.json"](rows).splitlines()
    assert short[0] == "| network | dense | low rank at 0.55 | GBLR at 0.55 | low rank at 0.55, distilled |"
    assert short[2] == "| resnet20 | 91.70 | 81.50 to 90.50 |  | 91.25 |"


def test_pictures_are_drawn_and_small(published):
    """None against the cost for the ResNet, which has one cost."""
    pictures = {file.name: file.stat().st_size for file in (published / "images").iterdir()}
    names = {"vision-cifar10-vit-vit384.png", "vision-masks-0.3-1.png"}
    assert names == set(pictures) and max(pictures.values()) < 150_000


def test_rows_name_commit_seed_and_rate(published):
    rows = json.loads((published / "results" / "cifar10-vit.json").read_text())["rows"]
    ours = next(row for row in rows if row["name"] == "vit384-gblr-1-0.3-seed1")
    assert (ours["commit"], ours["seed"], ours["lr"], ours["kind"]) == ("abc", 1, 1e-3, "gblr-1") and "curve" in ours


@pytest.mark.parametrize(("recipe", "view"), [("cifar10-mixer", ""), ("cifar10-resnet", "rates")])
def test_what_is_not_there_is_said_with_its_command(published, recipe, view):
    """Neither a file, nor rows in it."""
    shown = HOOK["render"](f"{recipe}.json", view)
    assert "Not measured yet" in shown and f"gblr reproduce {recipe} --data DIR" in shown


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("vit384-gblr-16-0.3-seed0", "gblr-16"),
        ("vit384-dense-seed12", "dense"),
        ("trial-vit384-low-rank-lr0.0005", "low-rank"),
        ("trial-vit384-gblr-1-lr5e-05", "gblr-1"),
        ("trial-vit384-gblr-16-0.55-lr0.001", "gblr-16"),
        ("trial-twin-vit384-gblr-16-0.55-lr0.001", "gblr-16"),
        ("vit384-gblr-1-shrinkage-0.08-seed0", "gblr-1-shrinkage"),
    ],
)
def test_kinds_are_read_off_names(name, kind):
    assert publish.kind_of({"name": name, "config": {"model": "vit384"}}) == kind


def test_rows_of_runs_made_elsewhere_stay_if_asked(tmp_path, monkeypatch):
    file, runs = tmp_path / "docs" / "results" / "cifar10-vit.json", tmp_path / "runs"

    def published(accuracies, *options):
        shutil.rmtree(runs, ignore_errors=True)
        for seed, accuracy in accuracies.items():
            name = f"vit384-dense-seed{seed}"
            Store(runs / "cifar10-vit").write(name, record(name, accuracy, Run("vit384", "dense", seed=seed), 1.0))
        monkeypatch.setattr(sys, "argv", ["x", "--runs", str(runs), "--docs", str(tmp_path / "docs"), *options])
        assert publish.main() == 0
        analysis = json.loads((file.parent / "cifar10-analysis.json").read_text())["rows"]
        rows = json.loads(file.read_text())["rows"]
        assert [row["name"] for row in analysis] == [row["name"] for row in rows]
        return {row["seed"]: row["accuracy"] for row in rows}

    assert published({0: 80.0, 1: 81.0}) == {0: 80.0, 1: 81.0}
    assert published({1: 82.0, 2: 83.0}, "--keep") == {0: 80.0, 1: 82.0, 2: 83.0}
    assert published({1: 82.0}) == {1: 82.0}


def test_a_file_names_the_devices_of_rows_that_stay(tmp_path, monkeypatch):
    def published(seed, device):
        runs, name = tmp_path / device, f"vit384-dense-seed{seed}"
        made = record(name, 80.0, Run("vit384", "dense", seed=seed), 1.0) | {
            "device": device,
            "torch": f"torch {device}",
        }
        Store(runs / "cifar10-vit").write(name, made)
        monkeypatch.setattr(sys, "argv", ["x", "--runs", str(runs), "--docs", str(tmp_path / "docs"), "--keep"])
        assert publish.main() == 0
        file = json.loads((tmp_path / "docs" / "results" / "cifar10-vit.json").read_text())
        return file["device"], file["torch"]

    assert published(0, "A") == ("A", "torch A")
    assert published(1, "B") == published(1, "B") == ("A, B", "torch A, torch B")
    assert published(0, "B") == ("B", "torch B")  # its folder has both now: no row stays


def test_rows_stay_only_until_a_trial_finds_a_better_rate(tmp_path, monkeypatch):
    file, runs = tmp_path / "docs" / "results" / "cifar10-vit.json", tmp_path / "runs"
    names = {lr: f"trial-vit384-dense-lr{lr:g}" for lr in (5e-4, 1e-3)}

    def published(*made):
        shutil.rmtree(runs, ignore_errors=True)
        for name, accuracy, run in made:
            Store(runs / "cifar10-vit").write(name, record(name, accuracy, run, 1.0))
        monkeypatch.setattr(sys, "argv", ["x", "--runs", str(runs), "--docs", str(tmp_path / "docs"), "--keep"])
        assert publish.main() == 0
        return [row["name"] for row in json.loads(file.read_text())["rows"]]

    def trial(lr, accuracy):
        return names[lr], accuracy, Run("vit384", "dense", lr=lr, held_out=5000, seed=100)

    run = "vit384-dense-seed0", 80.0, Run("vit384", "dense", lr=5e-4)
    assert published(trial(5e-4, 60.0), run) == [names[5e-4], run[0]]
    assert published(trial(1e-3, 59.0)) == [names[5e-4], names[1e-3], run[0]]
    assert published(trial(1e-3, 61.0)) == [names[5e-4], names[1e-3]]  # a sweep would make it with the better rate
    assert published(run) == [names[5e-4], names[1e-3], run[0]]  # what was made just now is shown as it is

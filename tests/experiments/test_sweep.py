import json
import os
import signal
import time
from dataclasses import fields, replace
from fnmatch import fnmatch
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

from gblr.cli.reproduce import RECIPES
from gblr.experiments import check as checking
from gblr.experiments import cifar10_vit, gpt2_imdb, imagenet_vit_scratch
from gblr.experiments.field import Paused, Place
from gblr.experiments.language import LANGUAGE
from gblr.experiments.publishing import stored_runs
from gblr.experiments.run import Run
from gblr.experiments.store import Store, write
from gblr.experiments.sweep import Sweep, listing, parse, perform, smoke_runs, with_best_rate
from gblr.experiments.vision import VISION as FIELD
from gblr.experiments.vision import main
from tests.shape_hook import shapes_unchecked

VISION = {
    name: import_module(module).RECIPE
    for name, (module, _) in RECIPES.items()
    if name.startswith(("cifar", "imagenet")) and name != "cifar10-learning"
}
DENSE_RUN = "vit384-dense-seed0"


@pytest.mark.parametrize("name", VISION)
def test_every_recipe_runs_in_smoke_mode(name, tmp_path, capsys):
    recipe = VISION[name]
    with shapes_unchecked():  # fits are thousands of small calls
        assert main(recipe, ["--smoke", "--out", str(tmp_path)]) == 0
    expected = smoke_runs(recipe.runs(1), FIELD)
    files = {file.stem: json.loads(file.read_text()) for file in (tmp_path / "smoke" / recipe.place).glob("*.json")}
    assert set(files) == set(expected)
    for result in files.values():
        assert result["recipe"] == name and 0 <= result["test"]["accuracy"] <= 100
        assert result["reached_cost"] <= result["target"] * (1 + 1e-6)
        assert set(result["config"]) == {field.name for field in fields(Run)}


@pytest.mark.parametrize("name", VISION)
def test_recipes_know_their_names_and_the_order_of_their_runs(name):
    recipe = VISION[name]
    assert recipe.name == name and recipe.module == RECIPES[name][0]
    runs = list(recipe.runs(2).items())
    for i, (_, run) in enumerate(runs):
        assert not any(later.held_out for _, later in runs[i:]) or run.held_out  # trials come first
        assert run.epochs >= 1 and 0 < run.relative_cost <= 1


def test_the_headline_has_every_method_at_every_cost_with_three_seeds():
    names = list(cifar10_vit.runs(3))
    for kind in ("gblr-1", "gblr-16", "gblr-1-shrinkage", "low-rank", "monarch", "pixelfly", "blast"):
        assert all(f"vit384-{kind}-{c}-seed{s}" in names for c in (0.3, 0.15, 0.08) for s in range(3))
        assert sum(name.startswith(f"trial-vit384-{kind}-lr") for name in names) == 3
    runs = {name: run for name, run in cifar10_vit.runs(3).items() if not name.startswith("trial")}
    assert {name.partition("-")[0]: run.epochs for name, run in runs.items()} == {"vit384": 60, "vit768": 20}
    assert all(run.epochs == 60 for name, run in runs.items() if name.startswith("vit384"))


def test_every_run_from_scratch_has_trials_of_its_method_and_dense_of_its_own_width():
    runs = cifar10_vit.runs(1)
    for name, run in runs.items():
        if not run.held_out:
            tried = [trial for other, trial in runs.items() if trial.held_out and fnmatch(other, run.trials)]
            assert tried and all(
                (t.method, t.block_rank, t.budget) == (run.method, run.block_rank, run.budget) for t in tried
            )
            assert run.method != "dense" or {t.model for t in tried} == {run.model}, name


def test_rates_of_pretrained_networks_are_tried_as_they_are_tuned_and_for_distillation_at_each_cost():
    runs = VISION["cifar10-resnet"].runs(1)
    for run in (run for run in runs.values() if run.trials):
        chosen_by = [trial for name, trial in runs.items() if trial.held_out and fnmatch(name, run.trials)]
        assert len(chosen_by) == 3
        assert all((t.method, t.distilled) == (run.method, run.distilled) for t in chosen_by)
        cost = run.relative_cost if run.distilled or run.method == "dense" else 0.3
        assert all(t.relative_cost == cost for t in chosen_by)


def test_every_method_of_the_mixer_tries_the_same_rates_for_equally_long():
    runs = VISION["cifar10-mixer"].runs(1)
    tried = {name.removeprefix("trial-mixer-"): run for name, run in runs.items() if name.startswith("trial")}
    for kind in cifar10_vit.KINDS:
        assert [run.epochs for name, run in tried.items() if name.startswith(f"{kind.label}-lr")] == [8, 8]
    assert {run.lr for run in tried.values()} == {1e-3, 2e-3}
    assert {run.epochs for name, run in runs.items() if not name.startswith("trial")} == {30}
    usual = runs["mixer-gblr-1-0.3-seed0"].to_dict()
    for name in (name for name in runs if "-changed-" in name):
        changes = {key for key, value in runs[name].to_dict().items() if value != usual[key]}
        assert len(changes) == 1 and changes <= {"sigma_end", "budget_end", "structure_lr", "weights"}, name


@pytest.mark.parametrize("name", ["cifar10-resnet", "cifar10-finetune"])
def test_rates_of_tuned_networks_are_tried_on_images_that_their_start_has_not_seen(name):
    runs = VISION[name].runs(1)
    trials = [run for run in runs.values() if run.held_out and run.source]
    for trial in trials:
        place, _, start = trial.source.partition("/")
        assert place == name and (runs[start].held_out, runs[start].model) == (trial.held_out, trial.model)
    assert trials and not any("twin" in run.source for run in runs.values() if not run.held_out)


def tiny(tmp_path, *options):
    return main(cifar10_vit.RECIPE, ["--tiny", "--out", str(tmp_path), *options])


def test_a_sweep_makes_each_run_once_and_tells_of_it(tmp_path, capfd):
    assert tiny(tmp_path, "--only", DENSE_RUN, "--workers", "2") == 0
    store = Store(tmp_path / "cifar10-vit")
    first = store.path(DENSE_RUN).stat().st_mtime_ns
    assert store.load_model(DENSE_RUN)["head.weight"].shape == (10, 32)
    assert not list(store.folder.glob("*.state"))
    assert "accuracy" in capfd.readouterr().out
    assert tiny(tmp_path, "--only", DENSE_RUN) == 0
    assert store.path(DENSE_RUN).stat().st_mtime_ns == first
    assert "1 of them there already" in capfd.readouterr().out


def test_time_that_is_over_pauses_and_the_next_call_continues(tmp_path, capfd):
    assert tiny(tmp_path, "--only", DENSE_RUN, "--time", "0.4") == 0
    store = Store(tmp_path / "cifar10-vit")
    assert not store.has(DENSE_RUN) and store.path(DENSE_RUN, ".state").exists()
    assert "1 runs are left (1 paused)" in capfd.readouterr().out
    assert tiny(tmp_path, "--only", DENSE_RUN) == 0
    assert store.has(DENSE_RUN) and not store.path(DENSE_RUN, ".state").exists()


def test_a_run_that_fails_is_named_with_its_last_line(tmp_path, capfd):
    store = Store(tmp_path / "cifar10-vit")
    store.folder.mkdir()
    store.path(DENSE_RUN, ".state").write_text("no state")
    assert tiny(tmp_path, "--only", DENSE_RUN) == 1
    assert f"{DENSE_RUN}: failed: " in capfd.readouterr().out and not store.has(DENSE_RUN)


def test_a_result_appears_complete_or_not_at_all(tmp_path, monkeypatch):
    store = Store(tmp_path)
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        store.write("a", {"accuracy": 1.0})
    assert not store.has("a") and store.matching("*") == []


def sweep(tmp_path, recipe, runs):
    return Sweep(recipe, FIELD, runs, parse(recipe, FIELD, ["--data", "x", "--out", str(tmp_path)]))


def test_a_run_waits_for_the_trials_of_its_rate(tmp_path):
    runs = {name: run for name, run in cifar10_vit.runs(1).items() if "384-dense" in name}
    waits = sweep(tmp_path, cifar10_vit.RECIPE, runs)
    assert waits.reason_to_wait(runs[DENSE_RUN]).startswith("for trial-vit384-dense-lr")
    waits.waiting = [DENSE_RUN]
    assert waits.reason_to_wait(runs[DENSE_RUN]) == ""


def test_a_run_waits_for_the_model_that_it_starts_from(tmp_path):
    recipe = VISION["cifar10-finetune"]
    run = recipe.runs(1)[DENSE_RUN]
    waits = sweep(tmp_path, recipe, {DENSE_RUN: run})
    assert f"gblr reproduce cifar10-vit --only {DENSE_RUN}" in waits.reason_to_wait(run)
    Store(tmp_path / "cifar10-vit").save_model(DENSE_RUN, {})
    assert waits.reason_to_wait(run) == ""


def test_the_twin_of_a_network_is_kept_for_trials_and_is_no_result(tmp_path):
    recipe, (twin, trial) = VISION["cifar10-resnet"], ("twin-resnet20", "trial-twin-resnet20-dense-lr0.001")
    runs = recipe.runs(1)
    waits = sweep(tmp_path, recipe, {trial: runs[trial]})
    assert f"gblr reproduce cifar10-resnet --only {twin}" in waits.reason_to_wait(runs[trial])
    for name in (twin, trial):
        perform(recipe, FIELD, name, FIELD.tiny(runs[name], 1), FIELD.smoke_task(recipe), waits.store, Place(tmp_path))
    assert waits.reason_to_wait(runs[trial]) == "" and not waits.store.path(trial, ".model.pt").exists()
    assert [record["name"] for record in stored_runs(recipe, tmp_path)] == [trial]


def test_a_twin_from_which_no_run_is_left_to_start_is_not_made(tmp_path):
    recipe, twin = VISION["cifar10-resnet"], "twin-resnet20"
    runs = {name: run for name, run in recipe.runs(1).items() if name.startswith((twin, "trial"))}
    rows = [{"name": name, "lr": run.lr, "accuracy": 80.0} for name, run in runs.items() if name != twin]

    def left(*published):
        write(tmp_path / "cifar10-resnet.json", {"command": "x"}, list(published))
        options = ["--data", "x", "--out", str(tmp_path / "runs"), "--published", str(tmp_path)]
        found = Sweep(recipe, FIELD, runs, parse(recipe, FIELD, options))
        lines = listing(runs, found.store, FIELD)
        assert lines[-1] == f"{len(found.waiting)} of {len(runs)} left"
        return found.waiting, lines

    assert left(*rows)[0] == [] and left(*rows)[1][0].startswith(f"{twin}  (not needed")
    assert left(*rows[1:])[0] == [twin, rows[0]["name"]]
    assert sweep(tmp_path, recipe, {twin: runs[twin]}).waiting == [twin]  # asked for by its name


def test_a_published_run_whose_model_is_elsewhere_is_made_for_those_that_start_from_it(tmp_path):
    recipe, start, fitted = gpt2_imdb.RECIPE, "gpt2-imdb-dense-seed0", "gpt2-imdb-low-rank-fitted-0.318-seed0"
    runs = {name: recipe.runs(1)[name] for name in (start, fitted)}
    rows = [{"name": name, "lr": run.lr, "test": {"imdb": 60.0}} for name, run in runs.items()]

    def left(*published):
        write(tmp_path / "gpt2-imdb.json", {"command": "x"}, list(published))
        options = ["--data", "x", "--out", str(tmp_path / "runs"), "--published", str(tmp_path)]
        found = Sweep(recipe, LANGUAGE, runs, parse(recipe, LANGUAGE, options))
        return found.waiting, listing(runs, found.store, LANGUAGE)

    waiting, told = left(rows[0])
    assert waiting == [start, fitted] and "not its model" in told[0] and told[-1] == "2 of 2 left"
    assert left(*rows)[0] == []
    Store(tmp_path / "runs" / "gpt2-imdb").save_model(start, {})
    assert left(rows[0])[0] == [fitted]


def test_paused_trials_are_waited_for(tmp_path):
    runs = {name: run for name, run in cifar10_vit.runs(1).items() if "384-dense" in name}
    waits = sweep(tmp_path, cifar10_vit.RECIPE, runs)
    waits.paused, waits.waiting = [name for name in runs if name != DENSE_RUN], [DENSE_RUN]
    assert waits._startable() is None


def test_a_run_waits_for_its_start_that_is_made_again(tmp_path):
    recipe, start = VISION["cifar10-resnet"], "twin-resnet20"
    runs = {name: run for name, run in recipe.runs(1).items() if name == start or run.source.endswith(start)}
    waits = sweep(tmp_path, recipe, runs)
    waits.store.save_model(start, {})
    trial = next(name for name in runs if name != start)
    assert waits.reason_to_wait(runs[trial]) == f"for {start}"


def test_a_state_of_another_rate_is_not_continued(tmp_path, capsys):
    store, run = Store(tmp_path), FIELD.tiny(cifar10_vit.runs(1)[DENSE_RUN], 1)
    place = Place(tmp_path, state=store.path(DENSE_RUN, ".state"))
    steps = cifar10_vit.RECIPE, FIELD, DENSE_RUN, run, FIELD.smoke_task(cifar10_vit.RECIPE), store
    with pytest.raises(Paused):
        perform(*steps, replace(place, deadline=0.0))
    with pytest.raises(Paused):
        perform(*steps, replace(place, deadline=0.0))
    assert "goes on after epoch 0" in capsys.readouterr().out
    store.write("trial-vit384-dense-lr0.002", {"config": {"lr": 2e-3}, "test": {"accuracy": 71.0}})
    perform(*steps, place)
    told = capsys.readouterr().out
    assert "starts anew" in told and "goes on" not in told and store.rate(DENSE_RUN) == 2e-3
    assert not place.state.exists() and not store.path(DENSE_RUN, ".settings").exists()


def test_a_sweep_that_is_terminated_ends_its_runs(tmp_path, monkeypatch):
    def mine(*_):
        pytest.fail("the sweep would die, and its runs live on")

    ended, before = [], signal.signal(signal.SIGTERM, mine)
    waits = sweep(tmp_path, cifar10_vit.RECIPE, {})
    waits.running = {"a": SimpleNamespace(terminate=lambda: ended.append("a"))}
    monkeypatch.setattr(time, "sleep", lambda seconds: os.kill(os.getpid(), signal.SIGTERM))
    try:
        with pytest.raises(SystemExit):
            waits.go()
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended == ["a"]


def test_half_a_letter_in_a_log_does_not_end_the_sweep(tmp_path):
    waits = sweep(tmp_path, cifar10_vit.RECIPE, {})
    waits.store.path("a", ".log").write_bytes("fit ━".encode()[:-1])
    assert waits._last_line("a").startswith("fit")


def test_every_pattern_must_match(tmp_path):
    with pytest.raises(ValueError, match="no run matches vit383-"):
        main(cifar10_vit.RECIPE, ["--only", "trial-*", "vit383-*", "--list", "--out", str(tmp_path)])


def test_two_processes_may_save_the_same_file_at_once(tmp_path, monkeypatch):
    store, write_out = Store(tmp_path), torch.save

    def both(content, file):
        write_out(content, file)
        monkeypatch.setattr(torch, "save", write_out)
        other = os.fork() or (store.save(tmp_path / "fit.pt", {"a": 1}), os._exit(0))
        os.waitpid(other, 0)

    monkeypatch.setattr(torch, "save", both)
    store.save(tmp_path / "fit.pt", {"a": 2})
    assert torch.load(tmp_path / "fit.pt") == {"a": 2}


def test_the_best_trial_gives_the_rate(tmp_path):
    store = Store(tmp_path)
    for lr, accuracy in ((5e-4, 70.0), (1e-3, 72.0), (2e-3, 71.0)):
        store.write(f"trial-x-lr{lr:g}", {"config": {"lr": lr}, "test": {"accuracy": accuracy}})
    run = Run("vit384", "dense", lr=3e-3, trials="trial-x-lr*")
    found, trials = with_best_rate(run, store, FIELD)
    assert found == replace(run, lr=1e-3) and trials == {"0.0005": 70.0, "0.001": 72.0, "0.002": 71.0}
    assert with_best_rate(replace(run, trials="trial-y-*"), store, FIELD) == (replace(run, trials="trial-y-*"), {})


def test_published_runs_are_not_made_again_and_their_trials_give_the_rate(tmp_path):
    recipe, (published, out) = cifar10_vit.RECIPE, (tmp_path / "results", tmp_path / "runs")
    trial = "trial-vit384-dense-lr"
    rows = [{"name": f"{trial}{lr:g}", "lr": lr, "accuracy": found} for lr, found in ((5e-4, 70.0), (1e-3, 72.0))]
    write(published / "cifar10-vit.json", {"command": "x"}, [*rows, {"name": DENSE_RUN, "lr": 1e-3, "accuracy": 83.0}])
    runs = {name: run for name, run in recipe.runs(1).items() if "384-dense" in name}
    options = ["--data", "x", "--out", str(out), "--published", str(published)]
    goes_on = Sweep(recipe, FIELD, runs, parse(recipe, FIELD, options))
    assert goes_on.waiting == [f"{trial}0.002"]
    goes_on.store.write(f"{trial}0.002", {"config": {"lr": 2e-3}, "test": {"accuracy": 71.0}})
    run, trials = with_best_rate(runs[DENSE_RUN], goes_on.store, FIELD)
    assert run.lr == 1e-3 and trials == {"0.0005": 70.0, "0.001": 72.0, "0.002": 71.0}


def test_runs_are_made_again_if_a_later_trial_found_a_better_rate(tmp_path):
    recipe, store = cifar10_vit.RECIPE, Store(tmp_path / "cifar10-vit")
    runs = {name: run for name, run in recipe.runs(1).items() if "384-dense" in name}

    def made(name, lr, accuracy):
        store.write(name, {"config": {"lr": lr}, "test": {"accuracy": accuracy}})

    made("trial-vit384-dense-lr0.0005", 5e-4, 70.0)
    made(DENSE_RUN, 5e-4, 83.0)
    assert DENSE_RUN not in sweep(tmp_path, recipe, runs).waiting
    made("trial-vit384-dense-lr0.001", 1e-3, 69.0)
    assert DENSE_RUN not in sweep(tmp_path, recipe, runs).waiting
    assert listing(runs, store, FIELD)[-2:] == [f"{DENSE_RUN}  (there, rate 0.0005)", f"1 of {len(runs)} left"]
    made("trial-vit384-dense-lr0.002", 2e-3, 71.0)
    assert sweep(tmp_path, recipe, runs).waiting == [DENSE_RUN]
    assert "0.002 is now the best rate" in listing(runs, store, FIELD)[-2]
    made(DENSE_RUN, 2e-3, 84.0)
    assert sweep(tmp_path, recipe, runs).waiting == []
    assert listing(runs, store, FIELD)[-1] == f"0 of {len(runs)} left"


def test_the_list_of_runs_tells_which_are_left(tmp_path, capsys):
    assert main(cifar10_vit.RECIPE, ["--list", "--out", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = list(cifar10_vit.runs(3))
    assert lines == [*names, f"{len(names)} of {len(names)} left"]
    assert not list(tmp_path.iterdir())


def test_a_folder_without_a_file_of_the_recipe_has_nothing_published(tmp_path):
    options = ["--data", "x", "--out", str(tmp_path / "runs"), "--published", str(tmp_path)]
    runs = cifar10_vit.runs(1)
    assert Sweep(cifar10_vit.RECIPE, FIELD, runs, parse(cifar10_vit.RECIPE, FIELD, options)).waiting == list(runs)


def test_a_folder_of_published_results_must_be_there(tmp_path):
    options = ["--data", "x", "--out", str(tmp_path / "runs"), "--published", str(tmp_path / "misspelt")]
    with pytest.raises(ValueError, match=r"misspelt is no folder; give the one with cifar10-vit\.json"):
        Sweep(cifar10_vit.RECIPE, FIELD, cifar10_vit.runs(1), parse(cifar10_vit.RECIPE, FIELD, options))


def test_data_must_be_named(tmp_path, monkeypatch):
    monkeypatch.delenv("GBLR_DATA", raising=False)
    with pytest.raises(ValueError, match="GBLR_DATA"):
        main(cifar10_vit.RECIPE, ["--out", str(tmp_path)])
    with pytest.raises(ValueError, match="no run matches"):
        main(cifar10_vit.RECIPE, ["--only", "nothing", "--smoke"])


def test_the_check_passes_here_and_fails_when_a_number_is_changed(tmp_path, monkeypatch, capsys):
    recipe = imagenet_vit_scratch.RECIPE
    assert main(recipe, ["--check"]) == 0
    assert "4 of 4 runs are as stored" in capsys.readouterr().out
    stored = json.loads((checking.CHECKS / f"{recipe.name}.json").read_text())
    name = next(iter(stored["runs"]))
    stored["runs"][name]["test_loss"] += 0.1
    (tmp_path / f"{recipe.name}.json").write_text(json.dumps(stored))
    monkeypatch.setattr(checking, "CHECKS", tmp_path)
    assert main(recipe, ["--check"]) == 1
    shown = capsys.readouterr().out
    assert f"{name}: test_loss" in shown and "3 of 4 runs are as stored" in shown


@pytest.mark.parametrize("name", VISION)
def test_every_recipe_has_a_stored_check_of_its_runs(name):
    stored = json.loads((checking.CHECKS / f"{name}.json").read_text())["runs"]
    recipe = VISION[name]
    assert set(stored) == set(smoke_runs(recipe.runs(recipe.seeds), FIELD))
    numbers = {"a": {"test_loss": 1.0, "train_loss": 1.0, "accuracy": 50.0, "reached_cost": 0.3}}
    assert checking.differences(numbers, numbers, FIELD.tolerances) == {}
    off = {"a": numbers["a"] | {"reached_cost": 0.31}}
    assert checking.differences(off, numbers, FIELD.tolerances) == {"a": ["reached_cost 0.3100, stored 0.3000"]}
    assert checking.differences(numbers, {}, FIELD.tolerances) == {"a": ["nothing is stored"]}

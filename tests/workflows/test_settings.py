import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from gblr.workflows.compress import compress
from gblr.workflows.settings import OtherRun, Settings, check_free, check_used, claim, claimed
from tests.shape_hook import shapes_unchecked


def test_a_run_from_before_an_option_was_there_goes_on(tmp_path):
    settings = Settings("model", "data")
    older = {key: value for key, value in settings.to_plain().items() if key != "sensitivity"}
    (tmp_path / "settings.json").write_text(json.dumps(older))
    claim(tmp_path, settings)
    with pytest.raises(OtherRun, match="sensitivity was False"):
        claim(tmp_path, Settings("model", "data", sensitivity=True))


def test_a_folder_is_for_one_process_at_a_time(tmp_path):
    """They would train in turns from each other's steps."""
    code = (
        "import sys; from pathlib import Path; from gblr.workflows.settings import Settings, claimed\n"
        "with claimed(Path(sys.argv[1]), Settings('model', 'data')): print('mine', flush=True); sys.stdin.read()"
    )
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "run")], **options) as other:
        assert other.stdout.readline() == "mine\n"
        with (
            pytest.raises(ValueError, match=r"run is in use by another process: wait for it"),
            claimed(tmp_path / "run", Settings("model", "data")),
        ):
            pass
        other.kill()
    assert (tmp_path / "run" / "settings.json").is_file()
    with claimed(tmp_path / "run", Settings("model", "data")):
        pass


def test_what_a_killed_or_full_machine_left_is_no_other_run(tmp_path):
    (tmp_path / ".settings.json.123.new").write_text("")
    check_free(tmp_path, Settings("model", "data"))
    (tmp_path / "settings.json").write_text("")
    with pytest.raises(OtherRun, match=r"settings.json is damaged: .* Choose another folder, or delete that one"):
        check_free(tmp_path, Settings("model", "data"))
    with pytest.raises(OtherRun, match="is a file; --out is a folder"):
        check_free(tmp_path / "settings.json", Settings("model", "data"))


def test_a_rank_that_is_not_chosen_yet_agrees_with_any(tmp_path):
    claim(tmp_path, Settings("model", "data", block_rank=16))
    check_free(tmp_path, Settings("model", "data"))
    with pytest.raises(OtherRun, match="block_rank was 16"):
        check_free(tmp_path, Settings("model", "data", block_rank=8))


def test_distillation_is_refused_before_any_work_where_training_has_a_loss_of_its_own(tmp_path):
    task = SimpleNamespace(loss=lambda model, batch: 0.0, name="sentence similarity")
    loaded = SimpleNamespace(architecture="BertModel")
    settings = Settings("model", "data", epochs=1.0, distill=0.9)
    with (
        shapes_unchecked(),
        pytest.raises(ValueError, match="BertModel has neither here: training for sentence similarity"),
    ):
        compress(settings, loaded, task, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lr": 1e-3}, "--lr would have no effect: nothing is trained: give --train EPOCHS"),
        ({"structure_lr": 1e-3}, "--structure-lr would have no effect: nothing is trained"),
        ({"batch_size": 8}, "--batch-size would have no effect"),
        ({"lr": 1e-3, "from_scratch": True}, "give --epochs"),
        (
            {"method": "low-rank", "block_rank": 16},
            "--block-rank would .*: only GBLR has it: give --method gaudi",
        ),
        ({"method": "low-rank", "epochs": 1.0, "structure_lr": 1e-3}, "--structure-lr would have no effect: only GBLR"),
        ({"method": "dense", "from_scratch": True, "cost": 1.0, "include": ("fc1",)}, "--include would have no effect"),
        ({"method": "dense", "from_scratch": True, "cost": 0.5}, "--cost would have no effect: .* give a --method"),
    ],
)
def test_options_that_nothing_would_come_of_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        check_used(Settings("model", "data", **options))


@pytest.mark.parametrize(
    "options",
    [
        {"epochs": 1.0, "lr": 1e-3, "structure_lr": 1e-3, "batch_size": 8, "block_rank": 4},
        {"epochs": None, "lr": 1e-3, "from_scratch": True},
        {"method": "low-rank", "baselines": ("gaudi",), "block_rank": 16},
        {"method": "dense", "from_scratch": True, "cost": 1.0, "epochs": 2.0, "lr": 0.0},
    ],
)
def test_options_that_have_an_effect_are_taken(options):
    check_used(Settings("model", "data", **options))

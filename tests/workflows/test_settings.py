import json
from types import SimpleNamespace

import pytest

from gblr.workflows.compress import compress
from gblr.workflows.settings import OtherRun, Settings, check_used, claim
from tests.shape_hook import shapes_unchecked


def test_a_run_from_before_an_option_was_there_goes_on(tmp_path):
    settings = Settings("model", "data")
    older = {key: value for key, value in settings.to_plain().items() if key != "sensitivity"}
    (tmp_path / "settings.json").write_text(json.dumps(older))
    claim(tmp_path, settings)
    with pytest.raises(OtherRun, match="sensitivity was False"):
        claim(tmp_path, Settings("model", "data", sensitivity=True))


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

import json
from types import SimpleNamespace

import pytest

from gblr.workflows.compress import compress
from gblr.workflows.settings import OtherRun, Settings, claim
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

import json

import pytest

from gblr.workflows.settings import OtherRun, Settings, claim


def test_a_run_from_before_an_option_was_there_goes_on(tmp_path):
    settings = Settings("model", "data")
    older = {key: value for key, value in settings.to_plain().items() if key != "sensitivity"}
    (tmp_path / "settings.json").write_text(json.dumps(older))
    claim(tmp_path, settings)
    with pytest.raises(OtherRun, match="sensitivity was False"):
        claim(tmp_path, Settings("model", "data", sensitivity=True))

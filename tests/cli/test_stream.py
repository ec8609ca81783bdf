"""`gblr compress --stream` as a newcomer uses it."""

import json

import pytest
import torch

from gblr.conversion.checkpoint import from_pretrained
from gblr.workflows.model_source import open_model
from tests.models.tiny_models import sentences, write_encoder, write_language_model

OPTIONS = ("--cost", 0.5, "--no-train", "--stream", "--method", "low-rank", "--calibration", 8)


@pytest.fixture
def texts(tmp_path):
    file = tmp_path / "texts.txt"
    file.write_text("\n".join(sentences(200)))
    return file


@pytest.mark.parametrize("write", [write_language_model, write_encoder], ids=["language model", "encoder"])
def test_a_model_is_streamed_and_can_be_opened_with_its_tokenizer(gblr, write, texts, tmp_path):
    write(tmp_path / "dense")
    command = ("compress", "dense", "--data", texts, *OPTIONS, "--out", "run")
    ended = gblr(*command)
    assert ended.code == 0, ended.err
    assert "layers to convert at cost 0.5" in ended.err and "layers converted" in ended.out
    assert open_model(str(tmp_path / "run" / "model")).tokenizer is not None
    model = from_pretrained(tmp_path / "run" / "model")
    assert torch.isfinite(model(input_ids=torch.tensor([[5, 6, 7]]))[0]).all()
    again = gblr(*command, "--json")
    assert again.code == 0 and json.loads(again.out)["relative_cost"] <= 0.5


def test_blocks_are_measured_in_the_precision_that_was_asked_for(gblr, texts, tmp_path):
    write_language_model(tmp_path / "dense")
    dtypes = set()
    hook = torch.nn.modules.module.register_module_forward_hook(
        lambda module, args, output: dtypes.add(getattr(output, "dtype", None))
    )
    ended = gblr("compress", "dense", "--data", texts, *OPTIONS, "--precision", "bfloat16", "--out", "run")
    hook.remove()
    assert ended.code == 0 and torch.bfloat16 in dtypes, ended.err


def test_layers_are_refitted_if_asked(gblr, texts, tmp_path):
    write_language_model(tmp_path / "dense")
    tokens, outputs = torch.tensor([[5, 6, 7]]), []
    for out, more in (("fitted", ()), ("refitted", ("--heal",))):
        ended = gblr("compress", "dense", "--data", texts, *OPTIONS, *more, "--out", out)
        assert ended.code == 0 and ("refitted" in " ".join(ended.out.split())) == bool(more), ended.err
        outputs.append(from_pretrained(tmp_path / out / "model")(input_ids=tokens).logits)
    assert outputs[1].isfinite().all() and not torch.allclose(*outputs, atol=1e-3)


def test_without_calibration_no_text_is_read(gblr, tmp_path):
    write_language_model(tmp_path / "dense")
    ended = gblr("compress", "dense", "--data", "none", *OPTIONS[:-1], 0, "--out", "run")
    assert ended.code == 0 and (tmp_path / "run" / "model" / "gblr.json").is_file()


def test_a_stopped_run_continues(gblr, texts, tmp_path, monkeypatch):
    write_language_model(tmp_path / "dense")
    command = ("compress", "dense", "--data", texts, *OPTIONS, "--out", "run")

    def stopped(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("gblr.conversion.streaming.write_unit", stopped)
        ended = gblr(*command)
    assert ended.code == 1 and "same command again" in ended.err
    assert gblr(*command).code == 0
    ended = gblr(*command[:-1], "run", "--seed", 2)
    assert ended.code == 1 and "holds another run" in ended.err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("dense", "--train", 1), "leave out --train"),
        (("dense", "--baseline", "monarch"), "--baseline"),
        (("dense", "--heal", "--calibration", 0), "--heal needs a trained model and calibration inputs"),
        (("dense", "--sensitivity"), "--sensitivity"),
        (("dense", "--max-eval", 8), "leave out --max-eval"),
        (("nowhere",), "Download the model first"),
        (("dense", "--data", "digits"), "reads texts for calibration"),
    ],
)
def test_mistakes_are_told(gblr, options, words, texts, tmp_path):
    write_language_model(tmp_path / "dense")
    model, *rest = options
    ended = gblr("compress", model, "--data", texts, "--stream", "--cost", 0.5, *rest)
    assert ended.code != 0 and words in " ".join(ended.err.split()) and "Traceback" not in ended.err
    assert not (tmp_path / "runs").exists()

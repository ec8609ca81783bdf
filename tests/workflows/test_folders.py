"""What commands make of folders: runs, runs that were stopped, streamed ones, and what `save_pretrained` wrote."""

import json

import pytest
import torch
from onnxruntime import InferenceSession
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel

import gblr
from gblr.conversion.cost import cost
from gblr.models.resnet_cifar import CifarResNet
from gblr.reports.record import load_record
from gblr.workflows.describe import describe_types
from gblr.workflows.exporting import export_folder, with_what_tokenizers_add
from gblr.workflows.inspection import inspect_folder
from gblr.workflows.model_source import open_model


def small_bert(folder):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    model = BertModel(BertConfig(vocab_size=100, **sizes)).eval()
    gblr.convert_(model, gblr.LowRankConfig(0.5))
    gblr.save_pretrained(model, folder)
    return model


def test_the_export_of_a_saved_model_takes_padded_texts(tmp_path):
    model = small_bert(tmp_path / "small")
    found = export_folder(tmp_path / "small", "onnx", tmp_path / "model.onnx")
    assert list(found["inputs"]) == ["input_ids", "attention_mask", "token_type_ids"]
    tokens, mask = torch.randint(0, 100, (2, 9)), torch.ones(2, 9, dtype=torch.long)
    mask[1, 5:] = 0
    given = {"input_ids": tokens, "attention_mask": mask, "token_type_ids": torch.zeros_like(tokens)}
    session = InferenceSession(tmp_path / "model.onnx")
    (states, *_) = session.run(None, {name: value.numpy() for name, value in given.items()})
    torch.testing.assert_close(torch.from_numpy(states), model(**given)[0], atol=1e-4, rtol=0)


def test_kinds_of_tokens_are_for_models_that_have_several():
    tokens = {"input_ids": torch.ones(1, 4, dtype=torch.long)}
    gpt2 = GPT2LMHeadModel(GPT2Config(n_embd=32, n_head=2, n_layer=1, vocab_size=50))
    assert set(with_what_tokenizers_add(dict(tokens), gpt2)) == {"input_ids", "attention_mask"}
    assert with_what_tokenizers_add({"pixel_values": 1}, gpt2) == {"pixel_values": 1}


def test_a_streamed_run_is_opened_without_a_record(tmp_path):
    small_bert(tmp_path / "model")
    (tmp_path / "settings.json").write_text("{}")
    assert isinstance(open_model(str(tmp_path)).model, BertModel) and inspect_folder(tmp_path)["layers"]
    with pytest.raises(FileNotFoundError, match="one with --stream has none"):
        load_record(tmp_path)


def write_run(folder, source, data):
    record = {"model": {"source": str(source)}, "data": {"source": str(data), "image_mean": [0.5]}}
    (folder / "run.json").write_text(json.dumps(record))


def test_a_run_of_a_transformers_model_outlives_its_source(tmp_path):
    model = small_bert(tmp_path / "run" / "model")
    write_run(tmp_path / "run", tmp_path / "gone", tmp_path / "texts.txt")
    found = open_model(str(tmp_path / "run"))
    assert torch.equal(found.model(**found.model.dummy_inputs)[0], model(**found.model.dummy_inputs)[0])
    assert found.image_mean == (0.5,) and "gone, from which" in found.note
    with pytest.raises(OSError, match=r"run is fed with the data that it was made with, .*texts.txt; put it back"):
        export_folder(tmp_path / "run", "onnx", tmp_path / "model.onnx")


def test_a_run_of_other_code_names_what_it_was_made_from(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8))
    gblr.save_pretrained(model, tmp_path / "run" / "model")
    write_run(tmp_path / "run", "python:no_such_module:net", "digits")
    with pytest.raises(OSError, match=r"run was made from python:no_such_module:net, .*no module 'no_such_module'"):
        open_model(str(tmp_path / "run"))


@pytest.mark.parametrize("use", [lambda folder: open_model(str(folder)), inspect_folder])
def test_an_unfinished_run_is_told_so(use, tmp_path):
    (tmp_path / "settings.json").write_text("{}")
    (tmp_path / "work").mkdir()
    with pytest.raises(ValueError, match="is an unfinished run: the same `gblr` command that began it continues it"):
        use(tmp_path)


@pytest.mark.parametrize("text", ["{}", "[]", '{"model": "net", "data": {}}'])
def test_a_record_of_another_program_is_told_so(text, tmp_path):
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(ValueError, match=r"run.json is no record that `gblr compress`"):
        open_model(str(tmp_path))


def test_costs_by_type_are_those_of_converted_layers():
    model = CifarResNet(8).eval()
    gblr.convert_(model, gblr.LowRankConfig(0.5), gblr.conv_layers(include=("layer2",)))
    (row,) = describe_types(cost(model, torch.zeros(1, 3, 32, 32)))
    assert row["type"] == "conv" and row["layers"] == 2 and row["min"] <= row["relative_cost"] <= row["max"]

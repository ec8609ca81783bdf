import json
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import BertModel

from gblr.conversion.checkpoint import save_pretrained
from gblr.models import load
from gblr.models.load import load_model
from tests.models.tiny_models import (
    tokenizer,
    write,
    write_encoder,
    write_gguf,
    write_image_classifier,
    write_language_model,
    write_text_classifier,
)


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # read at import


@pytest.fixture
def my_models(tmp_path, monkeypatch):
    """A module of the user's in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def make(code: str, name: str = "my_models") -> None:
        sys.modules.pop(name, None)
        (tmp_path / f"{name}.py").write_text(f"import torch\nfrom torch import nn\n{code}")

    yield make
    sys.modules.pop("my_models", None)


def test_the_built_in_model_takes_digits():
    found = load_model("vit:digits")
    assert found.model(torch.zeros(2, 1, 8, 8)).shape == (2, 10)
    assert (found.image_size, found.in_channels, found.pretrained, found.model.training) == (8, 1, False, False)
    with pytest.raises(ValueError, match="vit:digits; got 'vit:base'"):
        load_model("vit:base")


# -- Hugging Face --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (write_encoder, "text encoder"),
        (write_text_classifier, "text classifier"),
        (write_language_model, "causal language model"),
        (write_image_classifier, "images"),
    ],
)
def test_the_config_decides_the_class(make, kind, tmp_path):
    found = load_model(make(tmp_path))
    assert found.kind == kind and found.architecture == type(found.model).__name__ and not found.model.training
    assert (found.tokenizer is None) == (kind == "images")
    assert found.note == "" and found.pretrained


def test_lengths_and_image_sizes_are_the_models(tmp_path):
    assert load_model(write_encoder(tmp_path / "a")).max_length == 40
    assert load_model(write_language_model(tmp_path / "b")).max_length == 32
    (tmp_path / "c").mkdir()
    settings = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.5] * 3, "crop_pct": 0.9, "do_normalize": True}
    (tmp_path / "c" / "preprocessor_config.json").write_text(json.dumps(settings))
    found = load_model(write_image_classifier(tmp_path / "c", id2label={0: "cat", 1: "dog", 2: "bird"}))
    assert (found.image_size, found.in_channels, found.crop_share) == (8, 3, 0.9)
    assert (found.image_mean, found.label_names) == ((0.1, 0.2, 0.3), ("cat", "dog", "bird"))


def test_sentence_encoders_say_how_they_pool(tmp_path):
    source = write_encoder(tmp_path)
    assert load_model(source).pooling == "mean"
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode_cls_token": true}')
    assert load_model(source).pooling == "first"


def test_task_overrules_the_class_and_new_weights_are_named(tmp_path):
    found = load_model(write_encoder(tmp_path), task="text-classification")
    assert found.kind == "text classifier" and "classifier.bias" in found.note and "random" in found.note
    with pytest.raises(ValueError, match="text-generation, "):
        load_model(str(tmp_path), task="poetry")


def test_dtype_casts(tmp_path):
    found = load_model(write_encoder(tmp_path), dtype=torch.bfloat16)
    assert found.dtype == torch.bfloat16
    assert load_model("vit:digits", dtype=torch.float64).dtype == torch.float64


def test_a_model_without_tokenizer_files_has_none(tmp_path):
    assert load_model(write_encoder(tmp_path, with_tokenizer=False)).tokenizer is None


def test_what_cannot_be_found_says_what_was_tried(tmp_path):
    with pytest.raises(OSError, match=r"no directory here.*HF_HUB_OFFLINE is set.*give its directory"):
        load_model("nobody/nothing")
    with pytest.raises(FileNotFoundError, match="there is no directory"):
        load_model(str(tmp_path / "absent"))
    with pytest.raises(FileNotFoundError, match=r"A model is a directory"):
        load_model("./absent")
    (tmp_path / "weights.pt").write_text("")
    with pytest.raises(FileNotFoundError, match=r"no config.json \(it has weights.pt\)"):
        load_model(str(tmp_path))
    with pytest.raises(ValueError, match=r"is a file.*python:module:function"):
        load_model(str(tmp_path / "weights.pt"))


def test_a_directory_without_weights_or_of_unknown_code_is_refused(tmp_path):
    (tmp_path / "model.safetensors").touch()
    source = write_encoder(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(OSError, match="cannot be read"):
        load_model(source)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["SecretModel"]}))
    with pytest.raises(ValueError, match=r"is a SecretModel.*not run"):
        load_model(source)


def test_a_checkpoint_of_gblr_is_pointed_to_its_own_reader(tmp_path):
    save_pretrained(load_model(write_encoder(tmp_path / "dense")).model, tmp_path / "small")
    with pytest.raises(ValueError, match=r"gblr.from_pretrained"):
        load_model(str(tmp_path / "small"))


# -- timm ----------------------------------------------------------------------------------------------------------


class FakeTimm(SimpleNamespace):
    """What `load_model` uses of timm."""

    __version__ = "1.0"

    def is_model(self, name):
        return name == "small"

    def list_models(self, pattern):
        return ["small", "smaller"]

    def create_model(self, name, pretrained=False):
        if pretrained and self.offline:
            raise OSError("no network\nand more")
        model = nn.Conv2d(3, 4, 1)
        model.pretrained_cfg = {"input_size": (3, 32, 32), "mean": (0.5,) * 3, "std": (0.2,) * 3, "crop_pct": 0.875}
        return model


@pytest.mark.parametrize("offline", [False, True])
def test_timm_models_bring_their_settings_and_say_if_they_are_random(offline, monkeypatch):
    monkeypatch.setattr(load, "import_timm", lambda: FakeTimm(offline=offline))
    found = load_model("timm:small")
    assert (found.image_size, found.image_std, found.crop_share) == (32, (0.2,) * 3, 0.875)
    assert found.pretrained == (not offline)
    assert ("random weights" in found.note and "(no network)" in found.note) == offline


def test_an_unknown_name_of_timm_gets_others(monkeypatch):
    monkeypatch.setattr(load, "import_timm", lambda: FakeTimm(offline=True))
    with pytest.raises(ValueError, match=r"no model 'smal'.*small, smaller"):
        load_model("timm:smal")


# -- code of the user's --------------------------------------------------------------------------------------------


def test_a_function_in_the_current_folder_makes_the_model(my_models):
    my_models(
        "class Net(nn.Linear):\n    image_size, image_mean, image_std = 4, (0.5,), (0.25,)\n"
        "def net():\n    return Net(2, 3)\n"
    )
    found = load_model("python:my_models:net")
    assert (found.architecture, found.kind, found.tokenizer) == ("Net", "unknown", None)
    assert (found.image_size, found.image_mean, found.image_std) == (4, (0.5,), (0.25,))
    assert not found.model.training


def test_attributes_for_images_may_be_written_in_other_ways(my_models):
    my_models(
        "class Net(nn.Linear):\n    image_size, in_channels, image_mean, image_std = (4, 4), None, 0.5, None\n"
        "def net():\n    model = Net(2, 3)\n    model.image_std = torch.full((1, 3, 1, 1), 0.25)\n    return model\n"
        "def high():\n    model = Net(2, 3)\n    model.image_size = (4, 6)\n    return model\n"
    )
    found = load_model("python:my_models:net")
    assert (found.image_size, found.in_channels, found.image_mean) == (4, None, (0.5,))
    assert found.image_std == (0.25, 0.25, 0.25)
    with pytest.raises(ValueError, match=r"`image_size` must be one whole number; got \(4, 6\)"):
        load_model("python:my_models:high")


def test_a_function_may_return_a_transformers_model_and_a_tokenizer(my_models, tmp_path):
    write(tmp_path / "bert", BertModel.from_pretrained(write_encoder(tmp_path / "x")), tokenizer(marks=True))
    my_models("from transformers import BertModel\ndef bert():\n    return BertModel.from_pretrained('bert'), len\n")
    found = load_model("python:my_models:bert")
    assert found.kind == "text encoder" and found.tokenizer is len and found.max_length == 40


@pytest.mark.parametrize(
    ("source", "error", "words"),
    [
        ("python:my_models", ValueError, "expected python:module:function"),
        ("python:no_such:net", ModuleNotFoundError, "no module 'no_such'"),
        ("python:my_models:net", ValueError, "no function 'net'; some that it has: breaks, number, picky"),
        ("python:my_models:number", TypeError, "must return a torch module.*returned int"),
        ("python:my_models:picky", TypeError, "callable without arguments"),
        ("python:my_models:breaks", RuntimeError, "my_models:breaks failed: KeyError: 'weights'"),
    ],
)
def test_errors_name_what_failed(source, error, words, my_models):
    my_models("def number():\n    return 3\ndef picky(size):\n    pass\ndef breaks():\n    return {}['weights']\n")
    with pytest.raises(error, match=words):
        load_model(source)


@pytest.mark.parametrize(
    ("code", "error", "words"),
    [
        ("import no_such_package", ModuleNotFoundError, "my_models needs no_such_package"),
        ("1 / 0", RuntimeError, "importing my_models failed: ZeroDivisionError"),
    ],
)
def test_a_module_that_cannot_be_imported_says_why(code, error, words, my_models):
    my_models(code)
    with pytest.raises(error, match=words):
        load_model("python:my_models:net")


def test_a_gguf_file_becomes_a_plain_language_model(tmp_path):
    loaded = load_model(write_gguf(tmp_path / "tiny.gguf"))
    assert loaded.kind == "causal language model" and loaded.max_length == 128 and not loaded.note
    assert loaded.tokenizer("abk")["input_ids"] == [37, 10]
    weight = loaded.model.model.layers[0].mlp.down_proj.weight
    assert weight.dtype == torch.float32 and float(weight.detach().std()) == pytest.approx(1.0, rel=0.1)
    loaded.model.save_pretrained(tmp_path / "plain")
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    kept = load_model(str(tmp_path / "plain")).model.model.layers[0].mlp.down_proj.weight
    assert torch.equal(kept, weight)


def test_without_its_package_a_gguf_file_is_refused_with_what_to_install(tmp_path, monkeypatch):
    file = write_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ImportError, match=r"pip install 'gblr\[hf\]'"):
        load_model(file)

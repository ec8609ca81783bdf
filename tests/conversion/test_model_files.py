"""Directories that cannot be streamed: each error says what is wrong and what to do, and nothing is written."""

import json
import weakref

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from gblr.conversion.checkpoint import save_pretrained
from gblr.conversion.convert import convert_
from gblr.conversion.model_files import open_model_files
from gblr.conversion.streaming import convert_streaming
from gblr.conversion.tensor_stream import Piece, read_entries, write_pieces
from gblr.fitting.config import GaudiConfig, LowRankConfig
from tests.conversion.converted import llama
from tests.conversion.streamed import write_llama

CONFIG = LowRankConfig(0.5)


@pytest.fixture
def source(tmp_path):
    return write_llama(tmp_path / "source")


def shards(source):
    return sorted(source.glob("*.safetensors"))


def remove_shard(source):
    shards(source)[0].unlink()


def truncate_shard(source):
    data = shards(source)[0].read_bytes()
    shards(source)[0].write_bytes(data[:-100])


def spoil_header(source):
    data = bytearray(shards(source)[0].read_bytes())
    data[8:12] = b"xxxx"
    shards(source)[0].write_bytes(data)


def empty_shard(source):
    shards(source)[0].write_bytes(b"")


def only_bin(source):
    for file in (*shards(source), source / "model.safetensors.index.json"):
        file.unlink()
    (source / "pytorch_model.bin").write_bytes(b"x")


def remove_config(source):
    (source / "config.json").unlink()


def spoil_config(source):
    (source / "config.json").write_text("{")


def spoil_index(source):
    (source / "model.safetensors.index.json").write_text("[]")


def change(**fields):
    def apply(source):
        config = json.loads((source / "config.json").read_text())
        (source / "config.json").write_text(json.dumps(config | fields))

    return apply


def put_nan(source):
    for file in shards(source):
        tensors = load_file(file)
        for name in tensors:
            if name.endswith("layers.1.mlp.up_proj.weight"):
                tensors[name][0, 0] = torch.nan
        save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (remove_shard, "lacks 1 of"),
        (truncate_shard, "truncated.*Download it again"),
        (spoil_header, "header of .* is damaged"),
        (empty_shard, "no safetensors file, or is truncated"),
        (only_bin, "pytorch_model.bin: load that by transformers and write it by `save_pretrained`"),
        (remove_config, "has no config.json"),
        (spoil_config, "config.json cannot be read"),
        (spoil_index, "index.json is damaged"),
        (change(architectures=[]), "names no class"),
        (change(architectures=["NoSuchModel"]), "no model of transformers"),
        (change(quantization_config={"bits": 4}), "quantized"),
        (change(num_hidden_layers=3), "'model.layers.2.*' of the model is in none of them"),
        (change(intermediate_size=96), r"expected shape \(96, 32\), found \(64, 32\)"),
    ],
)
def test_what_is_wrong_with_a_directory_is_said(source, damage, words, tmp_path):
    damage(source)
    with pytest.raises((ValueError, OSError), match=f"(?s){words}"):
        convert_streaming(source, tmp_path / "out", CONFIG)
    assert not (tmp_path / "out").exists()


def test_a_weight_that_is_not_finite_is_named_and_what_was_done_stays(source, tmp_path):
    before = [file.read_bytes() for file in shards(source)]
    put_nan(source)
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up_proj: its weight holds NaN"):
        convert_streaming(source, tmp_path / "out", CONFIG)
    for file, data in zip(shards(source), before, strict=True):
        file.write_bytes(data)  # mended
    assert len(convert_streaming(source, tmp_path / "out", CONFIG)) == 14


@pytest.mark.parametrize(
    ("config", "out", "words"),
    [
        (LowRankConfig(0.5, allocation="global"), "out", 'Use allocation="uniform"'),
        (GaudiConfig(0.5, init="scratch"), "out", "nothing to stream"),
        (CONFIG, "source/out", "must lie outside `source_dir`"),
        (CONFIG, "source", "must lie outside `source_dir`"),
    ],
)
def test_arguments_that_cannot_be_met_are_refused(source, config, out, words, tmp_path):
    before = sorted(path.name for path in source.iterdir())
    with pytest.raises(ValueError, match=words):
        convert_streaming(source, tmp_path / out, config)
    assert sorted(path.name for path in source.iterdir()) == before


def test_a_result_of_gblr_is_no_source(tmp_path):
    model = llama()
    convert_(model, CONFIG)
    save_pretrained(model, tmp_path / "source")
    with pytest.raises(ValueError, match="structured already"):
        convert_streaming(tmp_path / "source", tmp_path / "out", CONFIG)


def test_a_missing_directory_and_empty_calibration_are_told(source, tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no directory"):
        convert_streaming(tmp_path / "nowhere", tmp_path / "out", CONFIG)
    with pytest.raises(ValueError, match="`calibration` is empty"):
        convert_streaming(source, tmp_path / "out", CONFIG, calibration=[])


def test_a_model_is_opened_without_weights_but_with_its_buffers(source):
    model, files = open_model_files(source)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not model.model.rotary_emb.inv_freq.is_meta
    assert set(files.entries) == set(model.state_dict())


def test_tensors_are_written_and_read_as_safetensors_does(tmp_path, generator):
    tensors = {
        "half": torch.randn(3, 5, generator=generator).bfloat16(),
        "byte": torch.arange(7, dtype=torch.uint8),
        "none": torch.empty(0, 4),
        "one": torch.tensor(2.5, dtype=torch.float64),
        "whole": torch.arange(6).view(2, 3),
    }
    seen = []
    pieces = [Piece(n, t.dtype, tuple(t.shape), lambda t=t: t) for n, t in tensors.items()]
    write_pieces(tmp_path / "x.safetensors", pieces, lambda name, tensor: seen.append(name))
    loaded = load_file(tmp_path / "x.safetensors")
    assert sorted(seen) == sorted(tensors) == sorted(loaded)
    save_file(tensors, tmp_path / "y.safetensors")
    for name, tensor in tensors.items():
        assert_close(loaded[name], tensor)
        assert_close(read_entries(tmp_path / "y.safetensors")[name].read(), tensor)


def test_a_tensor_is_forgotten_before_the_next_one_is_loaded(tmp_path):
    """Memory holds one of them: with two, a model with a separate head would need both of its embeddings at once."""
    loaded: list[weakref.ref] = []

    def load() -> torch.Tensor:
        assert not any(tensor() is not None for tensor in loaded)
        tensor = torch.zeros(4)
        loaded.append(weakref.ref(tensor))
        return tensor

    pieces = [Piece(name, torch.float32, (4,), load) for name in "abc"]
    write_pieces(tmp_path / "x.safetensors", pieces, lambda name, tensor: None)
    assert len(loaded) == 3

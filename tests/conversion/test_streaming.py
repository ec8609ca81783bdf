"""Streaming does what `convert_`, `harden_` and `save_pretrained` do, in little memory; it survives being killed."""

import copy
import json
import shutil

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from gblr.conversion import stream_refit, streaming
from gblr.conversion.calibration import Calibration
from gblr.conversion.checkpoint import from_pretrained, save_pretrained
from gblr.conversion.convert import convert_
from gblr.conversion.filters import linear_layers
from gblr.conversion.harden import harden_
from gblr.conversion.stream_folder import CLAIM, WORK, OtherConversion
from gblr.conversion.streaming import convert_streaming
from gblr.conversion.tensor_files import CheckpointError
from gblr.fitting.config import BlastConfig, GaudiConfig, LowRankConfig
from gblr.layers.split import SplitLinear
from gblr.layers.structured import MatrixModule
from gblr.matrices.packed import PackedGBLR
from gblr.training.heal import heal_
from tests.conversion.converted import bert, gpt2, llama, output, vit
from tests.conversion.streamed import make_batches, run, run_together, write_llama
from tests.helpers import shapes_unchecked

GAUDI, LOW_RANK = GaudiConfig(0.5, steps=1), LowRankConfig(0.5)


@pytest.fixture
def source(tmp_path):
    return write_llama(tmp_path / "source")


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Of the structured layers, as plain matrices."""
    found = {name: module for name, module in model.named_modules() if isinstance(module, MatrixModule)}
    return {name: module.weight.detach() for name, module in found.items()}


def converted(model, config, calibration=None, where=None):
    report = convert_(model, config, where, calibration)
    if isinstance(config, GaudiConfig):
        harden_(model)
    return report


# -- the same as convert_ ----------------------------------------------------------------------------------------------


BLAST = BlastConfig(0.5, num_tiles=2, steps=5)


@pytest.mark.parametrize(
    ("make", "config", "calibrated"),
    [
        *((make, config, True) for make in (llama, gpt2, bert) for config in (GAUDI, LOW_RANK)),
        (gpt2, GAUDI, False),
        (llama, BLAST, True),
    ],
    ids=lambda value: getattr(value, "__name__", None) or type(value).__name__,
)
def test_the_result_is_that_of_convert(make, config, calibrated, tmp_path):
    batches = make_batches() if calibrated else None
    model = make()
    model.save_pretrained(tmp_path / "source", max_shard_size="20KB")
    report = convert_streaming(tmp_path / "source", tmp_path / "out", config, calibration=batches)
    expected = converted(model, config, batches)
    found = from_pretrained(tmp_path / "out")
    assert report.notes == expected.notes and bool(report.notes) == calibrated  # fewer tokens than some have features
    assert list(report) == list(expected) and [row.layer for row in report.rows] == [r.layer for r in expected.rows]
    assert [row.error for row in report.rows] == pytest.approx([row.error for row in expected.rows], abs=1e-4)
    ours, theirs = weights(found), weights(model)
    assert ours.keys() == theirs.keys() and len(ours) >= 8
    for name in ours:
        assert_close(ours[name], theirs[name], atol=2e-3, rtol=0, msg=name)
    assert_close(output(found), output(model), atol=2e-3, rtol=0)
    save_pretrained(model, tmp_path / "expected")
    assert_same_format(tmp_path / "out", tmp_path / "expected")


def assert_same_format(folder, expected):
    """All but names of files, checksums, and the forms of fits that rounding led elsewhere."""
    ours, theirs = (json.loads((place / "gblr.json").read_text()) for place in (folder, expected))
    assert list(ours) == list(theirs) and list(ours["tensors"]) == list(theirs["tensors"])
    for key in (
        "format_version",
        "architecture",
        "transformers",
        "linear_layers",
        "shared_layers",
        "aliases",
        "buffers",
    ):
        assert ours[key] == theirs[key], key
    assert (folder / "config.json").read_text() == (expected / "config.json").read_text()
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {name: record["file"] for name, record in ours["tensors"].items()}
    assert not (folder / WORK).exists()


def test_gaudi_layers_are_hardened_and_fused_ones_split(tmp_path):
    gpt2().save_pretrained(tmp_path / "source")
    convert_streaming(tmp_path / "source", tmp_path / "out", GAUDI)
    model = from_pretrained(tmp_path / "out")
    layer = model.get_submodule("transformer.h.0.attn.c_attn")
    assert isinstance(layer, SplitLinear) and len(layer.parts) == 3
    assert all(isinstance(part.matrix, PackedGBLR) for part in layer.parts)


def test_half_precision_and_tied_weights_stay(tmp_path):
    source = write_llama(tmp_path / "source", tie_word_embeddings=True, dtype="bfloat16")
    llama_in_half = from_transformers(source).to(torch.bfloat16)
    llama_in_half.save_pretrained(source)
    convert_streaming(source, tmp_path / "out", LOW_RANK, calibration=make_batches())
    model = from_pretrained(tmp_path / "out")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    converted(llama_in_half, LOW_RANK, make_batches())
    assert_close(output(model), output(llama_in_half), atol=0.05, rtol=0)


def from_transformers(source):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(source)


def test_a_filter_chooses_and_layers_outside_the_blocks_are_converted_too(tmp_path):
    source = write_llama(tmp_path / "source", tie_word_embeddings=False)
    where = linear_layers(include=("q_proj", "down_proj", "lm_head"))
    report = convert_streaming(source, tmp_path / "out", LOW_RANK, where, make_batches())
    model = from_transformers(source)
    expected = converted(model, LOW_RANK, make_batches(), where)
    assert list(report) == list(expected) and report[-1] == "lm_head"
    found = weights(from_pretrained(tmp_path / "out"))
    for name, weight in weights(model).items():
        assert_close(found[name], weight, atol=1e-4, rtol=0, msg=name)


def test_images_are_calibrated_on_too(tmp_path):
    model = vit()
    model.save_pretrained(tmp_path / "source")
    batches = [torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    report = convert_streaming(tmp_path / "source", tmp_path / "out", LOW_RANK, calibration=batches)
    expected = converted(model, LOW_RANK, batches)
    assert [row.error for row in report.rows] == pytest.approx([row.error for row in expected.rows], abs=1e-5)


def test_weights_that_other_modules_read_are_found(tmp_path):
    """DeBERTa's encoder takes the table of its relative positions, and never calls the embedding."""
    from transformers import DebertaConfig, DebertaModel

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = DebertaConfig(**sizes, vocab_size=50, relative_attention=True, pos_att_type=["c2p", "p2c"])
    model = DebertaModel(config).eval()
    model.save_pretrained(tmp_path / "source")
    report = convert_streaming(tmp_path / "source", tmp_path / "out", LOW_RANK, calibration=make_batches())
    expected = converted(model, LOW_RANK, make_batches())
    assert [row.error for row in report.rows] == pytest.approx([row.error for row in expected.rows], abs=1e-5)


def test_base_model_weights_are_found_under_the_prefix_of_a_head(tmp_path):
    """gpt2 of the hub has no "transformer." in its names."""
    from transformers import AutoModel

    gpt2().save_pretrained(tmp_path / "whole")
    AutoModel.from_pretrained(tmp_path / "whole").save_pretrained(tmp_path / "source")
    shutil.copy(tmp_path / "whole" / "config.json", tmp_path / "source")  # with the class that has a head
    convert_streaming(tmp_path / "source", tmp_path / "out", LOW_RANK)
    model = gpt2()
    converted(model, LOW_RANK)
    assert_close(output(from_pretrained(tmp_path / "out")), output(model))


# -- refits ------------------------------------------------------------------------------------------------------------


IN_BLOCKS = linear_layers(exclude=("pooler",))


@pytest.mark.parametrize(
    ("make", "config"),
    [(llama, GAUDI), (llama, LOW_RANK), (gpt2, LOW_RANK), (bert, LOW_RANK), (llama, BLAST)],
    ids=lambda value: getattr(value, "__name__", None) or type(value).__name__,
)
def test_refitted_layers_are_those_of_heal(make, config, tmp_path):
    dense, batches = make(), make_batches()
    dense.save_pretrained(tmp_path / "source", max_shard_size="20KB")
    report = convert_streaming(tmp_path / "source", tmp_path / "out", config, IN_BLOCKS, batches, refit=True)
    model = copy.deepcopy(dense)
    expected = convert_(model, config, IN_BLOCKS, batches)
    fitted = output(model)
    healed = {row.layer: row.error for row in heal_(model, dense, batches, structure="free").layers}
    if isinstance(config, GaudiConfig):
        harden_(model)
    found = from_pretrained(tmp_path / "out")
    ours, theirs = weights(found), weights(model)
    assert ours.keys() == theirs.keys() and len(ours) >= 8
    for name in ours:
        assert_close(ours[name], theirs[name], atol=5e-3, rtol=0, msg=name)
    assert_close(output(found), output(model), atol=5e-3, rtol=0)
    assert (output(found) - fitted).abs().max() > 0.01
    assert list(report) == list(expected) and [row.layer for row in report.rows] == [r.layer for r in expected.rows]
    errors = [row.error for row in report.rows if row.converted]
    of_parts = [healed[row.layer.partition("[")[0]] for row in report.rows if row.converted]
    assert errors == pytest.approx(of_parts, abs=2e-3)
    assert str(report).count("refitted") == 1
    save_pretrained(model, tmp_path / "expected")
    assert_same_format(tmp_path / "out", tmp_path / "expected")


def test_refits_pass_blocks_that_stay_dense(tmp_path):
    source = write_llama(tmp_path / "source", blocks=3)
    where, batches = linear_layers(include=("layers.0", "layers.2")), make_batches()
    convert_streaming(source, tmp_path / "out", LOW_RANK, where, batches, refit=True)
    dense = from_transformers(source)
    model = copy.deepcopy(dense)
    convert_(model, LOW_RANK, where, batches)
    heal_(model, dense, batches, structure="free")
    assert_close(output(from_pretrained(tmp_path / "out")), output(model), atol=2e-3, rtol=0)


@pytest.mark.parametrize("step", ["refit_layers_", "write_layer"])  # as a block begins; as its layers are written
def test_a_run_stopped_in_a_refit_goes_on(step, source, tmp_path, monkeypatch):
    def go(folder):
        return convert_streaming(source, tmp_path / folder, LOW_RANK, calibration=make_batches(), refit=True)

    expected = go("expected")
    called, function, stops_at = [], getattr(stream_refit, step), {"refit_layers_": 1, "write_layer": 9}[step]

    def stopping(*args, **options):
        called.append(args)
        if len(called) == stops_at + 1:
            raise KeyboardInterrupt
        return function(*args, **options)

    monkeypatch.setattr(stream_refit, step, stopping)
    with pytest.raises(KeyboardInterrupt):
        go("out")
    fitted = []
    monkeypatch.setattr(streaming, "fit_piece", lambda config, jobs: fitted.append(jobs))
    report = go("out")
    assert not fitted, "all layers were fitted before"
    assert_same_checkpoint(tmp_path / "out", tmp_path / "expected")
    assert [(row.what, row.error) for row in report.rows] == [(row.what, row.error) for row in expected.rows]


def test_processes_share_the_fits_of_a_model_that_is_refitted(source, tmp_path):
    codes = run_together(source, tmp_path / "out", "low rank", "cal", "refit", processes=2)
    assert codes == [0, 0]
    convert_streaming(source, tmp_path / "expected", LOW_RANK, calibration=make_batches(), refit=True)
    assert_same_checkpoint(tmp_path / "out", tmp_path / "expected")


def test_a_refit_needs_inputs_and_a_folder_of_its_own(source, tmp_path):
    with pytest.raises(ValueError, match="pass `calibration` batches"):
        convert_streaming(source, tmp_path / "out", LOW_RANK, refit=True)
    convert_streaming(source, tmp_path / "out", LOW_RANK, calibration=make_batches())
    with pytest.raises(OtherConversion, match="config was"):
        convert_streaming(source, tmp_path / "out", LOW_RANK, calibration=make_batches(), refit=True)


def test_a_measurement_made_in_memory_is_refused(source, tmp_path):
    with shapes_unchecked(), pytest.raises(ValueError, match=r"pass the batches as .*gblr.calibrate"):
        convert_streaming(source, tmp_path / "out", LOW_RANK, calibration=Calibration())
    with pytest.raises(ValueError, match=r"one batch, a mapping"):
        convert_streaming(source, tmp_path / "out", LOW_RANK, calibration=make_batches()[0])
    assert not (tmp_path / "out").exists()


# -- resuming ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [0, 9])
def test_a_killed_run_goes_on_where_it_was(source, layers, tmp_path, monkeypatch):
    convert_streaming(source, tmp_path / "expected", LOW_RANK, calibration=make_batches())
    fitted, fit_piece = [], streaming.fit_piece

    def counted(config, jobs):
        if len(fitted) == layers:
            raise KeyboardInterrupt
        fitted.append(jobs[0].name)
        fit_piece(config, jobs)

    monkeypatch.setattr(streaming, "fit_piece", counted)
    with pytest.raises(KeyboardInterrupt):
        convert_streaming(source, tmp_path / "out", LOW_RANK, calibration=make_batches())
    layers = 100
    convert_streaming(source, tmp_path / "out", LOW_RANK, calibration=make_batches())
    assert len(fitted) == len(set(fitted)) == 14, "no layer was fitted twice"
    assert_same_checkpoint(tmp_path / "out", tmp_path / "expected")
    layers = 0
    again = convert_streaming(source, tmp_path / "out", LOW_RANK, calibration=make_batches())
    assert len(again) == 14, "a finished one is only reported"


def assert_same_checkpoint(folder, expected):
    names = sorted(path.name for path in expected.iterdir())
    assert sorted(path.name for path in folder.iterdir()) == names
    for name in names:
        if name != CLAIM:  # has times
            assert (folder / name).read_bytes() == (expected / name).read_bytes(), name


def test_a_run_stopped_between_moving_files_and_the_manifest_goes_on(source, tmp_path, monkeypatch):
    convert_streaming(source, tmp_path / "expected", LOW_RANK)
    from gblr.conversion import stream_output

    publish = stream_output.publish
    monkeypatch.setattr(stream_output, "publish", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        convert_streaming(source, tmp_path / "out", LOW_RANK)
    with pytest.raises(CheckpointError, match=r"has no gblr\.json"):
        from_pretrained(tmp_path / "out")
    monkeypatch.setattr(stream_output, "publish", publish)
    convert_streaming(source, tmp_path / "out", LOW_RANK)
    assert_same_checkpoint(tmp_path / "out", tmp_path / "expected")


def test_a_process_that_was_really_killed_is_continued(source, tmp_path):
    (code,) = run_together(source, tmp_path / "out", "low rank", "cal", KILL="9")
    assert code == -9 and (tmp_path / "out" / WORK / "unit-000.safetensors").is_file()
    convert_streaming(source, tmp_path / "out", LOW_RANK, calibration=make_batches())
    convert_streaming(source, tmp_path / "expected", LOW_RANK, calibration=make_batches())
    assert_same_checkpoint(tmp_path / "out", tmp_path / "expected")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"config": LowRankConfig(0.4)}, "config was"),
        ({"where": linear_layers(include=("q_proj",))}, "layers was"),
        ({"calibration": make_batches(2)}, "calibration was"),
    ],
)
def test_other_arguments_in_the_same_folder_are_refused(source, change, words, tmp_path):
    convert_streaming(source, tmp_path / "out", LOW_RANK)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    with pytest.raises(OtherConversion, match=words):
        convert_streaming(source, tmp_path / "out", **({"config": LOW_RANK} | change))
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before


# -- memory ------------------------------------------------------------------------------------------------------------

MIB = 1 << 20
HIDDEN, NUM_BLOCKS = 512, 12
BLOCK = 9 * HIDDEN**2 * 4  # bytes of a block of `write_llama` in float32: 9 MiB; its largest weight has 2 MiB


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    return write_llama(tmp_path_factory.mktemp("large"), NUM_BLOCKS, HIDDEN, shard="20MB")


@pytest.mark.parametrize(
    ("config", "options", "limit"),
    [
        ("low rank", [], 36 * MIB),  # 26 is too little; most of it is the SVD in float64 of one layer
        pytest.param("low rank", ["cal"], 50 * MIB, marks=pytest.mark.slow),
        pytest.param("gaudi rank 16", [], 84 * MIB, marks=pytest.mark.slow),
    ],
    ids=["low rank", "low rank, calibrated", "GBLR"],
)
def test_a_model_is_converted_in_less_memory_than_it_takes(large, config, options, limit, tmp_path):
    assert limit < NUM_BLOCKS * BLOCK
    code, written = run(large, tmp_path / "out", config, *options, LIMIT=str(limit))
    assert code == 0, written


def test_convert_fails_where_streaming_does_not(large, tmp_path):
    code, written = run(large, tmp_path / "out", "low rank", "whole", LIMIT=str(84 * MIB))
    assert code != 0 and "memory" in written

import copy
import importlib.metadata
import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModel,
    DepthAnythingConfig,
    DepthAnythingForDepthEstimation,
    DetrConfig,
    DetrForObjectDetection,
    Dinov2Config,
    ResNetConfig,
)

import gblr
from gblr.conversion.checkpoint import from_pretrained, load_, save_pretrained
from gblr.conversion.cost import cost
from gblr.conversion.tensor_files import CheckpointError, read_tensors, write_tensors
from gblr.layers.gaudi import GaudiLinear
from gblr.layers.structured import StructuredLinear
from gblr.matrices.gblr import GBLRMatrix
from gblr.matrices.packed import PackedGBLR
from tests.conversion import converted
from tests.conversion.converted import low_rank, output, packed

TRANSFORMERS = [
    converted.converted_bert,
    converted.converted_gpt2,
    converted.converted_llama,
    converted.converted_vit,
    converted.converted_resnet,
]
PAIRS = [
    (converted.converted_bert, converted.bert),
    (converted.converted_gpt2, converted.gpt2),
    (converted.converted_llama, converted.llama),
    (converted.converted_vit, converted.vit),
    (converted.converted_resnet, converted.resnet),
    (converted.converted_encoder, converted.encoder),
]
by_name = {"ids": lambda value: getattr(value, "__name__", str(value).removeprefix("torch."))}


def bits(model: nn.Module) -> dict[str, tuple]:
    """Everything a model computes with, bit by bit: parameters, buffers, those outside the state dict too."""
    tensors = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    raw = {name: t.detach().contiguous().reshape(-1).view(torch.uint8).tolist() for name, t in tensors.items()}
    return {name: (tensors[name].dtype, tuple(tensors[name].shape), raw[name]) for name in sorted(tensors)}


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 8))


def converted_small() -> nn.Module:
    model = small()
    model[0] = packed(model[0])
    return model


def edit_manifest(directory, change) -> None:
    file = directory / "gblr.json"
    manifest = json.loads(file.read_text())
    change(manifest)
    file.write_text(json.dumps(manifest))


def edit_tensors(directory, change) -> None:
    file = directory / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def assert_refused(model: nn.Module, directory, *words: str) -> None:
    """`load_` raises an error that has all the words, and changes nothing."""
    before, modules = bits(model), list(model.modules())
    with pytest.raises(CheckpointError) as caught:
        load_(model, directory)
    for word in words:
        assert word in str(caught.value), str(caught.value)
    assert bits(model) == before and list(model.modules()) == modules


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], **by_name)
@pytest.mark.parametrize("make", TRANSFORMERS, **by_name)
def test_transformers_models_come_back_bit_by_bit(make, dtype, tmp_path):
    model = make().to(dtype)
    save_pretrained(model, tmp_path)
    loaded = from_pretrained(tmp_path)
    assert type(loaded) is type(model) and not loaded.training
    assert bits(loaded) == bits(model)
    assert str(loaded) == str(model)
    assert torch.equal(output(loaded), output(model))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], **by_name)
@pytest.mark.parametrize(("make", "make_dense"), PAIRS, **by_name)
def test_load_fills_a_dense_model_bit_by_bit(make, make_dense, dtype, tmp_path):
    model, target = make().to(dtype), make_dense().to(dtype)
    with torch.no_grad():
        for p in target.parameters():
            p.zero_()
    save_pretrained(model, tmp_path)
    assert load_(target, tmp_path) is target
    assert bits(target) == bits(model)
    assert torch.equal(output(target), output(model))


def test_load_fills_a_converted_model_in_place_so_that_optimizers_keep_their_parameters(tmp_path):
    model, target = converted.converted_encoder(), converted.converted_encoder()
    model.layers[1].linear2.set_sigma(3.0)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)
    parameters = [id(p) for p in target.parameters()]
    save_pretrained(model, tmp_path)
    load_(target, tmp_path)
    assert bits(target) == bits(model) and [id(p) for p in target.parameters()] == parameters


def test_a_frozen_model_stays_frozen_where_layers_are_replaced(tmp_path):
    save_pretrained(converted_small(), tmp_path)
    model = small().requires_grad_(False)
    model[0].bias.requires_grad_()
    load_(model, tmp_path)
    assert isinstance(model[0], StructuredLinear)
    assert [name for name, p in model.named_parameters() if p.requires_grad] == ["0.bias"]


def test_load_fills_a_model_on_the_meta_device(tmp_path):
    model = converted_small()
    save_pretrained(model, tmp_path)
    with torch.device("meta"):
        target = small()
    assert bits(load_(target, tmp_path)) == bits(model)


def test_a_model_that_is_one_layer_comes_back(tmp_path):
    model = GaudiLinear(8, 12, block_rank=2)
    save_pretrained(model, tmp_path)
    assert bits(load_(GaudiLinear(8, 12, block_rank=2), tmp_path)) == bits(model)
    assert_refused(nn.Linear(8, 12), tmp_path, "GaudiLinear", "Linear")


def test_an_average_over_state_dicts_with_infinite_sigmas_comes_back(tmp_path):
    """Torch's formula for it gives NaN."""
    model = nn.Sequential(GaudiLinear(12, 16))
    average = copy.deepcopy(model).requires_grad_(False)
    average[0].set_sigma(1.0)
    for _ in range(2):
        torch._foreach_lerp_(list(average.state_dict().values()), list(model.state_dict().values()), 0.5)
    save_pretrained(average, tmp_path)
    found = load_(nn.Sequential(nn.Linear(12, 16)), tmp_path)
    assert float(found[0].sigma) == torch.inf and torch.equal(found[0].weight, average[0].weight)


def test_a_layer_without_live_blocks_comes_back(tmp_path):
    empty = GBLRMatrix.from_low_rank(torch.zeros(0, 16), torch.zeros(0, 12))
    model = small()
    model[0] = StructuredLinear(PackedGBLR.from_gblr(empty))
    save_pretrained(model, tmp_path)
    target = small()
    assert bits(load_(target, tmp_path)) == bits(model)


def test_shared_layers_are_stored_once_and_shared_again(tmp_path):
    layer = StructuredLinear(low_rank(8, 8))
    save_pretrained(nn.Sequential(layer, layer), tmp_path)
    assert set(load_file(tmp_path / "model.safetensors")) == {"0.u", "0.v"}
    loaded = load_(nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)), tmp_path)
    assert loaded[0] is loaded[1] and torch.equal(loaded[0].u, layer.u)


def test_tied_weights_are_stored_once_under_the_name_of_transformers_and_tied_again(tmp_path):
    model = converted.converted_llama()
    save_pretrained(model, tmp_path)
    names = set(load_file(tmp_path / "model.safetensors"))
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names
    loaded = from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_views_and_transposed_tensors_are_saved(tmp_path):
    model = small()
    base = torch.randn(40, 16)
    model[2].weight = nn.Parameter(base[3:19].T[:8])
    save_pretrained(model, tmp_path)
    assert bits(load_(small(), tmp_path)) == bits(model)


def test_size_on_disk_follows_cost(tmp_path):
    sizes, params = [], []
    for relative_cost in (0.1, 0.5):
        layer = nn.Linear(512, 512, bias=False)
        model = nn.Sequential(packed(layer, relative_cost))
        directory = tmp_path / str(relative_cost)
        save_pretrained(model, directory)
        sizes.append(sum(file.stat().st_size for file in directory.iterdir()))
        params.append(cost(model).num_params)
    assert params[1] > 4 * params[0]
    assert sizes[0] < 4 * params[0] * 1.2 and sizes[1] < 4 * params[1] * 1.1  # 4 bytes a number, and the structure


def test_tensors_begin_in_memory_where_those_of_the_saved_model_did(tmp_path):
    """In the midst of a mapped file products take other paths, whose outputs differ in last bits."""
    save_pretrained(converted.converted_bert(), tmp_path)
    loaded = from_pretrained(tmp_path)
    assert {p.data_ptr() % 64 for p in loaded.parameters()} == {0}


def test_dense_weights_of_converted_layers_are_never_allocated(tmp_path, monkeypatch):
    save_pretrained(converted.converted_llama(), tmp_path)
    devices = []
    original = nn.Linear.__init__

    def watched(self, *args, **kwargs):
        original(self, *args, **kwargs)
        devices.append(self.weight.device.type)

    monkeypatch.setattr(nn.Linear, "__init__", watched)
    from_pretrained(tmp_path)
    assert len(devices) >= 14 and set(devices) == {"meta"}


def test_a_dtype_casts_weights_and_leaves_structure_and_rotary_frequencies(tmp_path):
    save_pretrained(converted.converted_llama(), tmp_path)
    loaded = from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert loaded.model.layers[0].self_attn.q_proj.u.dtype == loaded.lm_head.weight.dtype == torch.bfloat16
    assert loaded.model.layers[0].self_attn.q_proj.structure_row_width.dtype == torch.int64
    assert loaded.model.rotary_emb.inv_freq.dtype == torch.float32


def test_parts_keep_the_attention_that_they_have_beside_a_model_with_another(tmp_path):
    """DepthAnything has none of its own, and says "eager"; its backbone then was loaded with that in place of sdpa."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32, "patch_size": 8}
    backbone = Dinov2Config(**sizes, out_features=["stage1", "stage2"], reshape_hidden_states=False)
    neck = {"reassemble_hidden_size": 32, "reassemble_factors": [2, 1], "neck_hidden_sizes": [16, 16], "patch_size": 8}
    config = DepthAnythingConfig(backbone_config=backbone, fusion_hidden_size=16, head_hidden_size=8, **neck)
    model = DepthAnythingForDepthEstimation(config).eval()
    gblr.convert_(model, gblr.LowRankConfig(0.5))
    save_pretrained(model, tmp_path)
    loaded = from_pretrained(tmp_path)
    assert [part.config._attn_implementation for part in (loaded, loaded.backbone)] == ["eager", "sdpa"]


def test_the_attention_implementation_is_kept(tmp_path):
    model = converted.converted_bert()
    model.set_attn_implementation("eager")
    save_pretrained(model, tmp_path)
    assert from_pretrained(tmp_path).config._attn_implementation == "eager"


def test_a_part_without_that_implementation_takes_its_own(tmp_path):
    """The backbone of a DETR has eager attention alone, the rest sdpa."""
    backbone = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], out_features=["stage2"])
    sizes = {f"{part}_{key}": n for part in ("encoder", "decoder") for key, n in (("layers", 1), ("ffn_dim", 64))}
    sizes |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "d_model": 32, "num_queries": 5}
    torch.manual_seed(0)
    config = DetrConfig(use_timm_backbone=False, backbone=None, backbone_config=backbone, **sizes)
    model = DetrForObjectDetection(config).eval()
    gblr.convert_(model, gblr.LowRankConfig(0.5))
    save_pretrained(model, tmp_path / "x")
    loaded = from_pretrained(tmp_path / "x")
    assert loaded.config._attn_implementation == model.config._attn_implementation == "sdpa"
    images = torch.linspace(-1, 1, 3 * 64 * 64).view(1, 3, 64, 64)
    assert torch.equal(loaded(images).logits, model(images).logits)


def test_large_checkpoints_are_sharded_with_the_index_of_transformers(tmp_path):
    model = converted.converted_gpt2()
    save_pretrained(model, tmp_path, max_shard_bytes=20_000)
    shards = sorted(file.name for file in tmp_path.glob("model-*.safetensors"))
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(shards) > 2 and set(index["weight_map"].values()) == set(shards)
    assert not (tmp_path / "model.safetensors").exists()
    assert bits(from_pretrained(tmp_path)) == bits(model)


def test_saving_over_a_checkpoint_replaces_it_and_leaves_no_other_files(tmp_path):
    save_pretrained(converted.converted_gpt2(), tmp_path, max_shard_bytes=20_000)
    model = converted.converted_bert()
    save_pretrained(model, tmp_path)
    assert bits(from_pretrained(tmp_path)) == bits(model)
    files = {file.name for file in tmp_path.iterdir()}
    assert files - {"generation_config.json"} == {
        "config.json", "gblr.json", "gblr_buffers.safetensors", "model.safetensors"
    }  # fmt: skip


def test_a_save_that_fails_leaves_the_checkpoint_that_was_there(tmp_path, monkeypatch):
    model = converted_small()
    save_pretrained(model, tmp_path)

    def fail(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr("gblr.conversion.tensor_files.save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        save_pretrained(small(), tmp_path)
    assert bits(load_(small(), tmp_path)) == bits(model)
    assert sorted(os.listdir(tmp_path)) == ["gblr.json", "model.safetensors"]


def test_all_files_can_be_read_by_whom_the_system_lets(tmp_path):
    save_pretrained(converted.converted_bert(), tmp_path)
    (tmp_path / "plain").touch()
    assert len({file.stat().st_mode for file in tmp_path.iterdir()}) == 1


def test_dense_layers_of_a_checkpoint_are_what_transformers_reads(tmp_path):
    """Files, names and metadata are transformers' own; converted layers are those it reports as missing."""
    model = converted.bert()
    save_pretrained(model, tmp_path)
    assert bits(AutoModel.from_pretrained(tmp_path)) == bits(model)


@pytest.mark.parametrize("make", TRANSFORMERS, **by_name)
def test_transformers_own_save_pretrained_keeps_the_tensors(make, tmp_path):
    model = make()
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert len(stored) >= len(model.state_dict()) - 1
    with pytest.raises(CheckpointError, match=r"gblr\.json"):
        from_pretrained(tmp_path)


def test_models_that_only_their_author_can_build_are_sent_to_load(tmp_path):
    save_pretrained(converted_small(), tmp_path)
    with pytest.raises(ValueError, match=r"gblr\.load_"):
        from_pretrained(tmp_path)


def test_places_and_widths_take_two_bytes_and_come_back_as_they_were(tmp_path):
    model = converted_small()
    model.register_buffer("steps", torch.tensor([1, 2, 3]))
    save_pretrained(model, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    structure = [name for name in stored if ".structure_" in name]
    assert len(structure) == 4 and all(stored[name].dtype == torch.int16 for name in structure)
    assert stored["steps"].dtype == torch.int64  # not ours: as transformers would read it
    other = small()
    other.register_buffer("steps", torch.zeros(3, dtype=torch.int64))
    assert bits(load_(other, tmp_path)) == bits(model)


@pytest.mark.parametrize(("highest", "dtype"), [(2**15 - 1, "int16"), (2**15, "int32"), (2**31, "int64")])
def test_whole_numbers_take_the_bytes_they_need(highest, dtype, tmp_path):
    values = {"layer.n": torch.tensor([0, highest]), "layer.none": torch.tensor([], dtype=torch.int64)}
    records = write_tensors(values, tmp_path, "t.safetensors", 1000, narrow=("layer",))
    assert str(load_file(tmp_path / "t.safetensors")["layer.n"].dtype) == f"torch.{dtype}"
    found = read_tensors(tmp_path, records)
    assert all(torch.equal(found[n], values[n]) and found[n].dtype == torch.int64 for n in values)


def test_whole_numbers_of_another_size_than_recorded_are_refused(tmp_path):
    save_pretrained(converted_small(), tmp_path)
    name = "0.structure_row_width"
    edit_tensors(tmp_path, lambda tensors: tensors.update({name: tensors[name].to(torch.int32)}))
    assert_refused(small(), tmp_path, name, "int16", "int32")


def test_a_truncated_file_is_refused(tmp_path):
    save_pretrained(converted_small(), tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    assert_refused(small(), tmp_path, "model.safetensors", "truncated")


def test_a_directory_that_is_not_there_is_told_as_such(tmp_path):
    for load in (gblr.from_pretrained, lambda path: gblr.load_(small(), path)):
        with pytest.raises(CheckpointError, match=r"there is no directory .*nowhere"):
            load(tmp_path / "nowhere")


def test_a_missing_file_is_refused(tmp_path):
    save_pretrained(converted_small(), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert_refused(small(), tmp_path, "model.safetensors", "missing")


def test_a_changed_number_is_refused(tmp_path):
    save_pretrained(converted_small(), tmp_path)
    edit_tensors(tmp_path, lambda tensors: tensors["0.u"].flatten()[3].neg_())
    assert_refused(small(), tmp_path, "'0.u'", "checksum")


def test_a_changed_shape_is_refused_by_name_with_both_shapes(tmp_path):
    save_pretrained(converted_small(), tmp_path)
    edit_tensors(tmp_path, lambda tensors: tensors.update({"2.weight": torch.zeros(8, 15)}))
    assert_refused(small(), tmp_path, "'2.weight'", "(8, 16)", "(8, 15)")


def test_a_changed_dtype_is_refused_by_name_with_both_dtypes(tmp_path):
    save_pretrained(converted_small(), tmp_path)
    edit_tensors(tmp_path, lambda tensors: tensors.update({"2.bias": tensors["2.bias"].half()}))
    assert_refused(small(), tmp_path, "'2.bias'", "float32", "float16")


def test_missing_and_unexpected_tensors_are_refused_by_name(tmp_path):
    save_pretrained(converted_small(), tmp_path)
    edit_tensors(tmp_path, lambda tensors: tensors.update(extra=tensors.pop("2.bias")))
    assert_refused(small(), tmp_path, "'2.bias'", "'extra'")


def test_an_unknown_format_version_is_refused(tmp_path):
    save_pretrained(converted_small(), tmp_path)
    edit_manifest(tmp_path, lambda manifest: manifest.update(format_version=99))
    assert_refused(small(), tmp_path, "99", "Update gblr")


@pytest.mark.parametrize("key", ["layers", "tensors", "aliases"])
def test_a_damaged_manifest_is_refused(key, tmp_path):
    save_pretrained(converted_small(), tmp_path)
    edit_manifest(tmp_path, lambda manifest: manifest.pop(key))
    assert_refused(small(), tmp_path, "damaged", key)
    (tmp_path / "gblr.json").write_text("{")
    assert_refused(small(), tmp_path, "damaged")


def test_damage_inside_a_layer_of_the_manifest_is_refused(tmp_path):
    save_pretrained(converted_small(), tmp_path)
    edit_manifest(tmp_path, lambda manifest: manifest["layers"]["0"]["matrix"].pop("block_rank"))
    assert_refused(small(), tmp_path, "damaged", "block_rank")


def test_unknown_formats_and_classes_are_refused(tmp_path):
    save_pretrained(converted_small(), tmp_path)
    edit_manifest(tmp_path, lambda manifest: manifest["layers"]["0"]["matrix"].update(format="Unheard"))
    assert_refused(small(), tmp_path, "'0'", "Unheard")


def test_files_outside_the_directory_are_refused(tmp_path):
    save_pretrained(converted_small(), tmp_path / "a")
    edit_manifest(tmp_path / "a", lambda m: m["tensors"]["2.bias"].update(file="../model.safetensors"))
    assert_refused(small(), tmp_path / "a", "../model.safetensors")


def test_a_structure_that_makes_no_matrix_is_refused(tmp_path):
    """Tensors and manifest agree with each other; the numbers do not."""
    model = converted_small()
    with torch.no_grad():
        model[0].structure_row_width[0] += 1
    save_pretrained(model, tmp_path)
    assert_refused(small(), tmp_path, "'0'", "sum of widths")
    assert_refused(converted_small(), tmp_path, "'0'", "sum of widths")


def test_a_sigma_that_makes_no_mask_is_refused(tmp_path):
    model = nn.Sequential(GaudiLinear(4, 4))
    model[0].sigma.fill_(-1.0)
    save_pretrained(model, tmp_path)
    assert_refused(nn.Sequential(GaudiLinear(4, 4)), tmp_path, "'0'", "sigma")


def test_another_model_is_refused_with_what_does_not_fit(tmp_path):
    save_pretrained(converted_small(), tmp_path)
    assert_refused(
        nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 8)), tmp_path, "'0'", "(16, 12)", "(20, 12)"
    )
    assert_refused(nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 9)), tmp_path, "'2.weight'", "(9, 16)")
    assert_refused(nn.Sequential(nn.Identity(), nn.ReLU(), nn.Linear(16, 8)), tmp_path, "'0'", "Identity")
    assert_refused(nn.ModuleDict({"a": nn.Linear(12, 16)}), tmp_path, "'0'", "no module of this name")
    assert_refused(nn.Sequential(*small(), nn.Linear(8, 8)), tmp_path, "'3.weight'", "not in the checkpoint")


def test_a_model_of_another_dtype_is_refused_with_the_remedy(tmp_path):
    save_pretrained(converted_small().bfloat16(), tmp_path)
    assert_refused(small(), tmp_path, "'2.weight'", "float32", ".to(torch.bfloat16)")


def test_a_convolution_of_another_geometry_is_refused(tmp_path):
    model = converted.converted_resnet()
    save_pretrained(model, tmp_path)
    target = converted.resnet()
    name = next(iter(json.loads((tmp_path / "gblr.json").read_text())["layers"]))
    target.get_submodule(name).stride = (3, 3)
    assert_refused(target, tmp_path, name, "stride")


def test_a_model_without_values_or_with_unknown_layers_is_not_saved(tmp_path):
    class Own(StructuredLinear):
        pass

    with pytest.raises(ValueError, match=r"'weight'.*meta"):
        save_pretrained(nn.Linear(2, 2, device="meta"), tmp_path)
    with pytest.raises(ValueError, match="Own"):
        save_pretrained(nn.Sequential(Own(low_rank(4, 4))), tmp_path)
    assert not list(tmp_path.iterdir())


def test_saving_leaves_the_model_as_it_was(tmp_path):
    model = converted.converted_llama()
    before, config = bits(model), copy.deepcopy(model.config.to_dict())
    save_pretrained(model, tmp_path)
    assert bits(model) == before and model.config.to_dict() == config


def test_a_source_tree_that_was_never_installed_saves_too(tmp_path, monkeypatch):
    def not_installed(name):
        raise importlib.metadata.PackageNotFoundError(name)

    save_pretrained(small(), tmp_path / "installed")
    monkeypatch.setattr(importlib.metadata, "version", not_installed)
    save_pretrained(small(), tmp_path / "bare")
    names = [
        json.loads((tmp_path / name / "gblr.json").read_text())["library_version"] for name in ("installed", "bare")
    ]
    assert names == [gblr.__version__, "unknown"]


def test_another_process_computes_the_same_bits(tmp_path):
    model = converted.converted_llama()
    save_pretrained(model, tmp_path / "model")
    code = """
import sys, torch
from gblr.conversion.checkpoint import from_pretrained
with torch.no_grad():
    torch.set_num_threads(1)
    y = from_pretrained(sys.argv[1])(torch.arange(14).view(2, 7))[0]
from safetensors.torch import save_file
save_file({"y": y.contiguous()}, sys.argv[2])
"""
    subprocess.run([sys.executable, "-c", code, tmp_path / "model", tmp_path / "y"], check=True, capture_output=True)
    assert torch.equal(load_file(tmp_path / "y")["y"], output(model))


def test_a_full_disk_is_an_error_of_the_disk(tmp_path):
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, before[1]))  # a file of more bytes is refused, as on a full disk
    try:
        with pytest.raises(OSError, match=r"model.safetensors cannot be written: .*Make room on the disk"):
            save_pretrained(nn.Linear(64, 64), tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

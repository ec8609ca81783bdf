"""Exported files run in onnxruntime from plain operators, give torch's outputs, and are as small as their cost."""

import importlib.util

import onnx
import onnxruntime
import pytest
import torch
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    ResNetConfig,
    ResNetForImageClassification,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from gblr.conversion.convert import convert_
from gblr.conversion.export_onnx import export_onnx
from gblr.conversion.filters import conv_layers, linear_layers
from gblr.conversion.harden import harden_
from gblr.fitting.config import GaudiConfig
from gblr.layers.conv import ConvGeometry, StructuredConv2d
from gblr.layers.gaudi import GaudiLinear, GaudiModule
from gblr.layers.split import SplitLinear
from gblr.layers.structured import StructuredLinear
from gblr.matrices.blast import BlastMatrix
from gblr.matrices.low_rank import LowRankMatrix
from gblr.matrices.monarch import MonarchMatrix
from gblr.matrices.packed import PackedGBLR
from gblr.matrices.structure import Structure
from gblr.models.vit import ViT
from tests.conversion.converted import pixelfly
from tests.helpers import raises_value_error
from tests.shape_hook import shapes_unchecked

IMAGES = torch.linspace(-1, 1, 2 * 3 * 16 * 16).sin().view(2, 3, 16, 16)
TOKENS = torch.arange(14).view(2, 7)


def hardened(model: nn.Module, where=None, relative_cost: float = 0.2) -> nn.Module:
    """Converted to random blocks at random places. Few layers each: torch's exporter takes 20 ms for an operator."""
    convert_(model, GaudiConfig(relative_cost, init="scratch", block_rank=2), where=where)
    for layer in model.modules():
        if isinstance(layer, GaudiModule):
            with torch.no_grad():
                layer.location_frac.uniform_(0, 0.99)
    harden_(model)
    return model.eval()


def vit() -> nn.Module:
    config = ViTConfig(
        num_hidden_layers=1, hidden_size=64, num_attention_heads=2, intermediate_size=128, image_size=16, patch_size=4
    )
    return hardened(ViTForImageClassification(config), linear_layers(include=("fc1", "fc2")))


def own_vit() -> nn.Module:
    model = ViT(image_size=16, patch_size=4, width=64, depth=1, num_heads=2)
    return hardened(model, linear_layers(include=("query", "out")))


def gpt2() -> nn.Module:
    config = GPT2Config(
        n_layer=1, n_embd=64, n_head=2, vocab_size=50, n_positions=16, use_cache=False, bos_token_id=0, eos_token_id=0
    )
    return hardened(GPT2LMHeadModel(config), linear_layers(include=("c_attn",)))


def resnet() -> nn.Module:
    config = ResNetConfig(embedding_size=8, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic")
    return hardened(ResNetForImageClassification(config), conv_layers(exclude=("embedder",)), 0.3)


def random_packed(out_features: int, in_features: int, num_blocks: int, generator, rank: int = 1) -> PackedGBLR:
    """Narrow and full blocks; some wrap around."""
    fields = []
    for length in (out_features, in_features):
        width = torch.randint(1, max(2, length // 4), (num_blocks,), generator=generator)
        width[: num_blocks // 4] = length
        fields += [width, torch.randint(0, length, (num_blocks,), generator=generator)]
    sizes = (rank * int(width.sum()) for width in fields[::2])
    u, v = (torch.randn(size, generator=generator) for size in sizes)
    return PackedGBLR(Structure(*fields), u, v, rank, (out_features, in_features))


def export(model, inputs, path, **options):
    with shapes_unchecked():
        return export_onnx(model, inputs, path, **options)


def run(path, *inputs):
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    outputs = session.run(None, {name: x.numpy() for name, x in zip(names, inputs, strict=True)})
    return torch.as_tensor(outputs[0])


def assert_same(actual, expected):
    assert actual.shape == expected.shape
    assert float((actual - expected).abs().max()) <= 1e-4 * float(expected.abs().max().clamp(min=1e-6))


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


WHOLE = {vit: (IMAGES, False), own_vit: (IMAGES, True), gpt2: (TOKENS, False), resnet: (IMAGES, False)}


@pytest.mark.parametrize("make", WHOLE, ids=lambda make: make.__name__)
def test_whole_models_give_the_same_outputs_at_any_batch_size(make, tmp_path):
    (inputs, compose), model, path = WHOLE[make], make(), tmp_path / "model.onnx"
    report = export(model, (inputs,), path, compose=compose)
    assert report.difference <= 1e-4
    file = onnx.load(path)
    onnx.checker.check_model(file, full_check=True)
    assert {opset.domain for opset in file.opset_import} == {""} and not file.functions
    for batch in (torch.cat([inputs, inputs.flip(0)])[:n] for n in (1, 3)):
        with torch.no_grad(), shapes_unchecked():
            output = model(batch)
        assert_same(run(path, batch), output if isinstance(output, torch.Tensor) else output[0])


def test_the_file_is_as_small_as_the_cost(tmp_path, generator):
    """Not dense, not at full length, and without notes of the exporter."""
    x = torch.randn(2, 256)
    dense = export(nn.Linear(256, 512), (x,), tmp_path / "dense.onnx", check=False)
    matrix = random_packed(512, 256, 120, generator)
    model = nn.Sequential(StructuredLinear(matrix, torch.randn(512)))
    cost = matrix.relative_cost * dense.num_bytes
    assert cost < 0.35 * dense.num_bytes
    composed = export(model, (x,), tmp_path / "composed.onnx")
    assert composed.num_bytes < 1.1 * cost + 5_000
    tiled = export(model, (x,), tmp_path / "tiled.onnx", compose=False)
    assert tiled.num_bytes < 1.4 * cost + 10_000  # with indices
    loose = export(model, (x,), tmp_path / "loose.onnx", compose=False, max_padding=3.0)
    assert loose.num_operators < tiled.num_operators and loose.num_bytes > tiled.num_bytes


def test_composed_layers_are_one_product_once_loaded(tmp_path, generator):
    """Or each run would compose them again."""
    x = torch.randn(2, 256)
    model = StructuredLinear(random_packed(512, 256, 100, generator), torch.randn(512))
    export(model, (x,), tmp_path / "model.onnx")
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "loaded.onnx")
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    onnxruntime.InferenceSession(str(tmp_path / "model.onnx"), options, providers=["CPUExecutionProvider"])
    assert [node.op_type for node in onnx.load(tmp_path / "loaded.onnx").graph.node] == ["Gemm"]


class Layers(nn.Module):
    """Each layer on the same input."""

    def __init__(self, *layers: nn.Module):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        return tuple(layer(x) for layer in self.layers)


@pytest.mark.parametrize("compose", [False, True])
def test_awkward_structures(compose, tmp_path, generator):
    """No block at all, one that wraps around, full ones; axes that no tile divides; vectors in several axes."""
    none = torch.zeros(0, dtype=torch.long)
    empty = PackedGBLR(Structure(none, none, none, none), torch.zeros(0), torch.zeros(0), 2, (30, 37))
    one = PackedGBLR(Structure(*map(torch.tensor, ([5], [88], [9], [33]))), torch.randn(5), torch.randn(9), 1, (91, 37))
    matrices = [empty, one, random_packed(101, 37, 8, generator)]
    model = Layers(*(StructuredLinear(matrix, torch.randn(matrix.shape[0])) for matrix in matrices))
    report = export(model, (torch.randn(2, 3, 37, generator=generator),), tmp_path / "model.onnx", compose=compose)
    assert report.difference <= 1e-5 and len(report.outputs) == 3


@pytest.mark.parametrize("compose", [False, True])
@pytest.mark.filterwarnings("ignore:Using padding='same'")
def test_convolutions_keep_their_geometry(compose, tmp_path, generator):
    geometries = [
        ConvGeometry(12, (3, 3), (2, 1), (1, 1), padding_mode="circular"),
        ConvGeometry(12, (3, 2), (1, 1), "same", (2, 1)),
    ]
    layers = [StructuredConv2d(random_packed(40, g.in_features, 6, generator), g, torch.randn(40)) for g in geometries]
    layers += [StructuredConv2d(LowRankMatrix(torch.randn(3, 40), torch.randn(3, 108)), geometries[0])]
    report = export(Layers(*layers), (torch.randn(2, 12, 9, 8),), tmp_path / "model.onnx", compose=compose)
    assert report.difference <= 1e-5 and "Conv" in report.operators


def test_other_formats_are_exported_too(tmp_path):
    matrices = [
        LowRankMatrix(torch.randn(3, 32), torch.randn(3, 32)),
        MonarchMatrix(torch.randn(2, 16, 8), torch.randn(2, 8, 16)),
        BlastMatrix(torch.randn(2, 16, 3), torch.randn(2, 16, 3), torch.randn(2, 2, 3)),
        pixelfly(32, 32),
    ]
    model = SplitLinear([StructuredLinear(matrix) for matrix in matrices])
    assert export(model, (torch.randn(2, 5, 32),), tmp_path / "model.onnx").difference <= 1e-5


def test_the_model_is_not_changed(tmp_path, generator):
    model = nn.Sequential(StructuredLinear(random_packed(64, 48, 10, generator)), nn.BatchNorm1d(64), nn.Dropout())
    model.train()
    model[1].eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modules = [(name, id(module), module.training) for name, module in model.named_modules()]
    export(model, (torch.randn(3, 48),), tmp_path / "model.onnx")
    assert [(name, id(module), module.training) for name, module in model.named_modules()] == modules
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_one_example_gives_a_dynamic_batch_and_shapes_can_be_chosen(tmp_path):
    path, model = tmp_path / "model.onnx", nn.Linear(8, 4)
    report = export(model, (torch.randn(1, 8),), path)
    assert run(path, torch.randn(5, 8)).shape == (5, 4)
    assert report.inputs == ("input",) and report.outputs == ("output",) and report.path == path
    assert "operators of opset" in str(report) and "off torch" in str(report)
    export(model, (torch.randn(2, 6, 8),), path, dynamic_shapes=({1: "length"},))
    assert run(path, torch.randn(2, 9, 8)).shape == (2, 9, 4)
    with pytest.raises(Exception, match="INVALID_ARGUMENT"):
        run(path, torch.randn(3, 9, 8))


def test_large_weights_go_to_a_file_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr("gblr.conversion.onnx_file.MAX_FILE_BYTES", 10_000)
    path = tmp_path / "model.onnx"
    report = export(nn.Linear(64, 64), (torch.randn(2, 64),), path)
    files = sorted(file.name for file in tmp_path.iterdir())
    assert files == ["model.onnx", "model.onnx.data"]
    assert report.num_bytes == sum(file.stat().st_size for file in tmp_path.iterdir()) > 64 * 64 * 4
    assert run(path, torch.randn(3, 64)).shape == (3, 64)


def test_layers_that_still_learn_are_refused(tmp_path):
    model = nn.Sequential(nn.Linear(8, 8), GaudiLinear(8, 8))
    with raises_value_error("'1'", "`gblr.harden_(model)`"):
        export_onnx(model, (torch.randn(2, 8),), tmp_path / "model.onnx")


class Pair(nn.Module):
    """As transformers' models: named arguments, most of them left out."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(9, 16), nn.Linear(16, 16)

    def forward(self, ids, scale=None, mask=None, **more):
        y = self.layer(self.table(ids))
        y = y if scale is None else y * scale
        return y if mask is None else y * mask[..., None]


@pytest.mark.parametrize("dynamic", [False, True])
def test_inputs_are_named_as_a_tokenizer_names_them(dynamic, tmp_path):
    model = hardened(Pair(), linear_layers(include=("layer",)))
    named = {"mask": torch.rand(3, 5), "ids": torch.randint(0, 9, (3, 5))}
    shapes = {name: {0: "batch", 1: "length"} for name in named} if dynamic else None
    written = export(model, named, tmp_path / "model.onnx", dynamic_shapes=shapes)
    assert written.inputs == ("ids", "mask") and written.difference is not None
    other = {"ids": torch.randint(0, 9, (4, 7 if dynamic else 5)), "mask": torch.rand(4, 7 if dynamic else 5)}
    with shapes_unchecked(), torch.no_grad():
        expected = model(**other)
    assert_same(run(tmp_path / "model.onnx", other["ids"], other["mask"]), expected)


def test_a_single_tensor_needs_no_tuple(tmp_path):
    model = nn.Linear(8, 8)
    assert export(model, torch.randn(2, 8), tmp_path / "model.onnx").inputs == ("input",)


class Strange(nn.Module):
    def forward(self, x):
        return {"y": x, "cache": object()}


def test_caches_are_left_out_wherever_a_model_keeps_its_config(tmp_path):
    """The decoder of T5 has one of its own, and `model.config.use_cache = False` does not reach it."""
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4, "vocab_size": 50}
    model = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0)).eval()
    tokens = torch.randint(0, 50, (2, 7))
    file = export(model, {"input_ids": tokens, "decoder_input_ids": tokens[:, :4]}, tmp_path / "t5.onnx")
    assert file.outputs == ("logits", "encoder_last_hidden_state")
    assert model.config.use_cache and model.decoder.config.use_cache


def test_a_compiled_model_is_exported_as_what_it_wraps(tmp_path):
    model = hardened(nn.Sequential(nn.Linear(64, 64), nn.ReLU()))
    x = torch.randn(2, 64)
    export(torch.compile(model, backend="eager"), x, tmp_path / "model.onnx")
    assert_same(run(tmp_path / "model.onnx", x), model(x))


def test_wrong_arguments_are_named(tmp_path):
    path, x = tmp_path / "model.onnx", torch.randn(2, 8)
    with shapes_unchecked():
        for wrong, told in (([x], "got a list"), ({}, "got an empty dict"), (None, "got a NoneType")):
            with pytest.raises(TypeError, match=f"must be a tuple .* {told}"):
                export_onnx(nn.Linear(8, 8), wrong, path)
        with pytest.raises(FileNotFoundError, match="does not exist"):
            export_onnx(nn.Linear(8, 8), (x,), tmp_path / "none" / "model.onnx")
        with pytest.raises(IsADirectoryError, match="got a folder"):
            export_onnx(nn.Linear(8, 8), (x,), tmp_path)
    with raises_value_error("images", "it has input", "export a module"):
        export_onnx(nn.Linear(8, 8), {"images": x}, path)
    with raises_value_error("`max_padding`", 0.5):
        export_onnx(nn.Linear(8, 8), (x,), path, max_padding=0.5)
    with raises_value_error("the model", "torch.bfloat16", "float32"):
        export_onnx(nn.Linear(8, 8).bfloat16(), (x.bfloat16(),), path)
    with raises_value_error("`example_inputs`", "torch.float64"):
        export_onnx(nn.Linear(8, 8), (x.double(),), path)
    with raises_value_error("meta"):
        export_onnx(nn.Linear(8, 8, device="meta"), (x,), path)
    with raises_value_error("object", "`model.config.use_cache = False`"):
        export_onnx(Strange(), (x,), path)
    assert not list(tmp_path.iterdir())


def test_missing_packages_are_named(tmp_path, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name.startswith("onnx") else found(name))
    with pytest.raises(ImportError, match=r"onnx and onnxscript: pip install 'gblr\[onnx\]'"):
        export_onnx(nn.Linear(8, 8), (torch.randn(2, 8),), tmp_path / "model.onnx")


def test_without_onnxruntime_nothing_is_compared(tmp_path, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "onnxruntime" else found(name))
    report = export(nn.Linear(8, 8), (torch.randn(2, 8),), tmp_path / "model.onnx")
    assert report.difference is None and "not checked" in str(report)


class Cancelling(nn.Module):
    """Exact on paper: large numbers that leave small ones, as stiff factors do."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        large = 3e4 * self.linear(x)
        return self.linear(x) + large - 3e4 * (self.linear.weight @ x.mT).mT - 3e4 * self.linear.bias


def test_what_rounding_does_to_torch_itself_is_no_error_of_the_file(tmp_path, monkeypatch):
    torch.manual_seed(0)
    samples = (torch.randn(8, 64),)
    report = export(Cancelling(), samples, tmp_path / "model.onnx")
    assert report.difference > 1e-4
    monkeypatch.setattr("gblr.conversion.onnx_check._rounding", lambda model, samples: 0.0)
    with pytest.raises(RuntimeError, match="expected 1e-04 at most"):
        export(Cancelling(), samples, tmp_path / "model.onnx")


def test_an_error_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "model.onnx"
    path.write_text("old")
    monkeypatch.setattr("gblr.conversion.onnx_check.TOLERANCE", -1.0)
    with pytest.raises(RuntimeError, match="differ from torch's"):
        export(nn.Linear(8, 8), (torch.randn(2, 8),), path)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]

"""Packed blocks on a CUDA device: kernels, operator, layers. Run with `pytest -m gpu`."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import gblr
from gblr.layers.structured import StructuredLinear
from gblr.matrices.packed import PackedGBLR
from gblr.ops.block_matmul import gpu, tiling
from tests.ops.packed_blocks import STYLES, assert_is_tiled_product, poison_new_empty, random_packed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def unwritten_is_nan(monkeypatch):
    poison_new_empty(monkeypatch)


def product(matrix: PackedGBLR, x: Tensor, bias: Tensor | None, activation: str = "") -> Tensor:
    s = matrix.structure
    sides = (s.row_width, s.row_location, s.col_width, s.col_location)
    index, sizes = tiling.tile_blocks(*sides, matrix.block_rank, matrix.shape)
    return gpu.tile_matmul(x, tiling.pack(*matrix.factors(), index, sizes), index, bias, sizes, activation)


SHAPES = [
    (1, 1, 1, 1), (70, 50, 40, 1), (200, 130, 150, 1), (768, 3072, 300, 1), (129, 190, 5, 16), (512, 200, 9, 32),
    (100, 300, 3, 64), (1024, 768, 12, 64), (300, 256, 2, 128),
]  # fmt: skip


def check(shape: tuple[int, ...], style: str, dtype: torch.dtype, many: tuple[int, ...], bias: bool = True) -> None:
    out_features, in_features, num_blocks, block_rank = shape
    matrix = random_packed(out_features, in_features, num_blocks, block_rank, style=style).to(dtype).to("cuda")
    for tokens in many:
        x = torch.randn(tokens, in_features).to(dtype).cuda()
        added = torch.randn(out_features).to(dtype).cuda() if bias else None
        assert_is_tiled_product(product(matrix, x, added), matrix, x, added)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_product_is_that_of_the_dense_matrix(unwritten_is_nan, shape, style):
    check(shape, style, torch.bfloat16, (1, 2, 16, 17, 64, 65, 300, 1100))


@pytest.mark.parametrize("shape", SHAPES[2::3], ids=str)  # each dtype is compiled anew, seconds every time
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes_are_as_exact_as_they_can_be(unwritten_is_nan, shape, dtype):
    check(shape, "random", dtype, (1, 9, 300), bias=False)


@pytest.mark.parametrize("block_rank", [1, 64])
@pytest.mark.parametrize("tokens", [1, 16, 500])
def test_strided_and_misaligned_inputs_are_read_correctly(block_rank, tokens):
    matrix = random_packed(300, 192, 256 // block_rank, block_rank).to(torch.bfloat16).to("cuda")
    wide = torch.randn(tokens, 2, 200, device="cuda", dtype=torch.bfloat16)
    for x in (wide[:, 0, :192], wide[:, 1, 3:195], wide[:, 0, :192].T.contiguous().T):
        assert_is_tiled_product(product(matrix, x, None), matrix, x, None)


@pytest.mark.parametrize("activation", gpu.ACTIVATIONS)
@pytest.mark.parametrize("tokens", [1, 9, 200])
def test_activations_are_torchs(activation, tokens):
    matrix = random_packed(200, 130, 50).to("cuda")
    x, bias = torch.randn(tokens, 130, device="cuda") / 11, torch.randn(200, device="cuda")
    expected = gpu._activated(functional.linear(x, matrix.to_dense(), bias), activation)
    torch.testing.assert_close(product(matrix, x, bias, activation), expected, rtol=1e-4, atol=1e-4)


def test_every_run_gives_the_same_bits():
    matrix = random_packed(700, 500, 400).to(torch.bfloat16).to("cuda")
    for tokens in (1, 8, 900):
        x = torch.randn(tokens, 500, device="cuda", dtype=torch.bfloat16)
        first = product(matrix, x, None)
        assert all(torch.equal(product(matrix, x, None), first) for _ in range(5))


def test_gradients_agree_with_the_cpus():
    matrix = random_packed(200, 130, 60)
    x, bias, upstream = torch.randn(40, 130), torch.randn(200), torch.randn(40, 200)
    found = []
    for device in ("cpu", "cuda"):
        leaves = [t.to(device).detach().clone().requires_grad_() for t in (x, bias)]
        product(matrix.to(device), *leaves, "gelu").backward(upstream.to(device))
        found.append([leaf.grad.cpu() for leaf in leaves])
    for on_cpu, on_gpu in zip(*found, strict=True):
        torch.testing.assert_close(on_gpu, on_cpu, rtol=1e-3, atol=1e-3)


# layers


def packed_layer(dtype=torch.bfloat16, block_rank=1, **kwargs) -> StructuredLinear:
    matrix = random_packed(320, 256, 256 // block_rank, block_rank, **kwargs)
    layer = StructuredLinear(matrix, torch.randn(320)).eval().requires_grad_(False).to("cuda", dtype)
    layer.planned = "packed"
    layer.prepare()
    assert layer.form == "packed"
    return layer


@pytest.mark.parametrize("block_rank", [1, 16, 64])
def test_layers_multiply_by_the_kernels_in_any_shape(block_rank):
    layer = packed_layer(block_rank=block_rank)
    for shape in ((256,), (5, 256), (2, 30, 256), (0, 256), (3, 1, 2, 256)):
        x = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        y = layer(x)
        assert y.shape == (*shape[:-1], 320)
        assert_is_tiled_product(y.reshape(-1, 320), layer.matrix, x.reshape(-1, 256), layer.bias)


@pytest.mark.parametrize("tokens", [1, 16, 300])
def test_layers_can_be_captured_and_compiled(tokens):
    layer = packed_layer()
    x = torch.randn(tokens, 256, device="cuda", dtype=torch.bfloat16)
    expected = layer(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x)
    y.zero_()
    graph.replay()
    assert torch.equal(y, expected)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
    for _ in range(4):
        assert torch.equal(compiled(x), expected)


def test_layers_train_on_a_gpu_as_on_a_cpu():
    layer = packed_layer(torch.float32).requires_grad_().train()
    other = copy.deepcopy(layer).cpu()
    x = torch.randn(50, 256)
    for each, inputs in ((layer, x.cuda()), (other, x)):
        optimizer = torch.optim.SGD(each.parameters(), lr=1e-3)
        for _ in range(3):
            optimizer.zero_grad()
            each(inputs).square().mean().backward()
            optimizer.step()
    for (name, found), expected in zip(layer.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-3, atol=1e-4, msg=name)
    layer.eval()
    x = x.cuda()
    with torch.no_grad():
        assert_is_tiled_product(layer(x), layer.matrix, x, layer.bias)  # the new contents are packed


def test_frozen_layers_let_gradients_through():
    layer = packed_layer(torch.float32)
    x = torch.randn(20, 256, device="cuda", requires_grad=True)
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad, layer.matrix.to_dense().sum(0).expand(20, 256), rtol=1e-3, atol=1e-3)


def test_autocast_reaches_the_kernels():
    layer = packed_layer(torch.float32)
    x = torch.randn(100, 256, device="cuda")
    with torch.autocast("cuda", torch.bfloat16), torch.no_grad():
        y = layer(x)
    assert y.dtype == torch.bfloat16
    exact = layer(x)
    assert (y - exact).norm() < 0.01 * exact.norm()


@pytest.mark.parametrize("captured", [False, True])
def test_the_planner_measures_all_forms_and_keeps_the_fastest(captured):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4096, 4096), nn.Linear(4096, 4096)).to("cuda", torch.bfloat16)
    blocks = 64
    widths, places = torch.full((blocks,), 512), torch.arange(blocks) * 64
    structure = gblr.Structure(widths, places, widths, places)
    u, v = (torch.randn(64 * blocks * 512, device="cuda", dtype=torch.bfloat16) / 64 for _ in range(2))
    for name in ("0", "1"):
        model.set_submodule(name, StructuredLinear(PackedGBLR(structure, u, v, 64, (4096, 4096)).to("cuda")))
    report = gblr.harden_(model, torch.randn(8192, 4096, device="cuda", dtype=torch.bfloat16), captured=captured)
    for row in report.rows:
        assert set(row.form_seconds) == {"packed", "factors", "dense"}
        assert row.form_seconds[row.form] == min(row.form_seconds.values())

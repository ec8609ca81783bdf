"""The GPU kernels of block_matmul without a GPU: run by Triton's interpreter, and compiled for Ampere and Hopper."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from gblr.matrices.packed import PackedGBLR
from gblr.ops.block_matmul import tiling
from tests.helpers import raises_value_error
from tests.ops.interpreted import interpreted_kernels
from tests.ops.packed_blocks import STYLES, assert_is_tiled_product, poison_new_empty, random_packed

pytest.importorskip("triton")


@pytest.fixture(scope="module")
def interpreted():
    return interpreted_kernels("block_matmul")


@pytest.fixture
def unwritten_is_nan(monkeypatch):
    poison_new_empty(monkeypatch)


def tiled(matrix: PackedGBLR) -> tuple[Tensor, tiling.Sizes]:
    s = matrix.structure
    sides = (s.row_width, s.row_location, s.col_width, s.col_location)
    return tiling.tile_blocks(*sides, matrix.block_rank, matrix.shape)


def product(interpreted, matrix: PackedGBLR, x: Tensor, bias: Tensor | None, activation: str = "") -> Tensor:
    index, sizes = tiled(matrix)
    values = tiling.pack(*matrix.factors(), index, sizes)
    return interpreted.tile_matmul(x, values, index, bias, sizes, activation)


SHAPES = [(1, 1, 1, 1), (70, 50, 40, 1), (200, 130, 150, 1), (64, 64, 64, 1), (129, 190, 5, 16), (100, 300, 3, 64)]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(("out_features", "in_features", "num_blocks", "block_rank"), SHAPES)
@pytest.mark.parametrize("tokens", [1, 16, 40])
def test_the_product_is_that_of_the_dense_matrix(
    interpreted, unwritten_is_nan, out_features, in_features, num_blocks, block_rank, style, tokens, generator
):
    matrix = random_packed(out_features, in_features, num_blocks, block_rank, style=style)
    x, bias = torch.randn(tokens, in_features, generator=generator), torch.randn(out_features, generator=generator)
    assert_is_tiled_product(product(interpreted, matrix, x, bias), matrix, x, bias)


# The interpreter's products of bfloat16 are wrong (it keeps them as whole numbers); tests/gpu has those.
@pytest.mark.parametrize(
    ("dtype", "tokens"), [(torch.bfloat16, 1), (torch.float16, 1), (torch.float16, 3), (torch.float16, 90)]
)
@pytest.mark.parametrize("block_rank", [1, 64])
def test_half_precision_rounds_twice_and_no_more(interpreted, unwritten_is_nan, dtype, tokens, block_rank, generator):
    matrix = random_packed(150, 200, 128 // block_rank, block_rank).to(dtype)
    x = torch.randn(tokens, 200, generator=generator).to(dtype)
    assert_is_tiled_product(product(interpreted, matrix, x, None), matrix, x, None)


@pytest.mark.parametrize("num_blocks", [0, 3])
@pytest.mark.parametrize("tokens", [0, 1, 20])
def test_without_live_blocks_the_bias_is_left(interpreted, unwritten_is_nan, num_blocks, tokens):
    matrix = random_packed(70, 50, num_blocks, style="dead")
    y = product(interpreted, matrix, torch.ones(tokens, 50), torch.arange(70.0))
    assert torch.equal(y, torch.arange(70.0).expand(tokens, 70)) and tiled(matrix)[1].column_entries == 0


ACTIVATIONS = {
    "relu": functional.relu,
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("tokens", [2, 30])
def test_the_activation_comes_after_the_bias(interpreted, name, tokens, generator):
    matrix = random_packed(70, 90, 20)
    x, bias = torch.randn(tokens, 90, generator=generator) / 9, torch.randn(70, generator=generator)
    expected = ACTIVATIONS[name](functional.linear(x, matrix.to_dense(), bias))
    torch.testing.assert_close(product(interpreted, matrix, x, bias, name), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("block_rank", "in_features"), [(1, 200), (64, 192), (64, 203)])
@pytest.mark.parametrize("tokens", [20, 64])
@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize(("size", "tiles", "descriptors", "stores"), [
    (32, 1, True, True), (32, 2, True, False), (32, 9, False, False), (128, 2, True, True),
])  # fmt: skip
def test_every_way_to_cut_the_work_gives_the_product(
    interpreted, unwritten_is_nan, monkeypatch, block_rank, in_features, tokens, size, tiles, swapped, descriptors,
    stores, generator,
):  # fmt: skip
    """With descriptors as on Hopper; axes that these cannot take are left to pointers."""
    shape = interpreted.Shape(size, tiles, 2, 3, 4, swapped, descriptors, stores)
    monkeypatch.setattr(interpreted, "choose_shape", lambda *_: shape)
    matrix = random_packed(290, in_features, 256 // block_rank, block_rank)
    x, bias = torch.randn(tokens, in_features, generator=generator), torch.randn(290, generator=generator)
    assert_is_tiled_product(product(interpreted, matrix, x, bias), matrix, x, bias)


def test_strided_inputs_are_read_correctly(interpreted, generator):
    matrix = random_packed(70, 90, 20)
    for tokens in (3, 40):
        x = torch.randn(90, 2 * tokens, generator=generator).T[::2]
        assert_is_tiled_product(product(interpreted, matrix, x, None), matrix, x, None)


# the layout


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(("out_features", "in_features", "num_blocks", "block_rank"), SHAPES)
def test_packing_can_be_undone(out_features, in_features, num_blocks, block_rank, style):
    matrix = random_packed(out_features, in_features, num_blocks, block_rank, style=style)
    index, sizes = tiled(matrix)
    values = tiling.pack(*matrix.factors(), index, sizes)
    live = matrix.structure.live.repeat_interleave(block_rank)[:, None]  # dead blocks are not stored
    assert values.numel() == sizes.num_values
    for found, factor in zip(tiling.spread(values, index, sizes), matrix.factors(), strict=True):
        assert torch.equal(found, factor * live)


def test_whole_blocks_need_neither_padding_nor_gathering():
    one = torch.tensor
    structure = one([128, 128]), one([0, 128]), one([128, 128]), one([0, 0])
    _, sizes = tiling.tile_blocks(*structure, 64, (256, 256))
    assert not sizes.gathered and sizes.num_values == 64 * 2 * (128 + 128)


def test_groups_of_like_needs_share_a_tile():
    """Of eight blocks the ones that begin alike are paired, whatever their order."""
    start = torch.tensor([0, 3, 1, 2, 3, 2, 0, 1]) * 256
    size = torch.full((8,), 256)
    _, sizes = tiling.tile_blocks(size, start, size, start, 64, (1024, 1024))
    assert sizes.column_entries == 4 * 4  # four pairs, of four tiles of 64 columns each: nothing that only one needs


def test_lines_of_like_intervals_share_a_tile(generator):
    start = torch.randint(0, 4096, (4096,), generator=generator)
    size = torch.randint(0, 1024, (4096,), generator=generator)
    _, sizes = tiling.tile_blocks(size, start, size, start, 1, (4096, 4096))
    columns, rows = (part / int(size.sum()) for part in sizes.value_parts)
    assert columns < 2.0  # in the order in which they came: 8
    assert rows < 1.4


def test_widths_beyond_the_axis_are_refused():
    one = torch.tensor
    with raises_value_error("0 .. 8", "9"):
        tiling.tile_blocks(one([9]), one([0]), one([1]), one([0]), 1, (8, 8))


def test_the_kernels_compile_for_ampere_and_hopper():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compile_block_matmul.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("compiled") == 3 * 5

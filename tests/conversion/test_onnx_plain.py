"""Layers for export compute the same, however their axes are cut."""

import random

import pytest
import torch

from gblr.conversion import onnx_plain
from gblr.conversion.onnx_layers import ComposedLayer, TiledConv2d, TiledLinear
from gblr.conversion.onnx_plain import plain_layer
from gblr.conversion.onnx_tiling import col_tilings, row_tilings, tile_matrix
from gblr.layers.conv import ConvGeometry, StructuredConv2d
from gblr.layers.structured import StructuredLinear
from gblr.matrices.gblr import GBLRMatrix
from gblr.matrices.packed import PackedGBLR
from gblr.matrices.structure import Structure


def random_packed(shape, num_blocks, rank, full, generator):
    """Blocks of any width at any place, a part `full` of them full."""
    fields = []
    for length in shape:
        width = torch.randint(1, length + 1, (num_blocks,), generator=generator)
        width[torch.rand(num_blocks, generator=generator) < full] = length
        fields += [width, torch.randint(0, length, (num_blocks,), generator=generator)]
    u, v = (torch.randn(rank * int(width.sum()), generator=generator) for width in fields[::2])
    return PackedGBLR(Structure(*fields), u, v, rank, shape)


def cut_at_random(choice, monkeypatch):
    """Any tilings, however much they store."""

    def tilings(packed, max_padding, prices, unit):
        s, rank = packed.structure, packed.block_rank
        rows = row_tilings(s.row_width, s.row_location, packed.shape[0], rank, prices)
        cols = col_tilings(s.col_width, s.col_location, packed.shape[1], rank, prices, unit)
        return choice.choice(rows), choice.choice(cols)

    monkeypatch.setattr(onnx_plain, "tile_matrix", tilings)
    monkeypatch.setattr("gblr.conversion.onnx_tiling.Tiling.num_stored", 0)


def assert_same(made, layer, x):
    with torch.no_grad():
        actual, expected = made(x), layer(x)
    assert actual.shape == expected.shape
    assert float((actual - expected).abs().max()) <= 1e-5 * float(expected.abs().max().clamp(min=1))


@pytest.mark.parametrize("seed", range(60))
def test_linear_layers_in_any_tiles(seed, monkeypatch):
    choice, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    cut_at_random(choice, monkeypatch)
    shape = choice.randint(1, 150), choice.randint(1, 150)
    rank, num_blocks = choice.choice([1, 2, 3, 16]), choice.randint(0, 40)
    packed = random_packed(shape, num_blocks, rank, choice.choice([0.0, 0.2, 1.0]), generator)
    layer = StructuredLinear(packed, torch.randn(shape[0], generator=generator) if seed % 2 else None)
    made = plain_layer(layer, 1.25, compose=False)
    assert isinstance(made, TiledLinear) and made.weight.shape == shape
    assert_same(made, layer, torch.randn((4, shape[1]) if seed % 3 else (2, 3, shape[1]), generator=generator))


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.filterwarnings("ignore:Using padding='same'")
def test_convolutions_in_any_tiles(seed, monkeypatch):
    choice, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    cut_at_random(choice, monkeypatch)
    padding = choice.choice([(0, 0), (1, 1), "same"])
    stride = (1, 1) if padding == "same" else choice.choice([(1, 1), (2, 1)])
    mode = choice.choice(["zeros", "reflect", "replicate", "circular"])
    kernel, dilation = choice.choice([(1, 1), (3, 3), (2, 3)]), choice.choice([(1, 1), (2, 1)])
    geometry = ConvGeometry(choice.randint(1, 12), kernel, stride, padding, dilation, mode)
    packed = random_packed((choice.randint(1, 40), geometry.in_features), choice.randint(0, 20), 2, 0.2, generator)
    layer = StructuredConv2d(packed, geometry, torch.randn(packed.shape[0]) if seed % 2 else None)
    made = plain_layer(layer, 1.25, compose=False)
    assert isinstance(made, TiledConv2d)
    assert_same(made, layer, torch.randn(2, geometry.in_channels, 11, 9, generator=generator))


@pytest.mark.parametrize("rank", [1, 16])
def test_padding_stays_within_its_bound(rank, generator):
    mean, shape = 0.24, (768, 192)
    num_blocks = 192 // rank
    fields = []
    for length in shape:
        width = (length * mean * (0.5 + torch.rand(num_blocks, generator=generator))).long()
        fields += [width, torch.randint(0, length, (num_blocks,), generator=generator)]
    u, v = (torch.randn(rank * int(width.sum())) for width in fields[::2])
    packed = PackedGBLR(Structure(*fields), u, v, rank, shape)
    made = plain_layer(StructuredLinear(packed), 1.25, compose=False)
    sizes = [tensor.numel() for tensor in made.state_dict().values() if tensor.is_floating_point()]
    assert packed.num_params < sum(sizes) < 1.3 * packed.num_params


def test_full_blocks_are_two_plain_products(generator):
    packed = random_packed((40, 60), 5, 2, 1.0, generator)
    rows, cols = tile_matrix(packed, 1.25)
    assert rows.num_tiles == cols.num_tiles == 1
    assert rows.num_params + cols.num_params == packed.num_params


def test_dense_where_that_is_no_larger(generator):
    dear = StructuredLinear(random_packed((16, 12), 12, 1, 1.0, generator), torch.randn(16))
    for compose in (False, True):
        made = plain_layer(dear, 1.25, compose)
        assert isinstance(made, torch.nn.Linear)
        assert_same(made, dear, torch.randn(3, 12))


def test_small_layers_are_composed_and_large_ones_are_not(generator):
    small = StructuredLinear(random_packed((96, 80), 9, 1, 0.0, generator))
    assert isinstance(plain_layer(small, 1.25, compose=True), ComposedLayer)
    assert isinstance(plain_layer(small, 1.25, compose=False), TiledLinear)
    large = StructuredLinear(random_packed((1536, 768), 24, 8, 0.0, generator))
    assert isinstance(plain_layer(large, 1.25, compose=True), TiledLinear)


@pytest.mark.parametrize("seed", range(20))
def test_composed_layers(seed, generator):
    choice = random.Random(seed)
    shape, rank = (choice.randint(4, 60), choice.randint(4, 60)), choice.choice([1, 2, 3])
    packed = random_packed(shape, choice.randint(0, 5), rank, 0.1, generator)
    layer = StructuredLinear(packed, torch.randn(shape[0]) if seed % 2 else None)
    made = ComposedLayer(*onnx_plain._spreads(packed), layer.bias, None)
    assert_same(made, layer, torch.randn(2, 3, shape[1], generator=generator))
    geometry = ConvGeometry(choice.randint(1, 5), (3, 2), (1, 2), (1, 1), padding_mode="reflect")
    packed = random_packed((12, geometry.in_features), 3, rank, 0.1, generator)
    layer = StructuredConv2d(packed, geometry, torch.randn(12))
    made = ComposedLayer(*onnx_plain._spreads(packed), layer.bias, geometry)
    assert_same(made, layer, torch.randn(2, geometry.in_channels, 9, 8, generator=generator))


@pytest.mark.parametrize("compose", [False, True])
def test_blocks_that_were_not_packed_are(compose, generator):
    packed = random_packed((96, 80), 3, 1, 0.0, generator)
    loose = StructuredLinear(GBLRMatrix(packed.structure, *(t[:, None] for t in packed.factors())))
    assert_same(plain_layer(loose, 1.25, compose), loose, torch.randn(3, 80))

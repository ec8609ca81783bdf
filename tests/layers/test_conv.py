import copy
import itertools
import math

import pytest
import torch
from torch import nn
from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

import gblr
from gblr.layers.conv import ConvGeometry, GaudiConv2d, StructuredConv2d
from gblr.matrices.gblr import GBLRMatrix
from gblr.matrices.low_rank import LowRankMatrix
from gblr.matrices.packed import PackedGBLR
from tests.helpers import assert_close, compiled, raises_value_error
from tests.layers.gaudi_layers import STRUCTURE, scatter_blocks
from tests.layers.packed_layers import assert_near, each_form, needs_kernels, plan_as
from tests.ops.packed_blocks import random_packed
from tests.shape_hook import shapes_unchecked

GEOMETRIES = [
    {},
    {"stride": 2},
    {"stride": (2, 1), "padding": 1},
    {"dilation": 2, "padding": (2, 1)},
    {"padding": "same"},
    {"padding": "same", "dilation": (1, 2)},
    {"padding": "valid"},
    {"stride": 2, "dilation": (2, 1), "padding": 2},
]
MODES = ["zeros", "reflect", "replicate", "circular"]
KERNELS = [3, 1, (2, 3), (3, 4)]
CASES = [
    {"kernel_size": kernel, "padding_mode": mode, **geometry}
    for kernel, mode, geometry in itertools.product(KERNELS, MODES, GEOMETRIES)
]


def gaudi_conv(sigma: float = math.inf, bias: bool = True, **options) -> GaudiConv2d:
    torch.manual_seed(0)
    layer = GaudiConv2d(3, 6, bias=bias, **options)
    if layer.num_blocks > 2:
        scatter_blocks(layer)
    layer.set_sigma(sigma)
    return layer


def dense_conv(weight: torch.Tensor, bias, **options) -> nn.Conv2d:
    conv = nn.Conv2d(3, 6, bias=bias is not None, **options)
    conv.load_state_dict({"weight": weight.view_as(conv.weight), **({} if bias is None else {"bias": bias})})
    return conv


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_convolution_is_that_of_the_dense_layer(case, generator):
    layer = gaudi_conv(sigma=4.0, **case)
    x = torch.randn(2, 3, 7, 8, generator=generator)
    expected = dense_conv(layer.weight, layer.bias, **case)(x)
    for compose in (True, False):
        layer.composes = lambda positions, compose=compose: compose
        assert_close(layer(x), expected)
    geometry = ConvGeometry.of(nn.Conv2d(3, 6, **case))
    assert geometry == layer.geometry
    structured = StructuredConv2d(LowRankMatrix(*layer.flat_factors()), geometry, layer.bias)
    assert_close(structured(x), expected)


def test_both_routes_are_taken():
    layer = gaudi_conv(kernel_size=3, padding=1, bias=False)
    small, large = torch.zeros(1, 3, 1, 1), torch.zeros(4, 3, 16, 16)
    taken = []
    composes = layer.composes
    layer.composes = lambda positions: taken.append((positions, composes(positions))) or taken[-1][1]
    layer(small), layer(large)
    assert taken == [(1, False), (1024, True)]


def test_strides_count_as_fewer_positions():
    layer = gaudi_conv(kernel_size=3, stride=2, padding=1)
    seen = []
    layer.composes = lambda positions: seen.append(positions) or True
    layer(torch.zeros(2, 3, 8, 8))
    assert seen == [2 * 4 * 4]


def test_a_layer_without_bias(generator):
    layer = gaudi_conv(kernel_size=3, bias=False)
    assert layer.bias is None and layer.to_dense_layer().bias is None
    x = torch.randn(2, 3, 7, 8, generator=generator)
    assert_close(layer(x), dense_conv(layer.weight, None, kernel_size=3)(x))


@pytest.mark.parametrize("case", [CASES[0], {"kernel_size": 3, "padding": "same", "padding_mode": "reflect"}], ids=str)
def test_a_dense_convolution_made_of_it_computes_the_same(case, generator):
    layer = gaudi_conv(sigma=4.0, **case)
    x = torch.randn(2, 3, 7, 8, generator=generator)
    structured = StructuredConv2d(layer.to_matrix(), layer.geometry, layer.bias)
    for source in (layer, structured):
        dense = source.to_dense_layer()
        assert type(dense) is nn.Conv2d
        assert_close(dense(x), source(x))


@pytest.mark.parametrize("compose", [True, False])
def test_gradients_reach_contents_widths_and_locations(compose, generator):
    layer = gaudi_conv(sigma=2.0, kernel_size=3)
    layer.composes = lambda positions: compose
    layer(torch.randn(2, 3, 7, 8, generator=generator)).square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert bool(parameter.grad.isfinite().all()) and bool(parameter.grad.any()), name


def test_hardening_is_exact_without_smoothing(generator):
    layer = gaudi_conv(kernel_size=3, padding=1)
    packed = PackedGBLR.from_gblr(layer.to_matrix())
    x = torch.randn(2, 3, 7, 8, generator=generator)
    assert_close(StructuredConv2d(packed, layer.geometry, layer.bias)(x), layer(x))


@each_form
@pytest.mark.parametrize("case", [{}, {"stride": 2, "padding": 1}, {"padding": 1, "padding_mode": "circular"}], ids=str)
def test_every_form_of_a_hardened_convolution_is_that_of_the_dense_layer(form, case, generator):
    geometry = ConvGeometry.of(nn.Conv2d(3, 10, 3, **case))
    layer = StructuredConv2d(random_packed(10, 27, 6, 2), geometry, torch.linspace(-1, 1, 10)).eval()
    plan_as(layer, form)
    x = torch.randn(2, 3, 7, 8, generator=generator)
    expected = layer.to_dense_layer()(x)
    with torch.no_grad():
        assert_near(layer(x), expected)
    assert_near(layer(x), expected)
    assert_near(layer(x[0]), expected[0])
    (layer(x) * 2).sum().backward()
    assert bool(layer.u.grad.any()) and bool(layer.v.grad.any())


@pytest.mark.parametrize("method", [gblr.LowRankConfig, gblr.MonarchConfig, gblr.PixelflyConfig, gblr.BlastConfig])
def test_small_convolutions_are_run_as_such(method, monkeypatch, generator):
    """Patches written out as vectors took up to seven times as long as the dense layer."""
    conv = nn.Conv2d(16, 32, 3, padding=1)
    model = nn.Sequential(conv).eval()
    gblr.convert_(model, method(0.5), where=gblr.conv_layers())
    monkeypatch.setattr(ConvGeometry, "unfold", None)
    x = torch.randn(2, 16, 6, 6, generator=generator)
    assert_near(model(x), model[0].to_dense_layer()(x))


def test_wide_convolutions_gain_by_their_own_products(monkeypatch, generator):
    matrix = gblr.fit(torch.randn(288, 90, generator=generator), gblr.BlastConfig(0.3))
    layer = StructuredConv2d(matrix, ConvGeometry(10, (3, 3)), torch.randn(288, generator=generator))
    x = torch.randn(2, 10, 6, 6, generator=generator)
    expected = layer.to_dense_layer()(x)
    monkeypatch.setattr(ConvGeometry, "weight", None)
    assert_near(layer(x), expected)


@needs_kernels
def test_the_packed_form_is_expected_where_it_pays_for_the_patches():
    few, many = (StructuredConv2d(random_packed(n, 27, 6, 2), ConvGeometry(3, (3, 3))).eval() for n in (10, 2000))
    assert few.form != "packed" and many.form == "packed"


def test_structure_stays_float32_under_casts(generator):
    layer = gaudi_conv(sigma=3.0, kernel_size=3)
    x = torch.randn(2, 3, 7, 8, generator=generator)
    expected = layer(x).detach()
    layer.bfloat16()
    assert {getattr(layer, name).dtype for name in STRUCTURE} == {torch.float32}
    y = layer(x.bfloat16()).detach()
    assert y.dtype == torch.bfloat16 and float((y.float() - expected).norm() / expected.norm()) < 2e-2


def test_autocast(generator):
    layer = gaudi_conv(kernel_size=3)
    structured = StructuredConv2d(layer.to_matrix(), layer.geometry, layer.bias)
    x = torch.randn(2, 3, 7, 8, generator=generator)
    for source in (layer, structured):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = source(x).detach()
        expected = source(x).detach()
        assert y.dtype == torch.bfloat16 and float((y.float() - expected).norm() / expected.norm()) < 2e-2


def test_it_compiles_and_exports(generator):
    gaudi = gaudi_conv(sigma=3.0, kernel_size=3, padding=1)
    x = torch.randn(2, 3, 7, 8, generator=generator)
    for layer in (gaudi, StructuredConv2d(gaudi.to_matrix(), gaudi.geometry, gaudi.bias)):
        assert_close(compiled(layer)(x), layer(x))
        with shapes_unchecked():
            program = torch.export.export(layer, (x,))
        assert_close(program.module()(x), layer(x))


def test_it_exports_with_batch_and_image_left_open(generator):
    layer = gaudi_conv(sigma=3.0, kernel_size=3, padding=1)
    sizes = {0: torch.export.Dim("b"), 2: torch.export.Dim("h"), 3: torch.export.Dim("w")}
    with shapes_unchecked():
        program = torch.export.export(layer, (torch.zeros(2, 3, 7, 8),), dynamic_shapes=(sizes,))
    for size in ((2, 3, 2, 2), (9, 3, 20, 30)):
        x = torch.randn(size, generator=generator)
        assert_close(program.module()(x), layer(x))


def test_a_deep_copy_and_a_state_dict_give_the_same_layer(generator):
    layer = gaudi_conv(sigma=3.0, kernel_size=3)
    x = torch.randn(2, 3, 7, 8, generator=generator)
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))
    other = GaudiConv2d(3, 6, 3)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), layer(x))


def test_the_printed_layer_tells_blocks_cost_and_geometry():
    text = repr(gaudi_conv(kernel_size=3, stride=2, padding=1))
    for part in ("6 x 27", "blocks=6", "live=5", "relative_cost=", "kernel_size=(3, 3), stride=(2, 2), padding=(1, 1)"):
        assert part in text
    layer = StructuredConv2d(LowRankMatrix(torch.ones(2, 6), torch.ones(2, 27)), ConvGeometry(3, (3, 3)))
    for part in ("LowRankMatrix", "relative_cost=", "bias=False", "kernel_size=(3, 3)"):
        assert part in repr(layer)


def test_an_image_may_come_without_a_batch_axis(generator):
    """`nn.Conv2d` takes (c, h, w) too; so must a drop-in."""
    layer = gaudi_conv(kernel_size=3, padding=1)
    structured = StructuredConv2d(layer.to_matrix(), layer.geometry, layer.bias)
    x = torch.randn(3, 7, 8, generator=generator)
    for source in (layer, structured):
        assert_close(source(x), source(x[None])[0])


def test_grouped_convolutions_and_wrong_sizes_are_refused():
    with raises_value_error("groups=3"):
        ConvGeometry.of(nn.Conv2d(3, 6, 3, groups=3))
    matrix = GBLRMatrix.from_low_rank(torch.ones(2, 6), torch.ones(2, 26))
    with raises_value_error("`num_blocks`", 0):
        GaudiConv2d(3, 6, 3, num_blocks=0)
    with raises_value_error("`matrix`", 27, 26):
        StructuredConv2d(matrix, ConvGeometry(3, (3, 3)))


def test_layers_tell_what_nn_conv2d_tells_of_itself():
    torch.manual_seed(0)
    conv = nn.Conv2d(4, 6, (3, 2), stride=2, padding=1, dilation=(1, 2), padding_mode="reflect")
    gaudi = GaudiConv2d(4, 6, (3, 2), stride=2, padding=1, dilation=(1, 2), padding_mode="reflect")
    fixed = StructuredConv2d(gaudi.to_matrix(), ConvGeometry.of(conv), conv.bias)
    for name in (
        "in_channels",
        "out_channels",
        "kernel_size",
        "stride",
        "padding",
        "dilation",
        "groups",
        "padding_mode",
    ):
        assert getattr(gaudi, name) == getattr(fixed, name) == getattr(conv, name), name


def test_a_model_that_reads_the_stride_of_its_convolutions_can_be_converted():
    config = MobileNetV2Config(image_size=32, depth_multiplier=0.35)  # pads by kernel and stride, as TensorFlow does
    model = MobileNetV2ForImageClassification(config).eval()
    report = gblr.convert_(model, gblr.GaudiConfig(0.5, block_rank=4, init="scratch"), where=gblr.conv_layers())
    assert len(report) > 30 and any("group" in reason for reason in report.skipped.values())
    images = torch.randn(1, 3, 32, 32)
    expected = model(images).logits
    gblr.harden_(model)
    assert_close(model(images).logits, expected)


def test_a_bias_of_another_size_is_refused():
    layer = GaudiConv2d(3, 5, 3)
    with raises_value_error("`bias`", "(5,)", "(4,)"):
        StructuredConv2d(layer.to_matrix(), layer.geometry, torch.zeros(4))

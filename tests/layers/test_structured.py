import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gblr.layers.structured import StructuredLinear
from gblr.matrices.gblr import GBLRMatrix
from gblr.matrices.low_rank import LowRankMatrix
from gblr.matrices.structure import Structure
from tests.helpers import assert_close, compiled, raises_value_error
from tests.matrices.plain import MATRICES, randn
from tests.shape_hook import shapes_unchecked

every_format = pytest.mark.parametrize("format", MATRICES.values(), ids=MATRICES)


def make(format, bias: bool = True) -> StructuredLinear:
    generator = torch.Generator().manual_seed(0)
    matrix = format.make(12, 9, generator)
    return StructuredLinear(matrix, randn(12, generator=generator) if bias else None)


@every_format
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(9,), (5, 9), (2, 3, 9), (0, 9)])
def test_forward_is_that_of_the_dense_layer(format, bias, shape, generator):
    layer = make(format, bias)
    x = randn(*shape, generator=generator)
    expected = nn.functional.linear(x, layer.matrix.to_dense(), layer.bias)
    assert_close(layer(x), expected)
    dense = layer.to_dense_layer()
    assert type(dense) is nn.Linear and (dense.bias is None) == (not bias)
    assert_close(dense(x), expected)
    assert torch.equal(layer.weight, layer.matrix.to_dense())


@every_format
def test_a_weight_that_is_asked_for_again_and_again_is_kept_until_contents_change(format):
    """T5 asks for the dtype of one in every call, which took hundreds of times as long as its product."""
    layer = make(format).eval()
    first_content = next(layer.parameters())

    def asked() -> torch.Tensor:
        assert torch.equal(layer.weight, layer.matrix.to_dense())
        return layer.weight

    with torch.inference_mode():
        once = layer.weight
        assert asked() is layer.weight and asked() is not once
    with torch.no_grad():
        kept = asked()
        first_content.mul_(2)
        assert asked() is not kept
        kept = layer.weight.zero_()
        assert bool(asked().any())
        layer.load_state_dict({name: 3 * t if t.is_floating_point() else t for name, t in layer.state_dict().items()})
        assert asked().dtype == torch.float64
        assert layer.float().weight.dtype == asked().dtype == torch.float32
        assert torch.equal(copy.deepcopy(layer).weight, asked())
        layer.train()
        first_content.data.mul_(2)  # leaves no trace
        layer.eval()
        asked()
    assert layer.weight.requires_grad and layer.weight is not layer.weight


@every_format
def test_contents_lie_in_memory_as_a_checkpoint_gives_them_back(format):
    """Products of transposed views differ in their last bits, and a loaded model would differ from the saved one."""
    matrix = format.make(12, 9, torch.Generator().manual_seed(0))
    strange = matrix.map_tensors(lambda t: t.mT.contiguous().mT if t.dim() > 1 else t)
    assert all(tensor.is_contiguous() for tensor in StructuredLinear(strange).state_dict().values())


@every_format
def test_contents_are_parameters_and_get_gradients(format, generator):
    layer = make(format)
    num_floats = sum(p.numel() for p in layer.parameters())
    assert num_floats >= layer.matrix.num_params + 12
    layer(randn(5, 9, generator=generator)).square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.is_floating_point() and bool(parameter.grad.any()), name
    for buffer in layer.buffers():
        assert not buffer.is_floating_point()


@every_format
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_cast_layer_computes_in_its_dtype(format, dtype, generator):
    layer, x = make(format), randn(5, 9, generator=generator)
    expected = layer(x).detach()
    y = layer.to(dtype)(x.to(dtype)).detach()
    assert y.dtype == dtype
    assert float((y.double() - expected).norm() / expected.norm()) < 2e-2


def test_a_float_structure_survives_a_cast(generator):
    structure = Structure(*(torch.tensor([value]) for value in (301.0, 2.0, 301.0, 2.0)))
    matrix = GBLRMatrix(structure, randn(1, 1, 400, generator=generator), randn(1, 1, 400, generator=generator))
    layer = StructuredLinear(matrix).bfloat16()
    assert layer.matrix.num_mults == 602 and layer.structure_row_width.dtype == torch.float32
    assert layer.u.dtype == torch.bfloat16


@every_format
def test_autocast_computes_in_its_dtype_and_trains(format, generator):
    layer, x = make(format).float(), randn(5, 9, generator=generator).float()
    expected = layer(x).detach()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    assert float((y.detach().float() - expected).norm() / expected.norm()) < 2e-2
    y.float().square().sum().backward()
    assert {p.grad.dtype for p in layer.parameters()} == {torch.float32}


@every_format
def test_the_layer_compiles_to_one_graph_with_its_gradients(format, generator):
    layer, x = make(format), randn(5, 9, generator=generator)
    run = compiled(layer)
    assert_close(run(x), layer(x))
    actual, expected = (torch.autograd.grad(f(x).square().mean(), layer.parameters()) for f in (run, layer))
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-11, atol=1e-11)


@every_format
def test_the_layer_exports(format, generator):
    layer, x = make(format), randn(5, 9, generator=generator)
    with shapes_unchecked():
        program = torch.export.export(layer, (x,))
    assert_close(program.module()(x), layer(x))


@every_format
def test_a_state_dict_and_a_deep_copy_give_the_same_layer(format, generator):
    layer, x = make(format), randn(5, 9, generator=generator)
    twin = copy.deepcopy(layer)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(1)
    assert not torch.equal(twin(x), layer(x))
    twin.load_state_dict(layer.state_dict())
    assert torch.equal(twin(x), layer(x))


@every_format
def test_the_layer_works_on_meta(format):
    layer = make(format).to("meta")
    assert layer(torch.empty(5, 9, dtype=torch.float64, device="meta")).shape == (5, 12)
    assert "out_features=12" in repr(layer)


@every_format
def test_gradient_checkpointing_changes_nothing(format, generator):
    layer, x = make(format), randn(5, 9, generator=generator).requires_grad_()
    plain = torch.autograd.grad(layer(x).square().sum(), layer.parameters())
    saved = torch.autograd.grad(checkpoint(layer, x, use_reentrant=False).square().sum(), layer.parameters())
    for a, b in zip(plain, saved, strict=True):
        assert torch.equal(a, b)


@every_format
def test_the_printed_layer_tells_format_and_cost(format):
    layer = make(format)
    name = type(layer.matrix).__name__
    text = repr(layer)
    for part in (
        "in_features=9",
        "out_features=12",
        "bias=True",
        name,
        f"relative_cost={layer.matrix.num_mults / 108:.3f}",
    ):
        assert part in text
    if hasattr(layer.matrix, "structure"):
        live = int(layer.matrix.structure.live.sum())
        assert f"blocks={layer.matrix.structure.num_blocks}, live={live}" in text


def test_the_layer_owns_copies_of_its_tensors(generator):
    matrix, bias = LowRankMatrix(torch.ones(2, 4), torch.ones(2, 3)), torch.ones(4)
    layer = StructuredLinear(matrix, bias)
    matrix.u.zero_(), bias.zero_()
    assert bool(layer.u.all()) and bool(layer.bias.all())


def test_a_bias_of_another_size_is_refused():
    with raises_value_error("`bias`", "(4,)", "(3,)"):
        StructuredLinear(LowRankMatrix(torch.ones(2, 4), torch.ones(2, 3)), torch.ones(3))

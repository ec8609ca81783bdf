"""The operator over tiles, by its plain form: what holds on any device."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from gblr.ops.block_matmul import gpu, tiling
from tests.helpers import raises_value_error
from tests.ops.packed_blocks import random_packed


def arguments(
    block_rank=1, dtype=torch.float64, num_blocks=20, **kwargs
) -> tuple[Tensor, tiling.Sizes, Tensor, Tensor]:
    """Index, sizes, values, and the dense weight they stand for."""
    matrix = random_packed(70, 90, num_blocks, block_rank, **kwargs).to(dtype)
    s = matrix.structure
    sides = (s.row_width, s.row_location, s.col_width, s.col_location)
    index, sizes = tiling.tile_blocks(*sides, block_rank, matrix.shape)
    return index, sizes, tiling.pack(*matrix.factors(), index, sizes), matrix.to_dense()


@pytest.mark.parametrize("activation", gpu.ACTIVATIONS)
@pytest.mark.parametrize("shape", [(90,), (3, 90), (2, 4, 90), (0, 90)])
def test_it_is_the_product_of_the_dense_matrix(activation, shape, generator):
    index, sizes, values, weight = arguments()
    x, bias = (torch.randn(size, dtype=torch.float64, generator=generator) / 9 for size in (shape, (70,)))
    expected = gpu._activated(functional.linear(x, weight, bias), activation)
    torch.testing.assert_close(gpu.tile_matmul(x, values, index, bias, sizes, activation), expected)


@pytest.mark.parametrize("block_rank", [1, 64])
@pytest.mark.parametrize("activation", ["", "silu", "gelu_tanh"])
def test_gradients_are_those_of_the_definition(block_rank, activation, generator):
    index, sizes, values, _ = arguments(block_rank, num_blocks=3, style="narrow")
    x, bias = (torch.randn(size, dtype=torch.float64, generator=generator) for size in ((2, 90), (70,)))
    filled = values != 0  # what fills the tiles up has no gradient

    def product(x: Tensor, contents: Tensor, bias: Tensor) -> Tensor:
        return gpu.tile_matmul(x, values.masked_scatter(filled, contents), index, bias, sizes, activation)

    torch.autograd.gradcheck(product, [t.requires_grad_() for t in (x, values[filled].clone(), bias)])


def test_what_is_not_asked_for_is_not_computed(generator):
    index, sizes, values, weight = arguments()
    x = torch.randn(3, 90, dtype=torch.float64, generator=generator, requires_grad=True)
    gpu.tile_matmul(x, values, index, None, sizes).sum().backward()
    torch.testing.assert_close(x.grad, weight.sum(0).expand(3, 90))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_torch_finds_the_operator_sound():
    index, sizes, values, _ = arguments(dtype=torch.float32)
    x, bias = torch.randn(3, 90, requires_grad=True), torch.randn(70, requires_grad=True)
    torch.library.opcheck(
        torch.ops.gblr.tile_matmul.default,
        (x, values.requires_grad_(), index, bias, list(sizes), ""),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


def test_it_compiles_to_one_graph(generator):
    index, sizes, values, weight = arguments(dtype=torch.float32)
    compiled = torch.compile(lambda x: gpu.tile_matmul(x, values, index, None, sizes), fullgraph=True, backend="eager")
    x = torch.randn(3, 90, generator=generator)
    torch.testing.assert_close(compiled(x), x @ weight.T)


def test_wrong_inputs_are_refused():
    index, sizes, values, _ = arguments(dtype=torch.float32)
    x = torch.randn(3, 90)
    with raises_value_error("activation", "tanh"):
        gpu.tile_matmul(x, values, index, None, sizes, "tanh")
    for wrong, words in [
        ((x[:, :-1], values, index, None), "90"),
        ((x.double(), values, index, None), "float64"),
        ((x, values, index, torch.zeros(69)), "69"),
        ((x, values[:-1], index, None), "other blocks"),
        ((x, values, index[:-1], None), "other blocks"),
    ]:
        with pytest.raises(RuntimeError, match=words):
            gpu.tile_matmul(*wrong, sizes)


def test_a_cpu_has_no_use_for_them():
    assert "cpu" in gpu.reason_against(torch.device("cpu"))

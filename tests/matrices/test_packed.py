"""Special to packed GBLR matrices; what they share with the other formats is in the contract."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gblr.layers.structured import StructuredLinear
from gblr.matrices.gblr import GBLRMatrix
from gblr.matrices.packed import PackedGBLR
from gblr.matrices.structure import Structure
from tests.helpers import assert_close, raises_value_error
from tests.matrices.plain import randn, random_gblr


@given(out_features=st.integers(1, 14), in_features=st.integers(1, 14), seed=st.integers(0, 9))
def test_packing_changes_no_number_of_the_matrix(out_features, in_features, seed):
    matrix = random_gblr(out_features, in_features, torch.Generator().manual_seed(seed))
    packed = PackedGBLR.from_gblr(matrix)
    assert_close(packed.to_dense(), matrix.to_dense())
    assert (packed.num_mults, packed.num_params) == (matrix.num_mults, matrix.num_params)


def test_nothing_is_stored_outside_the_blocks(generator):
    matrix = random_gblr(12, 9, generator)
    packed = PackedGBLR.from_gblr(matrix)
    assert packed.u.numel() + packed.v.numel() == matrix.num_mults < matrix.u.numel() + matrix.v.numel()
    assert bool(packed.structure.live.all()) and packed.structure.num_blocks < matrix.num_blocks


def test_numbers_stand_block_by_block_in_the_order_of_the_axis():
    structure = Structure(*(torch.tensor(v) for v in ([2, 1], [3, 0], [1, 2], [2, 1])))
    u = torch.arange(16.0).view(2, 2, 4)
    v = torch.arange(12.0).view(2, 2, 3)
    packed = PackedGBLR.from_gblr(GBLRMatrix(structure, u, v))
    assert packed.u.tolist() == [3, 0, 7, 4, 8, 12]  # the first block wraps around
    assert packed.v.tolist() == [2, 5, 7, 8, 10, 11]


def test_unpacking_gives_the_masked_matrix_back(generator):
    matrix = random_gblr(12, 9, generator)
    back = PackedGBLR.from_gblr(matrix).to_gblr()
    assert isinstance(back, GBLRMatrix) and back.block_rank == matrix.block_rank
    assert_close(back.to_dense(), matrix.to_dense())


def test_a_matrix_without_live_blocks_packs_to_nothing():
    dead = torch.zeros(3, dtype=torch.long)
    packed = PackedGBLR.from_gblr(GBLRMatrix(Structure(*[dead] * 4), torch.ones(3, 2, 4), torch.ones(3, 2, 5)))
    assert packed.num_mults == 0 and packed.shape == (4, 5)
    assert torch.equal(packed.matmul(torch.ones(2, 5)), torch.zeros(2, 4))


def test_a_float_structure_packs_alike(generator):
    matrix = random_gblr(12, 9, generator)
    as_float = Structure(*(value.float() for value in vars(matrix.structure).values()))
    packed = PackedGBLR.from_gblr(GBLRMatrix(as_float, matrix.u, matrix.v))
    assert_close(packed.to_dense(), matrix.to_dense())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.uint8])
def test_widths_whose_sum_their_dtype_cannot_hold_pack_alike(dtype, generator):
    places = Structure(*(torch.full((10,), value).to(dtype) for value in (201, 5, 201, 7)))
    matrix = GBLRMatrix(places, *(torch.randn(10, 1, 256, generator=generator) for _ in range(2)))
    packed = PackedGBLR.from_gblr(matrix)
    assert packed.num_mults == matrix.num_mults == 10 * 402
    assert_close(packed.to_dense(), matrix.to_dense())
    layer = StructuredLinear(packed).eval()
    assert layer.form is not None  # it is known to be filled


def test_contents_that_do_not_fill_the_blocks_are_refused(generator):
    one = torch.ones(1, dtype=torch.long)
    with raises_value_error("`u`", 2, 3):
        PackedGBLR(Structure(one, one, one, one), torch.ones(3), torch.ones(2), 2, (4, 5))
    with raises_value_error("`v`", 2, 1):
        PackedGBLR(Structure(one, one, one, one), torch.ones(2), torch.ones(1), 2, (4, 5))


def test_gradients_reach_every_stored_number(generator):
    packed = PackedGBLR.from_gblr(random_gblr(12, 9, generator))
    u, v = packed.u.requires_grad_(), packed.v.requires_grad_()
    packed.matmul(randn(20, 9, generator=generator)).square().sum().backward()
    assert bool((u.grad != 0).all()) and bool((v.grad != 0).all())

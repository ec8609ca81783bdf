"""Theorem 1: low-rank, block-sparse and block-low-rank matrices are GBLR matrices, exactly; rectangular too (A.3)."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gblr.matrices.gblr import GBLRMatrix
from tests.helpers import assert_close
from tests.matrices.plain import randn

f64 = torch.float64
RECTANGLES = [(12, 12), (12, 9), (5, 16), (1, 7), (1, 1)]


def assert_is_exactly(matrix: GBLRMatrix, dense: torch.Tensor, generator: torch.Generator) -> None:
    assert_close(matrix.to_dense(), dense)
    x = randn(3, dense.shape[1], generator=generator)
    assert_close(matrix.matmul(x), x @ dense.T)


@pytest.mark.parametrize(("out_features", "in_features"), RECTANGLES)
@pytest.mark.parametrize("rank", [1, 3])
def test_a_low_rank_matrix_is_rank_blocks_of_full_width(out_features, in_features, rank, generator):
    u, v = randn(rank, out_features, generator=generator), randn(rank, in_features, generator=generator)
    matrix = GBLRMatrix.from_low_rank(u, v)
    assert_is_exactly(matrix, u.T @ v, generator)
    assert (matrix.num_blocks, matrix.block_rank) == (rank, 1)
    assert matrix.num_mults == rank * (out_features + in_features)


@pytest.mark.parametrize(("n", "num_blocks", "s"), [(12, 8, 6), (12, 12, 3), (8, 8, 1)])
def test_rank_ks_over_n_fits_the_budget_of_k_blocks_of_average_width_s(n, num_blocks, s, generator):
    rank = num_blocks * s // n
    matrix = GBLRMatrix.from_low_rank(randn(rank, n, generator=generator), randn(rank, n, generator=generator))
    # the other num_blocks - rank blocks have width 0
    assert matrix.structure.average_width * rank / num_blocks == s


def test_a_block_sparse_matrix_is_s_blocks_per_dense_block(generator):
    """(n, K/s, s)-BSP with n = 12, K = 12, s = 4: three full-rank blocks of 4 x 4."""
    corners = [(0, 4), (4, 8), (8, 0)]
    blocks = [randn(4, 4, generator=generator) for _ in corners]
    dense = torch.zeros(12, 12, dtype=f64)
    for block, (i, j) in zip(blocks, corners, strict=True):
        dense[i : i + 4, j : j + 4] = block
    matrix = GBLRMatrix.from_block_sparse(blocks, [i for i, _ in corners], [j for _, j in corners], (12, 12))
    assert_is_exactly(matrix, dense, generator)
    assert (matrix.num_blocks, matrix.block_rank, matrix.structure.average_width) == (12, 1, 4.0)
    assert torch.linalg.matrix_rank(matrix.to_dense()) == 12


@given(
    shape=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    seed=st.integers(0, 1000),
    places=st.lists(st.tuples(*[st.integers(0, 8)] * 4), min_size=1, max_size=4),
)
def test_dense_blocks_of_any_size_may_overlap_and_wrap_around(shape, seed, places):
    generator = torch.Generator().manual_seed(seed)
    dense, blocks, rows, cols = torch.zeros(shape, dtype=f64), [], [], []
    for height, width, i, j in places:
        blocks.append(randn(height % shape[0] + 1, width % shape[1] + 1, generator=generator))
        rows.append(i)
        cols.append(j)
        for a in range(blocks[-1].shape[0]):
            for b in range(blocks[-1].shape[1]):
                dense[(i + a) % shape[0], (j + b) % shape[1]] += blocks[-1][a, b]
    matrix = GBLRMatrix.from_block_sparse(blocks, rows, cols, shape)
    assert_is_exactly(matrix, dense, generator)
    assert matrix.num_blocks == sum(min(block.shape) for block in blocks)


@pytest.mark.parametrize(
    ("p", "q", "rank", "s_out", "s_in"), [(3, 3, 1, 4, 4), (2, 5, 1, 3, 2), (4, 1, 2, 3, 7), (1, 1, 1, 1, 1)]
)
def test_a_block_low_rank_matrix_is_one_block_per_tile(p, q, rank, s_out, s_in, generator):
    u, v = randn(p, q, rank, s_out, generator=generator), randn(p, q, rank, s_in, generator=generator)
    tiles = [torch.cat([u[i, j].T @ v[i, j] for j in range(q)], dim=1) for i in range(p)]
    matrix = GBLRMatrix.from_block_low_rank(u, v)
    assert_is_exactly(matrix, torch.cat(tiles), generator)
    assert (matrix.num_blocks, matrix.block_rank) == (p * q, rank)
    assert matrix.structure.average_width == (s_out + s_in) / 2
    assert matrix.num_mults == p * q * rank * (s_out + s_in)


def test_contents_stay_differentiable_through_the_constructors(generator):
    u, v = (randn(2, 5, generator=generator).requires_grad_() for _ in range(2))
    block = randn(2, 3, generator=generator).requires_grad_()
    tile = randn(2, 2, 1, 2, generator=generator).requires_grad_()
    assert torch.autograd.gradcheck(lambda u, v: GBLRMatrix.from_low_rank(u, v).to_dense(), (u, v))
    assert torch.autograd.gradcheck(
        lambda b: GBLRMatrix.from_block_sparse([b, b], [0, 4], [1, 3], (5, 5)).to_dense(), block
    )
    assert torch.autograd.gradcheck(lambda t: GBLRMatrix.from_block_low_rank(t, t).to_dense(), tile)

"""Low-rank matrices in factors of triangular support: same product, fewer multiplications, factors that stay small."""

import pytest
import torch

from gblr.fitting.gauge import even_block, triangular_blocks, triangular_cost, triangular_rank, turned_blocks


def low_rank(rank: int, shape: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    """A batch of two, with singular values that fall by a hundred, as trained weights have them."""
    u, v = (torch.randn(2, rank, n, dtype=torch.float64, generator=generator) for n in shape)
    return (u * torch.logspace(0, -2, rank, dtype=torch.float64)[:, None]).mT @ v


@pytest.mark.parametrize(("block_rank", "align"), [(1, 1), (8, 1), (8, 16), (1, 4), (16, 16)])
@pytest.mark.parametrize("shape", [(96, 96), (64, 160)])
def test_the_product_is_the_same_at_a_lower_cost(block_rank, align, shape, generator):
    rank = triangular_rank(0.8 * shape[0] * shape[1], shape, block_rank, align)
    product = low_rank(rank, shape, generator)
    blocks = triangular_blocks(product, torch.tensor([rank, rank]), block_rank, align, rank // block_rank)
    assert (blocks.product() - product).norm() < 1e-6 * product.norm()
    low_rank_cost = rank * sum(shape)
    assert bool((blocks.cost() < low_rank_cost).all())
    assert bool((blocks.cost() <= 0.8 * shape[0] * shape[1]).all())
    for interval in blocks.intervals().values():
        assert bool((interval % align == 0).all())


@pytest.mark.parametrize("block_rank", [1, 8, 16])
def test_factors_stay_small(block_rank, generator):
    """One pivot after the other within a block of 16 let them grow by thousands, and they were refused."""
    shape = (192, 192)
    rank = triangular_rank(0.7 * 192 * 192, shape, block_rank, 1)
    product = low_rank(rank, shape, generator)
    blocks = triangular_blocks(product, torch.tensor([rank, rank]), block_rank, 1, rank // block_rank)
    size = ((blocks.u @ blocks.u.mT) * (blocks.v @ blocks.v.mT)).sum((1, 2, 3)).sqrt()
    assert float((size / product.flatten(1).norm(dim=1)).max()) < (60 if block_rank == 1 else 20)


def test_matrices_of_a_batch_keep_their_own_ranks(generator):
    product = low_rank(24, (64, 64), generator)
    product[1] = low_rank(8, (64, 64), generator)[1]
    blocks = triangular_blocks(product, torch.tensor([24, 8]), 8, 1, 4)
    assert (blocks.product() - product).norm() < 1e-6 * product.norm()
    assert (blocks.intervals()["row_size"] > 0).sum(1).tolist() == [3, 1]


def test_a_matrix_of_lower_rank_than_asked_does_no_harm(generator):
    product = low_rank(8, (64, 64), generator)
    blocks = triangular_blocks(product, torch.tensor([16, 16]), 8, 1, 2)
    assert bool(blocks.u.isfinite().all() and blocks.v.isfinite().all())


def test_even_blocks_have_orthogonal_rows_of_equal_norms(generator):
    u, v = (torch.randn(3, 2, 4, n, dtype=torch.float64, generator=generator) for n in (20, 30))
    u[..., 1, :] = u[..., 0, :] + 1e-3 * u[..., 1, :]  # they nearly cancel
    a, b = even_block(u, v)
    torch.testing.assert_close(a.mT @ b, u.mT @ v)
    for side in (a, b):
        products = side @ side.mT
        torch.testing.assert_close(products, torch.diag_embed(products.diagonal(dim1=-2, dim2=-1)), atol=1e-9, rtol=0)
    torch.testing.assert_close(a.norm(dim=-1), b.norm(dim=-1))


@pytest.mark.parametrize(("block_rank", "align"), [(1, 1), (8, 1), (8, 16), (1, 4), (16, 16)])
@pytest.mark.parametrize("shape", [(96, 96), (64, 160), (160, 64)])
def test_turned_factors_are_no_larger_than_their_product(block_rank, align, shape, generator):
    rank = triangular_rank(0.8 * shape[0] * shape[1], shape, block_rank, align, sides=1)
    u, v = (torch.randn(2, min(shape), n, dtype=torch.float64, generator=generator) for n in shape)
    ranks = torch.tensor([rank, rank // 2 // block_rank * block_rank])
    blocks = turned_blocks(u, v, ranks, block_rank, align, rank // block_rank)
    keep = (torch.arange(u.shape[1]) < ranks[:, None])[..., None]
    product = (u * keep).mT @ v
    torch.testing.assert_close(blocks.product(), product)
    assert blocks.cost().tolist() == [triangular_cost(r, shape, block_rank, align, sides=1) for r in ranks.tolist()]
    assert int(blocks.cost()[0]) < rank * sum(shape)
    size = ((blocks.u @ blocks.u.mT) * (blocks.v @ blocks.v.mT)).sum((1, 2, 3)).sqrt()
    torch.testing.assert_close(size, product.flatten(1).norm(dim=1))
    for interval in blocks.intervals().values():
        assert bool((interval % align == 0).all())

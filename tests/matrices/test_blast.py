import torch

from gblr.matrices.blast import BlastMatrix
from tests.helpers import assert_close, raises_value_error
from tests.matrices.plain import randn


def test_each_tile_is_u_diag_s_v_transposed(generator):
    u, v, s = (randn(*shape, generator=generator) for shape in ((3, 4, 2), (5, 3, 2), (3, 5, 2)))
    dense = BlastMatrix(u, v, s).to_dense()
    for i in range(3):
        for j in range(5):
            tile = u[i] @ torch.diag(s[i, j]) @ v[j].T
            assert_close(dense[4 * i : 4 * i + 4, 3 * j : 3 * j + 3], tile)


def test_it_costs_rank_times_out_plus_in_plus_tiles():
    matrix = BlastMatrix(torch.ones(3, 4, 2), torch.ones(3, 3, 2), torch.ones(3, 3, 2))
    assert matrix.rank == 2
    assert matrix.num_mults == 2 * (12 + 9 + 3**2)


def test_factors_that_do_not_agree_are_refused():
    with raises_value_error("`s`", (3, 5, 2), (3, 4, 2)):
        BlastMatrix(torch.ones(3, 4, 2), torch.ones(5, 3, 2), torch.ones(3, 4, 2))
    with raises_value_error("`v`", (5, 3, 1)):
        BlastMatrix(torch.ones(3, 4, 2), torch.ones(5, 3, 1), torch.ones(3, 5, 2))
    with raises_value_error("`u`", (4, 2)):
        BlastMatrix(torch.ones(4, 2), torch.ones(5, 3, 1), torch.ones(3, 5, 2))

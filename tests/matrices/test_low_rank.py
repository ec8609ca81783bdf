import torch

from gblr.matrices.low_rank import LowRankMatrix
from tests.helpers import raises_value_error


def test_it_has_its_rank_and_costs_rank_times_out_plus_in(generator):
    matrix = LowRankMatrix(torch.randn(3, 12, generator=generator), torch.randn(3, 9, generator=generator))
    assert matrix.rank == torch.linalg.matrix_rank(matrix.to_dense()) == 3
    assert matrix.num_mults == 3 * (12 + 9)


def test_ranks_that_differ_are_refused():
    with raises_value_error("`u`", "`v`", 2, 3):
        LowRankMatrix(torch.ones(2, 4), torch.ones(3, 4))
    with raises_value_error("`v`", "(rank, in_features)", (4,)):
        LowRankMatrix(torch.ones(2, 4), torch.ones(4))

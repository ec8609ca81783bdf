"""Low rank: the truncated SVD, which is the best there is at a given rank (Eckart and Young)."""

from jaxtyping import Float
from torch import Tensor

from gblr.fitting.allocate import Choice
from gblr.fitting.config import LowRankConfig
from gblr.fitting.fit import fit_batch, rank_choices
from gblr.fitting.plan import refuse, whole_mults
from gblr.fitting.svd import balance, weighted_svd
from gblr.fitting.threads import Tick
from gblr.matrices.base import StructuredMatrix
from gblr.matrices.low_rank import LowRankMatrix


def low_rank_rank(shape: tuple[int, int], mults: int, rank_multiple: int = 1) -> int:
    """Largest rank with rank (out + in) <= `mults`, rounded down to `rank_multiple` where one multiple fits.

    >>> low_rank_rank((384, 384), mults=44236), low_rank_rank((384, 384), mults=44236, rank_multiple=8)
    (57, 56)
    """
    rank = min(mults // sum(shape), *shape)
    return rank // rank_multiple * rank_multiple if rank >= rank_multiple else rank


@rank_choices.register
def _(config: LowRankConfig, shape: tuple[int, int]) -> list[Choice]:
    """Those that `low_rank_rank` does not round down."""
    ranks = range(1, min(shape) + 1)
    return [Choice(k, k * sum(shape)) for k in ranks if k < config.rank_multiple or k % config.rank_multiple == 0]


@fit_batch.register
def _fit_low_rank(
    config: LowRankConfig,
    weight: Float[Tensor, "b out in"],
    gram: Float[Tensor, "b in in"] | None,
    budget: Float[Tensor, " b"],
    tick: Tick = lambda: None,
) -> list[StructuredMatrix]:
    shape = (weight.shape[1], weight.shape[2])
    mults = whole_mults(budget)
    ranks = [low_rank_rank(shape, m, config.rank_multiple) for m in mults]
    if min(ranks) == 0:
        refuse("low-rank", shape, sum(shape), min(mults))
    u, _, v = weighted_svd(weight, gram)
    u, v = balance(u[:, : max(ranks)], v[:, : max(ranks)])
    return [LowRankMatrix(u[i, :rank].clone(), v[i, :rank].clone()) for i, rank in enumerate(ranks)]

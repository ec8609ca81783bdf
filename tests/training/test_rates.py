import math
from itertools import pairwise

import pytest
import torch

from gblr.training.rates import rate_at, set_rates

STEPS = 40


def curve(shape, **options):
    return [rate_at(step, STEPS, shape, **options) for step in range(STEPS)]


@pytest.mark.parametrize("shape", ["cosine", "linear", "constant"])
def test_warmup_rises_evenly_to_the_full_rate(shape):
    rates = curve(shape, warmup=0.25)
    assert rates[:11] == pytest.approx([(step + 1) / 11 for step in range(11)])
    assert max(rates) == 1.0


@pytest.mark.parametrize("final", [0.0, 0.1])
def test_cosine_and_linear_fall_to_the_final_share(final):
    for shape, middle in (("cosine", 0.5), ("linear", 0.5)):
        rates = curve(shape, final=final)
        assert rates[0] == 1.0 and all(a > b for a, b in pairwise(rates))
        assert rates[STEPS // 2] == pytest.approx(final + (1 - final) * middle)
        assert rate_at(STEPS, STEPS, shape, final=final) == pytest.approx(final)


def test_cosine_is_a_cosine():
    assert rate_at(10, STEPS, "cosine") == pytest.approx((1 + math.cos(math.pi / 4)) / 2)


def test_constant_stays():
    assert set(curve("constant", final=0.5)) == {1.0}


def test_all_warmup_is_no_division_by_zero():
    assert curve("cosine", warmup=1.0)[-1] == pytest.approx(STEPS / (STEPS + 1))


def test_each_group_follows_its_own_full_rate():
    a, b = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    groups = [{"params": [a], "lr": 1.0, "initial_lr": 1.0}, {"params": [b], "lr": 0.2, "initial_lr": 0.2}]
    optimizer = torch.optim.SGD(groups)
    for share in (0.3, 0.5):
        set_rates(optimizer, share)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.5, 0.1])

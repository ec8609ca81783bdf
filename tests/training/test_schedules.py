import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gblr.training.schedules import SigmaSchedule, fall
from tests.helpers import raises_value_error


def sigmas(schedule: SigmaSchedule, steps: int = 100) -> list[float]:
    return [float(schedule.at(torch.tensor(step / steps, dtype=torch.float64))) for step in range(steps + 1)]


@pytest.mark.parametrize("shape", ["geometric", "linear"])
def test_sigma_rises_from_first_to_last_and_ends_at_infinity(shape):
    found = sigmas(SigmaSchedule(1.0, 100.0, shape=shape, end=0.8, sharp=0.1))
    assert found[0] == 1.0 and found[80:90] == [100.0] * 10 and found[90:] == [math.inf] * 11
    assert all(a < b for a, b in pairwise(found[:81]))


def test_the_middle_of_the_way_is_the_mean_of_its_kind():
    assert sigmas(SigmaSchedule(1.0, 100.0, end=1.0, sharp=0.0))[50] == 10.0
    assert sigmas(SigmaSchedule(1.0, 101.0, shape="linear", end=1.0, sharp=0.0))[50] == 51.0


def test_the_paper_schedule_waits_then_rises_linearly_to_the_last_step():
    found = sigmas(SigmaSchedule(1.0, 100.0, shape="linear", warmup=5 / 300, end=1.0, sharp=0.0), steps=300)
    assert found[:6] == [1.0] * 6 and found[6] > 1.0 and found[299] < 100.0 == found[300]


@pytest.mark.parametrize("sigma", [2.0, math.inf])
def test_a_constant_schedule_stays(sigma):
    schedule = SigmaSchedule.constant(sigma)
    assert set(sigmas(schedule)) == {sigma} and schedule.final == sigma and schedule.is_constant


def test_a_constant_schedule_may_end_sharp():
    schedule = SigmaSchedule(2.0, shape="constant", sharp=0.1)
    assert sigmas(schedule)[0] == 2.0 and schedule.final == math.inf and not schedule.is_constant


@given(
    first=st.floats(0.1, 50), last=st.floats(0.1, 500), shape=st.sampled_from(["geometric", "linear", "constant"]),
    end=st.floats(0.1, 1), sharp=st.sampled_from([0.0, 0.05, 1.0]), steps=st.integers(1, 50),
)  # fmt: skip
def test_the_last_step_leaves_the_final_sigma(first, last, shape, end, sharp, steps):
    """Budgets count the edges at `final`: masks must end there, in the float32 that a layer stores."""
    schedule = SigmaSchedule(first, last, shape=shape, end=end, sharp=sharp)
    assert sigmas(schedule, steps)[-1] == pytest.approx(schedule.final, rel=1e-6)


def test_sigma_is_made_on_the_device_of_the_share():
    sigma = SigmaSchedule().at(torch.tensor(0.5, device="meta"))
    assert sigma.is_meta and sigma.dtype == torch.float32


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"first": 0.0}, ["`sigma`", "0"]),
        ({"last": -1.0}, ["`sigma`", "-1.0"]),
        ({"shape": "cosine"}, ["`shape`", "'cosine'", "geometric"]),
        ({"warmup": 1.2}, ["`warmup`", "share", "1.2"]),
        ({"sharp": -0.1}, ["`sharp`", "-0.1"]),
        ({"warmup": 0.5, "end": 0.5}, ["`warmup`", "`end`", "0.5"]),
        ({"last": math.inf}, ["inf", "`sharp`", "finite"]),
    ],
)
def test_bad_schedules_are_refused(options, words):
    with raises_value_error(*words):
        SigmaSchedule(**options)


@pytest.mark.parametrize("shape", ["cubic", "linear"])
def test_a_budget_falls_from_start_to_end_and_never_rises(shape):
    part = torch.linspace(0, 1, 101, dtype=torch.float64)
    found = fall(torch.tensor(10.0).double(), torch.tensor(2.0).double(), part, 0.2, 0.6, shape)
    assert (found[:21] == 10).all() and (found[60:] == 2).all()
    assert (found[21:60].diff() < 0).all()
    left = 0.5**3 if shape == "cubic" else 0.5
    assert float(found[40]) == pytest.approx(2 + 8 * left)


@given(step=st.integers(1, 100), room=st.integers(0, 100), first=st.floats(0, 1e9))
def test_a_budget_is_exactly_the_target_from_its_end_on(step, room, first):
    """Also where it has no step to fall in, and at a last step that is the end."""
    part = torch.tensor(step / 100, dtype=torch.float64)
    start = max(0, step - room) / 100
    assert float(fall(torch.tensor(first).double(), torch.tensor(3.0).double(), part, start, step / 100, "cubic")) == 3


def test_a_budget_above_the_present_cost_does_not_rise_to_it_slowly():
    found = fall(torch.tensor(1.0), torch.tensor(5.0), torch.linspace(0, 1, 5), 0.0, 1.0, "cubic")
    assert found.tolist() == [5.0] * 5

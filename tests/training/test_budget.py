import math

import pytest

from gblr.training.budget import Budget
from tests.helpers import raises_value_error
from tests.shape_hook import shapes_unchecked


@pytest.mark.parametrize(("method", "end"), [("projection", 0.6), ("shrinkage", 0.9)])
def test_each_method_has_its_own_end_unless_given(method, end):
    assert Budget(relative_cost=0.3, method=method).end == end
    assert Budget(relative_cost=0.3, method=method, end=0.4).last_share == 0.4


@pytest.mark.parametrize(
    ("budget", "needed"),
    [
        (Budget(relative_cost=0.3), False),
        (Budget(relative_cost=0.3, scope="model"), True),
        (Budget(num_params=100), False),
        (Budget(num_params=100, scope="model"), False),
        (Budget(seconds=0.1), True),
        (Budget(seconds=0.1, device="cpu", scope="model"), True),
    ],
)
def test_the_clock_and_the_rest_of_the_model_need_example_inputs(budget, needed):
    assert budget.needs_inputs == needed


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, ["`relative_cost`", "`num_params`", "`seconds`", "none"]),
        ({"relative_cost": 0.3, "num_params": 10}, ["one", "'num_params'", "'relative_cost'"]),
        ({"relative_cost": 30}, ["`relative_cost`", "30", "percentage"]),
        ({"relative_cost": 0.0}, ["`relative_cost`", "0.0"]),
        ({"relative_cost": math.nan}, ["`relative_cost`", "nan"]),
        ({"num_params": -5}, ["`num_params`", "-5"]),
        ({"seconds": 0}, ["`seconds`", "0"]),
        ({"relative_cost": 0.3, "method": "magic"}, ["`method`", "'magic'", "projection"]),
        ({"relative_cost": 0.3, "scope": "world"}, ["`scope`", "'world'", "layers"]),
        ({"relative_cost": 0.3, "shape": "square"}, ["`shape`", "'square'", "cubic"]),
        ({"relative_cost": 0.3, "start": -0.1}, ["`start`", "share", "-0.1"]),
        ({"relative_cost": 0.3, "end": 60}, ["`end`", "share", "60"]),
        ({"relative_cost": 0.3, "start": 0.7}, ["`start`", "`end`", "0.7", "0.6"]),
        ({"relative_cost": 0.3, "max_shrinkage": 0.0}, ["`max_shrinkage`", "0.0"]),
        ({"relative_cost": 0.3, "weights": "heavy"}, ["`weights`", "'heavy'", "gradient"]),
        ({"relative_cost": 0.3, "device": "cpu"}, ["`device`", "`seconds`"]),
    ],
)
def test_bad_budgets_are_refused(options, words):
    with raises_value_error(*words):
        Budget(**options)


def test_a_budget_that_is_text_is_told():
    with shapes_unchecked(), pytest.raises(TypeError, match=r"`relative_cost` must be a number; got '0\.3'"):
        Budget(relative_cost="0.3")

from types import SimpleNamespace

import pytest
import torch

from gblr.conversion.outputs import output_kind, output_tensor
from tests.helpers import raises_value_error


def test_scores_of_classes_are_logits_and_the_only_score_of_a_regression_is_not():
    assert output_kind(SimpleNamespace(logits=torch.zeros(2, 3))) == "logits"
    assert output_kind(SimpleNamespace(logits=torch.zeros(2, 1))) == "hidden"
    assert output_kind(torch.zeros(2, 3)) == "hidden"


def test_where_an_answer_starts_and_ends_are_two_choices_among_the_positions():
    output = SimpleNamespace(start_logits=torch.zeros(2, 7), end_logits=torch.ones(2, 7))
    assert output_kind(output) == "logits"
    torch.testing.assert_close(output_tensor(output, "logits")[:, 1], output.end_logits)


def test_outputs_by_other_names_give_their_first_numbers():
    output = {"loss": torch.tensor(1.0), "tokens": torch.arange(3), "logits_per_image": torch.ones(2, 3)}
    assert output_tensor(output, output_kind(output)) is output["logits_per_image"]
    with raises_value_error("last_hidden_state", "to match"):
        output_tensor({"loss": torch.tensor(1.0)}, "hidden")


@pytest.mark.parametrize("kind", ["logits", "hidden"])
def test_a_plain_tensor_is_what_it_is(kind):
    x = torch.zeros(2, 3)
    assert output_tensor(x, kind) is x and output_tensor((x,), kind) is x

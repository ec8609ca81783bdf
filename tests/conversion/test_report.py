import json

import pytest

from gblr.conversion.convert import convert_
from gblr.conversion.report import Report, Row
from gblr.fitting.config import LowRankConfig
from tests.conversion.low_rank_models import random_mlp

ROWS = [
    Row("a", (8, 4), "LowRank, rank 1", error=0.5, dense_mults=32, num_mults=12, seconds=0.25),
    Row("b", (8, 8), "LowRank, rank 2", error=0.3, dense_mults=64, num_mults=32, seconds=0.5),
    Row("c", (9, 9), "skipped: tied", converted=False),
]


def report(notes=()) -> Report:
    return Report(ROWS, ["a", "b"], "the title", notes)


def test_a_report_is_a_sequence_of_the_converted_names():
    r = report()
    assert list(r) == ["a", "b"] and len(r) == 2 and r[0] == "a" and r[-1:] == ("b",) and "c" not in r


def test_totals_are_over_the_converted_layers():
    r = report()
    assert r.relative_cost == pytest.approx(44 / 96)
    assert r.mean_error == pytest.approx(0.4) and r.seconds == pytest.approx(0.75)
    assert r.skipped == {"c": "skipped: tied"}
    assert Report([], [], "").mean_error is None and Report([], [], "").relative_cost == 0


def test_a_report_prints_as_a_table():
    text = str(report(["`include` pattern 'x' matches no module"]))
    for part in (
        "the title",
        "layer",
        "8 x 4",
        "LowRank, rank 2",
        "0.3000",
        "0.375",
        "0.500",
        "skipped: tied",
        "0.458",
    ):
        assert part in text
    assert "2 layers converted" in text and "matches no module" in text
    assert repr(report()) == str(report())


def test_a_report_exports_as_plain_json():
    found = json.loads(json.dumps(report().to_dict()))
    assert found["title"] == "the title" and len(found["rows"]) == 3
    assert found["rows"][0]["relative_cost"] == pytest.approx(0.375)


def test_a_conversion_reports_shape_error_cost_and_time():
    model = random_mlp()
    before = [module.weight.detach().clone() for module in (model[0], model[2], model[4])]
    r = convert_(model, LowRankConfig(0.5))
    assert list(r) == ["0", "2", "4"]
    for row, weight, layer in zip(r.rows, before, (model[0], model[2], model[4]), strict=True):
        assert row.shape == tuple(weight.shape) and row.dense_mults == weight.numel()
        assert row.num_mults == layer.matrix.num_mults
        assert row.error == pytest.approx(float((layer.weight.detach() - weight).norm() / weight.norm()), rel=1e-4)
        assert row.seconds > 0 and f"rank {layer.matrix.rank}" in row.what
    assert "LowRankConfig(relative_cost=0.5" in str(r) and "plain errors" in str(r)

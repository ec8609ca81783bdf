"""`gblr compress` at several costs: a run for each, one measurement of the dense model, one table."""

import json

import pytest

from gblr.workflows.several import SeveralCosts
from tests.cli.conftest import TINY, run

COMMAND = ("compress", "vit:digits", *TINY, "--method", "low-rank", "--out", "costs")
TWO = ("--cost", 0.6, "--cost", 0.3)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """A run at two costs, and how it ended."""
    folder = tmp_path_factory.mktemp("runs") / "costs"
    ended = run(*COMMAND[:-1], folder, *TWO)
    assert ended.code == 0, ended.err
    ended.folder = folder
    return ended


def test_each_cost_has_a_run_of_its_own(two, gblr):
    assert {path.name for path in two.folder.iterdir()} == {"0.6", "0.3"}
    costs = {}
    for cost in (0.6, 0.3):
        record = json.loads((two.folder / f"{cost:g}" / "run.json").read_text())
        assert record["cost"] == cost and [row["name"] for row in record["results"]] == ["dense", "low rank"]
        costs[cost] = record["results"][1]["relative_cost"]
        assert costs[cost] <= cost and gblr("inspect", two.folder / f"{cost:g}").code == 0
    assert costs[0.3] < costs[0.6]


def test_the_dense_model_is_measured_once(two):
    assert "cost 0.6, 1 of 2" in two.err and "cost 0.3, 2 of 2" in two.err
    assert two.err.count("read for calibration") == two.err.count("calibrated before") == 1
    dense = [two.folder / cost / "work" / "dense" / "model" / "model.safetensors" for cost in ("0.6", "0.3")]
    assert dense[0].samefile(dense[1])


def test_one_table_has_all_costs_and_the_page_is_named(two, gblr):
    lines = two.out.splitlines()
    assert sum("dense" in line for line in lines) == 1 and sum("low rank │" in line for line in lines) == 2
    assert "at costs 0.6, 0.3" in two.out
    (command,) = (line.partition("gblr ")[2] for line in lines if line.startswith("page:"))
    ended = gblr(*command.split())
    assert ended.code == 0 and (two.folder / "0.6" / "report.html").exists()


def test_it_goes_on_and_takes_further_costs(gblr, monkeypatch):
    compress, done = SeveralCosts.__dict__["compress"], []

    def stopped(line):
        done.append(line)
        if line.startswith("cost 0.3"):
            raise KeyboardInterrupt

    monkeypatch.setattr(
        SeveralCosts,
        "compress",
        lambda self, loaded, task, command, say: compress(self, loaded, task, command, stopped),
    )
    ended = gblr(*COMMAND, *TWO)
    assert ended.code == 1 and "same command again" in ended.err
    monkeypatch.setattr(SeveralCosts, "compress", compress)
    ended = gblr(*COMMAND, *TWO, "--cost", 0.2, "--json")
    assert ended.code == 0, ended.err
    assert ended.err.count("done before") >= 1 and "read for calibration" not in ended.err
    assert [record["cost"] for record in json.loads(ended.out)["runs"]] == [0.6, 0.3, 0.2]


def test_one_cost_named_twice_is_one_run(gblr, tmp_path):
    assert gblr(*COMMAND, "--cost", 0.3, "--cost", 0.3).code == 0
    assert (tmp_path / "costs" / "run.json").exists()
    ended = gblr(*COMMAND, *TWO)
    assert ended.code == 1 and "holds a run of one cost" in ended.err


def test_folders_of_something_else_are_left_alone(gblr, tmp_path):
    (tmp_path / "costs" / "0.6").mkdir(parents=True)
    (tmp_path / "costs" / "0.6" / "mine.txt").write_text("mine")
    assert "holds no run of gblr" in gblr(*COMMAND, *TWO).err
    (tmp_path / "costs" / "letters").mkdir()
    assert "holds no runs of gblr alone" in gblr(*COMMAND, *TWO).err
    assert sorted(path.name for path in (tmp_path / "costs").rglob("*")) == ["0.6", "letters", "mine.txt"]


@pytest.mark.parametrize("costs", (("--cost", 0.5, "--cost", 2), ("--cost", 0.5, "--cost", 0.3, "--stream")))
def test_wrong_costs_are_told_before_anything_is_made(gblr, tmp_path, costs):
    ended = gblr(*COMMAND, *costs)
    assert ended.code == 2 and "--cost" in ended.err
    assert not (tmp_path / "costs").exists()

import re
import tomllib
from html.parser import HTMLParser
from pathlib import Path

import pytest

from gblr.reports.markup import Html, join, tag
from gblr.reports.numbers import THIN, metric_change, metric_value, percent
from gblr.reports.page import ASSETS, SCRIPTS, render_page, write_page
from gblr.reports.record import Metric, parse_record
from tests.reports.sample_records import digits_run, vit_base_run

ROOT = Path(__file__).parents[2]
LEAST = {"format": 1, "title": "a run"}
EVIL = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>\"&"


class Outline(HTMLParser):
    """Elements, ids, texts and addresses of a page; fails on elements that are not closed."""

    def __init__(self, page):
        super().__init__()
        self.open, self.tags, self.ids, self.links, self.text, self.handlers = [], [], [], [], "", []
        self.feed(page)
        assert not self.open, self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        found = dict(attrs)
        self.ids += [found["id"]] if "id" in found else []
        self.links += [found[name] for name in ("src", "href") if name in found]
        self.handlers += [name for name in found if name.startswith("on")]
        if tag not in ("meta", "input", "rect", "line", "circle", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if self.open and self.open[-1] == tag:
            self.open.pop()
        else:
            assert tag in ("rect", "line", "circle"), (tag, self.open)

    def handle_data(self, data):
        self.text += "" if self.open and self.open[-1] in ("script", "style") else data


@pytest.fixture(scope="module")
def digits():
    return [parse_record(digits_run(i, cost)) for i, cost in enumerate((0.1, 0.2, 0.35))]


@pytest.fixture(scope="module")
def one(digits):
    return Outline(render_page(digits[1:2]))


SECTIONS = {"summary", "tradeoff", "learning", "layers", "masks", "spectra", "planner", "reproduce"}


def test_a_full_record_has_all_sections(one):
    assert SECTIONS <= set(one.ids) and "runs" not in one.ids
    assert len(one.ids) == len(set(one.ids))
    assert {f"#{id}" for id in SECTIONS} <= set(one.links)
    assert all(link.startswith("#") for link in one.links)


def test_cards_tell_the_outcome_against_dense(one):
    text = one.text.replace(THIN, " ")
    for shown in ("97.73 %", "\u22120.05 points", "dense 97.78 %", "20.0 %", "asked for 20.0 %", "4.5\u00d7 fewer"):
        assert shown in text
    assert "1.6\u20134.7\u00d7" in text and "batch 64: 7.20 ms (4.7\u00d7)" in text
    assert "Of 24 layers: packed for 24." in text and "gblr compress runs/digits/dense --data digits" in text
    assert "15 November 2025, 15:05 UTC" in text and "took 2 min 14 s" in text


@pytest.mark.parametrize(
    ("part", "gone"),
    [
        ({"results": []}, {"summary", "tradeoff"}),
        ({"history": {}}, {"learning"}),
        ({"layers": []}, {"masks", "spectra", "planner"}),
        ({"layers": [], "by_type": []}, {"layers", "masks", "spectra", "planner"}),
        ({"command": "", "environment": {}}, {"reproduce"}),
    ],
)
def test_what_a_record_lacks_is_left_out(part, gone):
    found = set(Outline(render_page([parse_record(digits_run() | part)])).ids)
    assert SECTIONS & found == SECTIONS - gone


@pytest.mark.parametrize(
    "part",
    [
        {},
        {"results": [{"name": "low rank"}]},
        {"results": [{"name": "dense", "value": 1.0}]},
        {"results": [{"name": "x", "main": True, "value": 0.5, "relative_cost": 0.2, "num_params": 0}]},
        {"layers": [{"name": "fc", "shape": [3, 4]}]},
        {"layers": [{"name": "fc", "shape": [3, 4], "relative_cost": 0.5, "form": "packed"}]},
        {"layers": [{"name": "fc", "shape": [3, 4], "singular": [1.0]}]},
        {"by_type": [{"type": "q", "layers": 2}]},
        {"history": {"step": [0]}},
        {"history": {"value": [[0, 1.5]]}},
        {"created": "yesterday"},
    ],
)
def test_parts_of_a_record_make_a_page(part):
    assert "a run" in Outline(render_page([parse_record(LEAST | part)])).text


def test_a_dense_run_is_not_compared_with_itself():
    results = [{"name": "dense", "main": True, "value": 98.0, "relative_cost": 1.0, "num_params": 9, "dense_params": 9}]
    text = Outline(render_page([parse_record(LEAST | {"results": results, "cost": 1.0})])).text
    assert "What the model does." in text and "nothing is converted" in text
    assert "fewer" not in text and "same as dense" not in text


def test_a_model_that_is_slower_is_called_slower():
    times = [("dense", 0.001, False), ("GBLR", 0.002, True)]
    results = [{"name": name, "main": main, "seconds_per_batch": {"8": seconds}} for name, seconds, main in times]
    text = Outline(render_page([parse_record(LEAST | {"results": results})])).text
    assert "0.50\u00d7" in text and "slower than dense here" in text


def test_times_of_texts_tell_their_length():
    results = [{"name": name, "seconds_per_batch": {"8": 0.1}} for name in ("dense", "GBLR")]
    of_texts = parse_record(LEAST | {"results": results, "timed_lengths": {"8": 40}})
    text = Outline(render_page([of_texts])).text
    assert text.count("batch 8 \u00d7 40 tokens") == 2  # at the speed-up, and over the column of times
    other = parse_record(LEAST | {"results": results, "timed_lengths": {"8": 50}})
    assert "Time, batch 8 \u00d7" not in Outline(render_page([of_texts, other])).text


def test_costs_by_type_are_counted_from_layers_where_they_are_not_recorded():
    record = digits_run()
    counted = Outline(render_page([parse_record(record | {"by_type": []})])).text
    assert counted == Outline(render_page([parse_record(record)])).text


def test_several_runs_are_compared(digits):
    page = Outline(render_page(digits))
    assert "runs" in page.ids and "Comparison of 3 runs" in page.text
    for record in digits:
        assert page.text.count(record.title) > 5
        assert record.command in page.text


def test_equal_titles_are_told_apart(digits):
    text = Outline(render_page([digits[0], digits[0]])).text
    assert "Digits ViT at 10% (1)" in text and "Digits ViT at 10% (2)" in text


def test_no_text_of_a_record_becomes_markup():
    record = digits_run() | {name: EVIL for name in ("title", "command", "created", "method")}
    record["environment"] = record["model"] = record["data"] = {
        EVIL: EVIL,
        "cpu": EVIL,
        "architecture": EVIL,
        "what": EVIL,
    }
    record["metric"] = {"name": EVIL, "unit": EVIL}
    record["results"] = [result | {"name": EVIL + result["name"]} for result in record["results"]]
    record["layers"] = [layer | {"name": EVIL, "type": EVIL, "form": EVIL} for layer in record["layers"]]
    record["by_type"] = [row | {"type": EVIL} for row in record["by_type"]]
    page = render_page([parse_record(record), parse_record(record)])
    outline = Outline(page)
    assert outline.tags.count("script") == 2 and "img" not in outline.tags and not outline.handlers
    assert "<script>window" not in page and EVIL in outline.text


def test_scripts_make_no_markup_from_text_and_fetch_nothing():
    for name in SCRIPTS:
        source = (ASSETS / "js" / f"{name}.js").read_text()
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "fetch(", "XMLHttp"):
            assert word not in source, (name, word)
    page = render_page([parse_record(digits_run())])
    assert not re.findall(r"(?:https?:)?//(?!www\.w3\.org/2000/svg)[\w.]+\.\w+/", page)
    assert "@import" not in page and "url(" not in page


def test_vit_base_takes_less_than_three_megabytes(tmp_path):
    record = parse_record(vit_base_run())
    assert len(record.layers) == 72 and all(len(layer.block_array()) == 768 for layer in record.layers)
    file = write_page([record], tmp_path / "deep" / "page.html")
    assert 0.5e6 < file.stat().st_size < 3e6
    assert [path.name for path in file.parent.iterdir()] == ["page.html"]


def test_long_histories_are_thinned_out():
    steps = 20_000
    history = {"step": list(range(steps)), "loss": [1.0 / (1 + i) for i in range(steps)]}
    assert len(render_page([parse_record(LEAST | {"history": history})])) < 150_000


def test_a_page_without_records_is_refused():
    with pytest.raises(ValueError, match="at least one record"):
        render_page([])


def test_all_assets_are_package_data():
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["gblr"]
    package = ROOT / "src" / "gblr"
    covered = {path for pattern in patterns for path in package.glob(pattern) if path.is_file()}
    files = {path for path in (package / "reports" / "assets").rglob("*") if path.is_file()}
    assert files <= covered
    assert {path.stem for path in files if path.suffix == ".js"} == set(SCRIPTS)


def test_markup_escapes_all_but_markup():
    assert tag("p", "<b>", tag("b", "&"), None, title='"') == '<p title="&quot;">&lt;b&gt;<b>&amp;</b></p>'
    assert isinstance(join("a", Html("<br>")), Html) and join("<", Html("<br>")) == "&lt;<br>"
    assert tag("input", checked=True, disabled=False, data_x=None) == "<input checked>"


def test_numbers_say_what_they_mean():
    loss = Metric("perplexity", "", higher_is_better=False)
    assert metric_value(19.2412, loss) == "19.24" and metric_change(19.5, 19.24, loss) == "+0.260"
    assert metric_change(97.5, 97.5, Metric("accuracy", "%")) == "same as dense"
    assert metric_change(0.85123, 0.8512, Metric("spearman")) == "+3.00e\u221205"
    assert percent(None) == "\u2013" and percent(0.0004) == f"0.04{THIN}%"

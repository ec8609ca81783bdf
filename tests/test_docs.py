"""The documentation keeps its word: API pages are complete, examples run, numbers are those of the files."""

import doctest
import json
import re
import runpy
from pathlib import Path

import pytest
import torch

import gblr
from gblr.ops.native import cpu_kernels
from tests.shape_hook import shapes_unchecked

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
RESULTS_HOOK = runpy.run_path(str(DOCS / "_build" / "results_tables.py"))
NEED_KERNELS = ("latency.md",)
README_TABLE = runpy.run_path(str(DOCS / "_build" / "readme_table.py"), run_name="readme_table")
MINILM_ROWS = [
    {"method": "GBLR", "cost": 0.5, "relative_cost": 0.4991, "calibration": "stsb", "allocation": "global",
     "spearman": 0.79456, "mean_error": 0.31234, "seconds": 101.4},
    {"method": "low rank", "cost": 0.5, "relative_cost": 0.4987, "calibration": "stsb", "allocation": "uniform",
     "spearman": 0.784, "mean_error": 0.33, "seconds": 2.0},
    {"method": "low rank", "cost": 0.3, "relative_cost": 0.2969, "calibration": "none", "allocation": "uniform",
     "spearman": 0.645, "mean_error": 0.6163, "seconds": 1.0},
]  # fmt: skip
FIT_ROWS = [
    {"method": "GBLR", "init": "low_rank", "refine": "descent", "block_rank": 1, "calibration": "none",
     "relative_cost": 0.2999, "mean_error": 0.58861, "svd_error": 0.61632, "ratio": 0.95504, "seconds": 120.2},
]  # fmt: skip


def fenced(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def rows_below(page, header):
    """Cells of the table whose header line is `header`."""
    lines = page.read_text().split(header + "\n", 1)[1].splitlines()[1:]
    table = lines[: next((i for i, line in enumerate(lines) if not line.startswith("|")), len(lines))]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def masks(width, length, sigma):
    w, l = torch.tensor([width], dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    return gblr.gaudi_mask(w, l, sigma, length)[0], gblr.boxcar_mask(w, l, length)[0]


def test_every_public_name_is_on_an_api_page():
    api = "\n".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
    shown = re.findall(r"^::: gblr\.(\w+)$", api, re.MULTILINE)
    missing, unknown = set(gblr.__all__) - set(shown), set(shown) - set(gblr.__all__)
    assert not missing, f"add `::: gblr.<name>` to a page in docs/api/ for {sorted(missing)}"
    assert not unknown, f"docs/api/ shows names that are not in gblr.__all__: {sorted(unknown)}"
    assert len(shown) == len(set(shown)), "a name is on two API pages"


def run_python(page: Path) -> None:
    names: dict[str, object] = {}
    for block in fenced(page, "python"):
        exec(compile(block, str(page), "exec"), names)


def run_timed(page: Path) -> None:
    """Examples that learn to a time: what else runs here may make the times of one try contradict each other."""
    with shapes_unchecked():  # checking shapes takes time, too
        for tries_left in (2, 1, 0):
            try:
                return run_python(page)
            except ValueError as error:
                if not tries_left or "cannot be met" not in str(error):
                    raise


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_examples_run(page, capsys, tmp_path, monkeypatch):
    if page.name in NEED_KERNELS and cpu_kernels().startswith("none"):
        pytest.skip(f"without compiled kernels time does not follow widths ({cpu_kernels()})")
    monkeypatch.chdir(tmp_path)  # examples save models
    if page.name in NEED_KERNELS:
        run_timed(page)
    else:
        run_python(page)
    source = "\n".join(fenced(page, "pycon"))
    example = doctest.DocTestParser().get_doctest(source, {}, page.name, str(page), 0)
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    runner.run(example)
    assert runner.failures == 0, capsys.readouterr().out


def test_pages_show_the_numbers_of_their_result_files():
    for page in PAGES:
        text = page.read_text()
        shown = RESULTS_HOOK["on_page_markdown"](text)
        for name, view in RESULTS_HOOK["MARKER"].findall(text):
            assert (name, view) in RESULTS_HOOK["TABLES"], f"{page}: a result that the hook does not know"
            if not (DOCS / "results" / name).exists():
                assert "Not measured yet" in shown and f"`docs/results/{name}`" in shown
                continue
            record = json.loads((DOCS / "results" / name).read_text())
            assert f"`docs/results/{name}`, by `" in shown
            assert len(record["rows"]) > 0
        assert not re.search(r"^<!-- (results|picture):", shown, re.MULTILINE), f"{page}: a marker is misspelt"


@pytest.fixture
def results(tmp_path, monkeypatch):
    """A folder of result files that the hook and the README script read in place of docs/results/."""
    monkeypatch.setitem(RESULTS_HOOK["render"].__globals__, "RESULTS", tmp_path)
    monkeypatch.setitem(README_TABLE["block"].__globals__, "RESULTS", tmp_path)
    return tmp_path


def test_the_hook_shows_every_row_of_a_result_file(results):
    record = {"command": "python x.py", "what": "a trial", "torch": "2.13.0", "cpu": "AVX2", "rows": MINILM_ROWS}
    (results / "minilm-stsb.json").write_text(json.dumps(record))
    (results / "fit.json").write_text(json.dumps({"rows": FIT_ROWS}))
    shown = RESULTS_HOOK["on_page_markdown"]("before\n\n<!-- results: minilm-stsb.json -->\n\nafter")
    assert (
        "| method | allocation | calibration | cost asked | cost reached | Spearman | mean error | seconds |" in shown
    )
    assert "| GBLR | global | stsb | 0.50 | 0.499 | 0.7946 | 0.3123 | 101 |" in shown
    assert "| low rank | uniform | none | 0.30 | 0.297 | 0.6450 | 0.6163 | 1 |" in shown
    assert "`docs/results/minilm-stsb.json`, by `python x.py`: a trial; torch 2.13.0, AVX2.\n\nafter" in shown
    shown = RESULTS_HOOK["on_page_markdown"]("<!-- results: fit.json -->")
    assert "| GBLR | low_rank | descent | 1 | none | 0.300 | 0.5886 | 0.6163 | 0.955 | 120 |" in shown
    assert "`docs/results/fit.json`, by `python examples/compress_minilm.py --model DIR --data DIR`." in shown


def test_the_view_by_cost_has_a_column_for_each_cost_and_marks_the_best(results):
    (results / "minilm-stsb.json").write_text(json.dumps({"rows": MINILM_ROWS}))
    shown = RESULTS_HOOK["on_page_markdown"]("<!-- results: minilm-stsb.json by_cost -->").splitlines()
    assert shown[:5] == [
        "| method | allocation | calibration | cost 0.5 | cost 0.3 |",
        "| --- | --- | --- | ---: | ---: |",
        "| GBLR | global | stsb | **0.795** |  |",
        "| low rank | uniform | stsb | 0.784 |  |",
        "| low rank | uniform | none |  | **0.645** |",
    ]


def test_runs_with_a_change_have_a_table_of_their_own(results):
    def row(name, accuracy, **more):
        common = {"relative_cost": 0.08, "block_rank": 1, "reached_cost": 0.0799, "model_relative_cost": 0.18}
        method = "gaudi" if name.startswith("gaudi") else "dense"
        return common | {"name": name, "method": method, "budget": "projection", "accuracy": accuracy} | more

    rows = [
        row("dense", 77.0),
        row("gaudi-0.08-rank1-projection", 76.5),
        row("gaudi-0.08-rank1-soft-end", 76.25),
        row("gaudi-0.08-rank1-shrinkage-2", 70.0, budget="shrinkage", max_shrinkage=2.0),
    ]
    (results / "cifar10-learning.json").write_text(json.dumps({"rows": rows}))
    main, changes = (
        RESULTS_HOOK["on_page_markdown"](f"<!-- results: cifar10-learning.json{view} -->") for view in ("", " changes")
    )
    assert "| dense |" in main and "76.50" in main and "76.25" not in main and "70.00" not in main
    assert "| none | 76.50 |  |  |  |" in changes and "| no steps at sigma = inf | 76.25 | -0.25 |  |  |" in changes
    assert "| shrinkage, max_shrinkage 2 | 70.00 | -6.50 |  |  |" in changes


def test_every_run_with_a_change_is_in_its_table():
    from gblr.experiments.cifar10_learning import named_runs

    changes = {RESULTS_HOOK["change_of"]({"name": name}) for name in named_runs()} - {""}
    assert changes <= set(RESULTS_HOOK["CHANGES"])


@pytest.mark.parametrize("marker", ["minilm-stsb.json", "minilm-stsb.json by_cost", "fit.json"])
def test_the_hook_says_how_to_make_a_missing_result_file(results, marker):
    shown = RESULTS_HOOK["on_page_markdown"](f"<!-- results: {marker} -->")
    assert "Not measured yet" in shown and "python examples/compress_minilm.py --model DIR --data DIR" in shown


def test_readme_shows_the_numbers_of_its_result_file():
    text = (ROOT / "README.md").read_text()
    assert README_TABLE["with_tables"](text) == text, "run `python docs/_build/readme_table.py`"


def test_figures_at_the_top_of_the_readme_are_those_of_its_tables():
    text = (ROOT / "README.md").read_text()
    top = text.split("## Quick start")[0]
    files = RESULTS_HOOK["on_page_markdown"]("<!-- results: cpu.json models -->")
    tables = "\n".join(line for line in (text + files).splitlines() if line.startswith("|"))
    figures = re.findall(r"\d+\.\d{2,}", top)
    assert len(figures) > 10
    assert not [figure for figure in figures if figure not in tables]
    rows = json.loads((DOCS / "results" / "gpu.json").read_text())["rows"]
    speeds = [row["over_dense"] for row in rows if "cost 0.25" in row["case"] and row["tokens"] >= 4096]
    assert f"{min(speeds):.1f} to {max(speeds):.1f} times as fast" in top


def test_the_readme_script_writes_the_tables_between_their_markers(results):
    row = {"case": "768 x 768, cost 0.3", "batch": 16, "ratio": 0.404}
    (results / "cpu.json").write_text(json.dumps({"rows": [row]}))
    begin, end = README_TABLE["markers"]("cpu.json")
    others = [name for name in README_TABLE["TABLES"] if name != "cpu.json"]
    other = "\n".join("\n".join(README_TABLE["markers"](name)) for name in others)
    before, after = f"one\n\n{begin}", f"{end}\n\n{other}\n\ntwo"
    text = README_TABLE["with_tables"](f"{before}\n\nold numbers\n\n{after}")
    assert text.startswith(before) and text.endswith("two")
    assert "Not measured yet: `python -m gblr.experiments.cifar10_learning --data DIR`" in text
    assert "| 768 x 768, cost 0.3 | 0.40 |" in text and "old numbers" not in text


def test_readme_shows_times_over_dense_by_batch():
    rows = [
        {"case": "768 x 768, cost 0.3", "batch": 16, "ratio": 0.404, "target": 0.42},
        {"case": "768 x 768, cost 0.3", "batch": 1, "ratio": 0.351, "target": 0.42},
        {"case": "3072 x 768, cost 0.15", "batch": 16, "ratio": 0.2, "target": 0.2},
    ]
    table = README_TABLE["cpu_by_batch"]({"rows": rows}).splitlines()
    assert table == [
        "| matrix | batch 1 | batch 16 |",
        "| --- | ---: | ---: |",
        "| 768 x 768, cost 0.3 | 0.35 | 0.40 |",
        "| 3072 x 768, cost 0.15 |  | 0.20 |",
    ]


def test_the_speed_shown_meets_its_target():
    record = json.loads((DOCS / "results" / "masks.json").read_text())
    target = record["target"]
    (row,) = [r for r in record["rows"] if (r["blocks"], r["length"]) == (target["blocks"], target["length"])]
    assert row["fft_over_closed"] >= target["fft_over_closed"]


def test_errata_show_the_errors_that_masks_have():
    page = DOCS / "errata.md"
    rows = rows_below(page, "| w | relative error |")
    assert len(rows) == 4
    for width, error in rows:
        mask, boxcar = masks(float(width), 768, 100.0)
        assert f"{(mask - boxcar).norm() / boxcar.norm():.2g}" == error
    for square, digits in (((1 - 1 / 768) ** 2, ".1e"), (384**2, ".3f")):
        bound = 1 - torch.exp(torch.tensor(-square / (2 * 100.0**2), dtype=torch.float64))
        assert f" {bound:{digits}}" in page.read_text()


def test_mathematics_shows_the_error_of_the_printed_frequencies():
    mask, boxcar = masks(92.0, 768, 100.0)
    k = torch.arange(768, dtype=torch.float64)
    printed = torch.fft.ifft(torch.fft.fft(boxcar) * torch.exp(-0.5 * (k / 100.0) ** 2))
    theirs, ours = ((m - boxcar).norm() / boxcar.norm() for m in (printed, mask))
    assert f"{theirs:.0%} off the boxcar, ours {ours:.0%}".replace("%", " %") in (DOCS / "mathematics.md").read_text()


def test_mathematics_counts_soft_edges_rightly():
    rows = rows_below(DOCS / "mathematics.md", "| n | sigma | w = 1 | w = 8 | w = n/8 | w = n/2 |")
    assert len(rows) == 5
    for n, sigma, *cells in rows:
        for width, cell in zip((1, 8, int(n) // 8, int(n) // 2), cells, strict=True):
            mask, _ = masks(float(width), int(n), float(sigma))
            assert sum(int(part) for part in cell.split("+")) == int((mask.abs() > 1e-3).sum())


def test_tests_named_in_the_docs_exist():
    for page in PAGES:
        for file, name in re.findall(r"(tests/[\w/]+\.py)(?:::(\w+))?", page.read_text()):
            assert f"def {name}(" in (ROOT / file).read_text() if name else (ROOT / file).exists(), f"{file}::{name}"


def test_pictures_are_small():
    for picture in (DOCS / "images").iterdir():
        assert picture.stat().st_size < 150_000, picture

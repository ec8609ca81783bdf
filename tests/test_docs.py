"""The documentation keeps its word: API pages are complete, examples run, numbers are those of the files."""

import doctest
import json
import re
import runpy
from pathlib import Path

import pytest
import torch

import gblr

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
RESULTS_HOOK = runpy.run_path(str(DOCS / "_build" / "results_tables.py"))


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_examples_run(page, capsys):
    names = {}
    for block in fenced(page, "python"):
        exec(compile(block, str(page), "exec"), names)
    source = "\n".join(fenced(page, "pycon"))
    example = doctest.DocTestParser().get_doctest(source, {}, page.name, str(page), 0)
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    runner.run(example)
    assert runner.failures == 0, capsys.readouterr().out


def test_pages_show_the_numbers_of_their_result_files():
    for page in PAGES:
        text = page.read_text()
        shown = RESULTS_HOOK["on_page_markdown"](text)
        for name in RESULTS_HOOK["MARKER"].findall(text):
            record = json.loads((DOCS / "results" / name).read_text())
            assert f"`docs/results/{name}`, by `{record['command']}`" in shown
            for row in record["rows"]:
                assert "| " + " | ".join(str(value) for value in row.values()) + " |" in shown
        assert "<!-- results:" not in shown, f"{page}: a result that the hook does not know"


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

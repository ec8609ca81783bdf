"""Drawings: what is drawn is what was passed, and nothing but matplotlib is needed."""

import ast
import importlib
import sys
from pathlib import Path

import numpy as np
import pytest

from gblr.reports import figures


def test_a_run_over_the_end_of_the_axis_is_two_pieces():
    for length in (1, 5, 8):
        for location in range(-length, 2 * length):
            for width in range(length + 1):
                covered = sorted(
                    j
                    for start, size in figures.cyclic_runs(location, width, length)
                    for j in range(start, start + size)
                )
                assert covered == sorted((location + j) % length for j in range(width))


def test_matrices_are_drawn_with_an_outline_per_block():
    dense, blocks = np.eye(8), np.array([[2, 0, 3, 1], [4, 6, 2, 0]])  # the second wraps: two pieces
    figure = figures.draw_matrices([figures.MatrixPanel("a", "note", dense, blocks)] * 2, "title")
    assert len(figure.axes) == 2
    for axes in figure.axes:
        np.testing.assert_array_equal(axes.images[0].get_array(), dense)
        assert len(axes.patches) == 3


def test_a_zero_matrix_can_be_drawn(tmp_path):
    figures.draw_matrices([figures.MatrixPanel("a", "", np.zeros((3, 4)))], "").savefig(tmp_path / "zero.png")
    assert (tmp_path / "zero.png").stat().st_size > 0


def test_the_product_shows_the_cost_of_its_blocks():
    blocks = np.array([[2, 0, 3, 1], [4, 6, 2, 0]])
    figure = figures.draw_blocks_and_product(np.ones((8, 8)), blocks, "title")
    texts = [text.get_text() for text in figure.axes[1].texts]
    assert "11 multiplications instead of 64 (17.2%)" in texts


def test_masks_are_drawn_over_the_boxcar():
    masks, boxcar = np.random.default_rng(0).random((7, 16)), np.ones(16)  # more masks than colours
    family = figures.draw_mask_family(masks, [str(i) for i in range(7)], boxcar, "title").axes[0]
    drawn = [line.get_ydata() for line in family.lines if len(line.get_ydata()) == 16]
    np.testing.assert_array_equal(drawn, masks)
    panels = figures.draw_mask_panels([figures.MaskPanel("a", "note", mask, boxcar) for mask in masks[:3]], "title")
    assert len(panels.axes) == 3


def test_a_missing_matplotlib_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.axes", None)
    monkeypatch.delitem(sys.modules, "gblr.reports.figures")
    with pytest.raises(ImportError, match=r"pip install 'gblr\[report\]'"):
        importlib.import_module("gblr.reports.figures")


def test_reports_import_no_torch():
    for file in Path(figures.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [name for name in names if name.split(".")[0] == "torch"], file

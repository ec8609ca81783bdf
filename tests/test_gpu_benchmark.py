"""The training step of the GPU benchmark, tiny and on the CPU: it takes the place of a function inside the layers."""

import sys
from pathlib import Path

import pytest

from gblr.layers import gaudi
from tests.shape_hook import shapes_unchecked


@pytest.fixture
def models(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    yield __import__("gpu_models")
    for name in ("gpu_models", "gpu_cases", "bench_masks", "cpu_cases", "cpu_models"):
        sys.modules.pop(name, None)


def test_masks_by_fft_take_the_place_of_ours_and_give_it_back(models):
    before = gaudi.masked_content_from
    with shapes_unchecked():
        (row,) = models.training_rows(smoke=True)
    assert min(row[f"{kind}_ms"] for kind in ("dense", "gblr", "fft")) > 0
    assert gaudi.masked_content_from is before

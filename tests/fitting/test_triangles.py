import pytest
import torch
from torch.testing import assert_close

from gblr.fitting import triangles as triangles_module
from gblr.fitting.triangles import Triangles


def triangles(b: int, s: int, n: int, generator: torch.Generator) -> tuple[Triangles, torch.Tensor]:
    whole = torch.randn(b, s, n, n, dtype=torch.float64, generator=generator).tril()
    found = Triangles.empty(b, s, n, whole)
    for i in range(s):
        found.put(i, whole[:, i])
    return found, whole


@pytest.mark.parametrize("strip", [96, 10_000])  # the latter as on a GPU: one strip
@pytest.mark.parametrize("r", [1, 3])
@pytest.mark.parametrize("n", [1, 95, 96, 97, 250])
def test_products_are_those_of_whole_matrices(n, r, strip, generator, monkeypatch):
    monkeypatch.setattr(triangles_module, "_STRIP", strip)
    found, whole = triangles(2, 3, n, generator)
    x = torch.randn(2, r, 3, n, dtype=torch.float64, generator=generator).transpose(1, 2)  # as the search has them
    assert_close(found.times(x), x @ whole.mT)
    which, width = torch.tensor([2, 0]), torch.tensor([n, n // 2])
    y = x[:, 0] * (torch.arange(n) < width[:, None])[:, None]
    assert_close(found.transposed_times(y, which, width), y @ whole[torch.arange(2), which])


def test_most_zeros_are_not_stored(generator):
    found, whole = triangles(1, 2, 768, generator)
    assert sum(strip.numel() for strip in found.strips) < 0.6 * whole.numel()

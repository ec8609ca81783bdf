import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gblr.fitting.config import GaudiConfig
from gblr.fitting.correlation import correlation_start, longest_run, mask_params
from gblr.fitting.fit import fit


def smoothed(row: torch.Tensor, std: float) -> torch.Tensor:
    """Cyclic convolution with a Gaussian that is wrapped around often enough."""
    n = len(row)
    offset = torch.arange(n, dtype=torch.float64)[:, None] + n * torch.arange(-20, 21)
    kernel = torch.exp(-0.5 * (offset / std) ** 2).sum(1)
    kernel = kernel / kernel.sum()
    return torch.stack([sum(kernel[(i - j) % n] * row[j] for j in range(n)) for i in range(n)])


def run_of(row: torch.Tensor, limit: float) -> int:
    """Size of the longest cyclic run of numbers of at least `limit`, by trying all."""
    n = len(row)
    sizes = [w for w in range(1, n + 1) for s in range(n) if all(row[(s + i) % n] >= limit for i in range(w))]
    return max(sizes, default=0)


@given(st.lists(st.integers(0, 20), min_size=3, max_size=12), st.floats(1.5, 4), st.sampled_from([0.5, 0.8, 0.98]))
def test_mask_params_are_equation_12(values, std, ratio):
    row = torch.tensor(values, dtype=torch.float64)
    start, size = (int(t) for t in mask_params(row, std, ratio))
    smooth = smoothed(row, std)
    # a number just at the threshold may fall on either side
    sizes = {run_of(smooth, float(ratio * smooth.max()) + epsilon) for epsilon in (-1e-3, 0, 1e-3)}
    assert min(sizes) <= size <= max(sizes)
    inside = [float(smooth[(start + i) % len(row)]) for i in range(size)]
    assert min(inside) >= ratio * float(smooth.max()) - 1e-3


@given(st.lists(st.booleans(), min_size=1, max_size=12))
def test_the_longest_run_is_cyclic(values):
    inside = torch.tensor(values)
    start, size = (int(t) for t in longest_run(inside))
    assert size == run_of(inside.double(), 0.5)
    assert all(inside[(start + i) % len(values)] for i in range(size))


def test_a_run_over_the_end_is_found():
    row = torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0, 1.0])
    assert [int(t) for t in mask_params(row, smoothing_std=0.1, threshold_ratio=0.9)] == [5, 3]


@pytest.mark.parametrize("length", [32, 30])
def test_aligned_masks_start_and_end_on_multiples_or_take_all(length, generator):
    start, size = mask_params(torch.rand(20, length, generator=generator), 2.0, 0.8, align=8)
    assert bool((start % 8 == 0).all()) and bool(((size % 8 == 0) | (size == length)).all()) and bool((size > 0).all())
    assert length % 8 == 0 or bool((start + size <= length).all())


def test_the_start_finds_the_block_that_columns_and_rows_share(generator):
    weight = 0.01 * torch.randn(1, 32, 32, generator=generator)
    rows, cols = torch.arange(30, 38) % 32, torch.arange(10, 18)
    strength = 1 + torch.rand(8, generator=generator)
    weight[0, rows[:, None], cols] += strength[:, None] * strength
    u, v = torch.ones(1, 3, 1, 32), torch.ones(1, 3, 1, 32)
    blocks = correlation_start(weight, u, v, torch.tensor([1000.0]), smoothing_std=0.5, threshold_ratio=0.3, align=1)
    assert (int(blocks.col_start[0, 0]), int(blocks.col_size[0, 0])) == (10, 8)
    assert (int(blocks.row_start[0, 0]), int(blocks.row_size[0, 0])) == (30, 8)


def test_the_start_stops_before_the_block_that_would_exceed_the_budget(generator):
    weight = torch.randn(2, 24, 24, generator=generator)
    content = torch.randn(2, 24, 1, 24, generator=generator)
    budget = torch.tensor([60.0, 200.0])
    blocks = correlation_start(weight, content, content, budget, smoothing_std=5.0, threshold_ratio=0.9, align=1)
    assert bool((blocks.cost() <= budget).all())
    live = blocks.live.long()
    assert bool((live.diff(dim=1) <= 0).all())  # dead from one block on


def trained_weight(size: int, generator: torch.Generator) -> torch.Tensor:
    """A falling spectrum, as trained weights have: the diagonal of the Gram matrix dominates."""
    left, right = (torch.linalg.qr(torch.randn(size, size, generator=generator))[0] for _ in range(2))
    return left @ torch.diag(torch.linspace(1, 0.2, size)) @ right


def test_printed_settings_start_narrow_and_refinement_grows_the_cost_to_the_budget(generator):
    """The paper's gamma = 1 and tau = 0.98 give widths of one or two; the budget is used all the same."""
    weight = trained_weight(32, generator)
    printed = {"smoothing_std": 1.0, "threshold_ratio": 0.98, "init": "correlation"}
    start = fit(weight, GaudiConfig(0.5, num_blocks=16, refine="none", **printed))
    row, col = (
        mask_params((weight.T @ weight).abs(), 1.0, 0.98)[1],
        mask_params((weight @ weight.T).abs(), 1.0, 0.98)[1],
    )
    assert float(row.float().mean()) < 3 and float(col.float().mean()) < 3
    refined = fit(weight, GaudiConfig(0.5, steps=4, **printed))
    assert refined.num_mults > 0.9 * 0.5 * 32 * 32
    error, start_error = ((weight - m.to_dense()).norm() for m in (refined, start))
    assert float(error) < float(start_error)

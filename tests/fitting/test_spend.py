import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

from gblr.fitting import spend
from gblr.fitting.blocks import Blocks
from gblr.fitting.descent import refit
from gblr.fitting.intervals import interval_mask
from gblr.fitting.metric import make_metric
from gblr.fitting.spend import element_worth, trim, widen
from gblr.fitting.svd import squared_error
from tests.fitting.baselines import randn, random_gram


def narrow_blocks(weight: torch.Tensor, block_rank: int, align: int, generator: torch.Generator) -> Blocks:
    """Three blocks of random intervals, the last one dead."""
    contents = [randn(len(weight), 3, block_rank, n, generator=generator) for n in weight.shape[1:]]
    sides = []
    for n in weight.shape[1:]:
        size = torch.randint(1, max(2, n // align), (len(weight), 3), generator=generator) * align
        start = torch.randint(0, n // align, size.shape, generator=generator) * align
        start = start if n % align == 0 else torch.minimum(start, (n - size) // align * align)
        size[:, 2] = 0
        sides += [start, size]
    return Blocks(*contents, *sides).masked()


@settings(max_examples=25)
@given(
    shape=st.tuples(st.integers(8, 20), st.integers(8, 20)), block_rank=st.sampled_from([1, 2]),
    align=st.sampled_from([1, 4]), weighted=st.booleans(), more=st.lists(st.floats(0, 60), min_size=2, max_size=2),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_widened_blocks_leave_less_than_a_step_and_lower_the_error(shape, block_rank, align, weighted, more, seed):
    generator = torch.Generator().manual_seed(seed)
    weight = randn(2, *shape, generator=generator)
    gram = random_gram(2, shape[1], generator) if weighted else None
    metric = make_metric(gram, align)
    blocks = refit(weight, metric, narrow_blocks(weight, block_rank, align, generator), 1)
    budget = blocks.cost() + torch.tensor(more, dtype=torch.float64)
    wider = widen(weight, metric, blocks, budget, align)
    for old, new, n in zip(_sides(blocks), _sides(wider), shape, strict=True):
        inside, inside_now = (interval_mask(*side, n) for side in (old, new))
        assert bool((inside_now | ~inside).all()) and bool((new[1] <= n).all())
        assert bool((new[0] % align == 0).all()) and bool(((new[1] % align == 0) | (new[1] == n)).all())
        assert n % align == 0 or bool((new[0] + new[1] <= n).all())
    left, sizes = budget - wider.cost(), torch.stack([wider.row_size, wider.col_size], -1)[:, :2]
    room = (torch.tensor(shape) // align * align - sizes).clamp(min=0).sum((1, 2))
    assert bool((left > -1e-9).all()) and bool(((left < block_rank * align) | (room == 0)).all())
    before, after = (squared_error(weight - refit(weight, metric, b, 1).product(), gram) for b in (blocks, wider))
    assert bool((after <= before * (1 + 1e-9)).all())


def _sides(blocks: Blocks) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(blocks.row_start, blocks.row_size), (blocks.col_start, blocks.col_size)]


def test_blocks_widen_where_the_weight_is():
    weight = torch.zeros(1, 8, 8)
    weight[0, 2:6, 1:3] = 1.0
    ones = torch.ones(1, 1, 1, 8)
    narrow = Blocks(ones, ones, *(torch.tensor([[n]]) for n in (3, 1, 1, 1))).masked()
    wide = widen(weight, make_metric(None, 1), narrow, torch.tensor([4.0]), 1)
    assert [int(side) for side in wide.intervals().values()] in ([2, 2, 1, 2], [3, 3, 1, 1], [3, 2, 1, 2], [2, 3, 1, 1])


def test_nothing_widens_without_gain(generator):
    u, v = torch.randn(1, 1, 1, 8, generator=generator), torch.randn(1, 1, 1, 8, generator=generator)
    blocks = Blocks(u, v, *(torch.tensor([[n]]) for n in (2, 3, 4, 2))).masked()
    wide = widen(blocks.product(), make_metric(None, 1), blocks, torch.tensor([16.0]), 1)
    assert int(wide.cost()) == 5


@pytest.mark.parametrize("align", [1, 4])
@pytest.mark.parametrize("shape", [(16, 24), (18, 3)])
def test_a_single_block_of_even_worth_is_shortened_not_dropped(shape, align):
    """At any price per element it would be kept whole or not at all."""
    blocks = Blocks.full(*(torch.ones(1, 1, 2, n) for n in shape), torch.ones(1, dtype=torch.long))
    budget = torch.tensor([0.6 * float(blocks.cost())])
    cut = trim(blocks, element_worth(blocks, make_metric(None, align)), budget, align)
    assert float(budget) - 2 * (2 * align) <= int(cut.cost()) <= float(budget)


@pytest.mark.parametrize("align", [1, 4])
@pytest.mark.parametrize("shape", [(16, 24), (18, 23)])
def test_many_prices_at_once_find_what_halving_finds(shape, align, monkeypatch, generator):
    """As on a GPU."""
    blocks = narrow_blocks(randn(6, *shape, generator=generator), 2, align, generator)
    worth = element_worth(blocks, make_metric(None, align))
    budget = blocks.cost() * torch.linspace(0.1, 1.1, 6)
    halved = trim(blocks, worth, budget, align)
    monkeypatch.setattr(spend, "_bits_at_once", lambda numel, device: 5)
    found = trim(blocks, worth, budget, align)
    assert torch.equal(found.cost(), halved.cost())
    assert torch.equal(found.u, halved.u) and torch.equal(found.v, halved.v)


def test_a_block_of_no_worth_is_dropped():
    blocks = Blocks.full(torch.zeros(1, 1, 2, 8), torch.zeros(1, 1, 2, 8), torch.ones(1, dtype=torch.long))
    assert int(trim(blocks, element_worth(blocks, make_metric(None, 1)), torch.tensor([20.0]), 1).cost()) == 0


@pytest.mark.parametrize("weighted", [False, True])
def test_no_value_is_read_on_the_host(weighted):
    """A GPU would have to wait for each. Fake tensors have none, and raise."""
    with FakeTensorMode():
        weight, budget = torch.randn(2, 12, 8), torch.full((2,), 60.0)
        contents = (torch.randn(2, 3, 4, n) for n in (12, 8))
        metric = make_metric(torch.randn(2, 8, 8) if weighted else None, 4)
        blocks = Blocks.full(*contents, torch.tensor([3, 2]))
        cut = trim(blocks, element_worth(blocks, metric), budget, 4)
        assert widen(weight, metric, cut, budget, 4).row_size.shape == (2, 3)

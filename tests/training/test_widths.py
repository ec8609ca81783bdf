import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gblr.layers.gaudi import GaudiLinear, GaudiModule
from gblr.training.widths import Price, Widths, kept_elements
from tests.training.models import gaudi_layers, mixed_model, mlp

SIGMAS = [0.3, 1.0, 4.0, 20.0, 100.0, math.inf]


def scattered(layer: GaudiModule, seed: int, spread: float = 1.2) -> GaudiModule:
    """Random widths, some outside [0, 1] as a step may leave them, and random locations."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        layer.width_frac.uniform_(1 - spread, spread, generator=generator)
        layer.location_frac.uniform_(0, 1, generator=generator)
    return layer


def kept_by_hardening(layer: GaudiModule) -> list[list[int]]:
    s = layer.to_matrix().structure
    return [s.row_width.tolist(), s.col_width.tolist()]


def counted(layer: GaudiModule, sigma: float) -> list[list[int]]:
    sizes = Widths([layer], sigma).sizes(layer.width_frac.detach())
    assert torch.equal(sizes[0] > 0, sizes[1] > 0)
    return sizes[:, sizes[0] > 0].tolist()


@given(n=st.integers(1, 70), m=st.integers(1, 70), align=st.integers(1, 9), seed=st.integers(0, 10**6))
def test_widths_are_rounded_as_the_layers_round_them(n, m, align, seed):
    layer = scattered(GaudiLinear(n, m, align=align, num_blocks=20), seed)
    with torch.no_grad():
        ties = (torch.arange(20) + 0.5) * align / torch.tensor([[m], [n]])  # half-way between two multiples
        layer.width_frac[:, 10:] = ties[:, :10]
    (row, _), (col, _) = layer.elements()
    assert torch.equal(Widths([layer], math.inf).rounded(layer.width_frac.detach()), torch.stack([row, col]).detach())


@settings(max_examples=100)
@given(
    n=st.integers(1, 48), m=st.integers(1, 48), align=st.sampled_from([1, 3, 4]), sigma=st.sampled_from(SIGMAS),
    seed=st.integers(0, 10**6),
)  # fmt: skip
def test_sizes_are_what_hardening_keeps(n, m, align, sigma, seed):
    layer = scattered(GaudiLinear(n, m, align=align, num_blocks=12), seed)
    layer.set_sigma(sigma)
    assert counted(layer, sigma) == kept_by_hardening(layer)


@given(
    n=st.integers(1, 70), m=st.integers(1, 70), sigma=st.sampled_from([s for s in SIGMAS if s < math.inf]),
    seed=st.integers(0, 10**6),
)  # fmt: skip
def test_sizes_are_at_least_what_hardening_keeps_of_real_widths(n, m, sigma, seed):
    """Also where sigma is large for the axis: between whole numbers a sharp mask has long ripples."""
    layer = scattered(GaudiLinear(n, m, rounding=False, num_blocks=30), seed)
    layer.set_sigma(sigma)
    widths = Widths([layer], sigma)
    price = Price(torch.ones(2, 30).double())
    kept = sum(map(sum, kept_by_hardening(layer)))
    assert kept <= widths.hardened_cost(layer.width_frac.detach(), price)
    with torch.no_grad():
        layer.width_frac.clamp_(max=0)
    assert widths.cost(layer.width_frac.detach(), price) == 0


def test_real_widths_are_not_counted_far_above_what_hardening_keeps():
    layer = scattered(GaudiLinear(256, 256, rounding=False), 0, spread=1.0)
    layer.set_sigma(20.0)
    kept = sum(map(sum, kept_by_hardening(layer))) / (2 * 256)
    assert kept <= sum(map(sum, counted(layer, 20.0))) / (2 * 256) < kept + 4  # elements a side; the edge has 12


@pytest.mark.parametrize("sigma", SIGMAS)
@pytest.mark.parametrize("align", [1, 4])
def test_cost_never_falls_as_a_width_grows_and_is_at_least_the_hardened_cost(sigma, align):
    """Ripples make the number of kept elements fall at some widths: a search for a threshold must not meet that."""
    layer = GaudiLinear(50, 40, align=align, num_blocks=1)
    widths, price = Widths([layer], sigma), Price(torch.tensor([[3.0], [2.0]]).double(), base=5.0)
    grid = torch.cartesian_prod(torch.arange(41) / 40, torch.arange(51) / 50).view(41, 51, 2, 1)
    cost = widths.cost(grid, price)
    assert cost.shape == (41, 51) and (cost.diff(dim=0) >= 0).all() and (cost.diff(dim=1) >= 0).all()
    assert (cost >= widths.hardened_cost(grid, price)).all()
    assert cost[0].eq(5).all() and cost[-1, -1] == 5 + 3 * 40 + 2 * 50


def test_an_element_that_only_just_passes_the_threshold_is_counted_at_every_location():
    """The same mask is rounded differently at every location; the budget must hold at all of them."""
    n, w = 64, 3
    layer = GaudiLinear(n, 1, num_blocks=n)
    with torch.no_grad():
        layer.width_frac[0], layer.width_frac[1] = 1.0, w / n
        layer.location_frac[1] = torch.arange(n) / n
    price = Price(torch.tensor([[0.0], [1.0]]).expand(2, n).double())
    more_elsewhere = 0
    for sigma in torch.linspace(8.69424, 8.69427, 20, dtype=torch.float64).tolist():
        layer.set_sigma(sigma)
        kept = kept_by_hardening(layer)[1]
        more_elsewhere += max(kept) > kept[0]
        assert Widths([layer], sigma).cost(layer.width_frac.detach(), price) >= max(kept) * n
    assert more_elsewhere > 0  # it is that close


def test_without_smoothing_every_element_counts_and_no_more():
    assert kept_elements(7, math.inf).tolist() == list(range(8))


def test_smooth_masks_keep_soft_edges():
    kept = kept_elements(256, 30.0)
    assert kept[0] == 0 and kept[-1] == 256
    assert (kept[20:200] - torch.arange(20, 200)).unique().tolist() == [8]


def test_all_layers_stand_side_by_side():
    model = mixed_model(block_rank=2)
    layers = gaudi_layers(model)
    widths = Widths(layers, math.inf)
    width = widths.read()
    assert width.shape == (2, sum(layer.num_blocks for layer in layers))
    widths.write(width * torch.linspace(0, 1, width.shape[1]))
    assert torch.equal(widths.read(), width * torch.linspace(0, 1, width.shape[1]))
    found = torch.cat([layer.width_frac for layer in layers], 1)
    assert torch.equal(found, widths.read())
    price = Price(torch.full_like(width, 2.0, dtype=torch.float64))
    full = sum(2 * sum(layer._axes) * layer.num_blocks for layer in layers)
    assert widths.hardened_cost(torch.ones_like(width), price) == full


def test_mixed_rounding_and_alignment_are_kept_apart():
    layers = [scattered(GaudiLinear(24, 24, num_blocks=9, **o), 1) for o in ({}, {"align": 4}, {"rounding": False})]
    for layer in layers:
        layer.set_sigma(3.0)
    together = Widths(layers, 3.0)
    alone = [Widths([layer], 3.0).sizes(layer.width_frac.detach()) for layer in layers]
    assert torch.equal(together.sizes(together.read()), torch.cat(alone, 1))


def test_locations_are_wrapped():
    model = mlp()
    with torch.no_grad():
        for layer in gaudi_layers(model):
            layer.location_frac.uniform_(-3, 3)
    before = torch.cat([layer.location_frac.detach().double() for layer in gaudi_layers(model)], 1)
    Widths(gaudi_layers(model), math.inf).wrap_locations()
    after = torch.cat([layer.location_frac.detach().double() for layer in gaudi_layers(model)], 1)
    assert (after >= 0).all() and (after < 1).all()
    assert ((after - before) - (after - before).round()).abs().max() < 1e-6


@pytest.mark.parametrize("align", [1, 4, 30])
def test_a_block_that_would_vanish_keeps_one_element_on_its_longer_side(align):
    layer = GaudiLinear(20, 10, align=align, num_blocks=4)
    widths = Widths([layer], math.inf)
    before = torch.tensor([[0.3, 0.2, 0.3, 0.5], [0.2, 0.3, 0.3, 0.5]])
    width = torch.tensor([[0.0, 0.0, 0.0, 0.9], [0.0, 0.0, 0.01, 0.0]])
    after = widths.keep_alive(width, before)
    smallest = [min(align, n) for n in (10, 20)]
    expected = [[smallest[0], 0, 0, 9], [0, smallest[1], smallest[1], 0]]
    assert widths.rounded(after)[:, :3].tolist() == torch.tensor(expected).float()[:, :3].tolist()
    assert torch.equal(after[:, 3], width[:, 3])  # one width of 0 is dead and can return
    price = Price(torch.ones(2, 4).double())
    assert widths.cost(after * torch.tensor([1, 1, 1, 0]), price) == 0  # being kept alive costs nothing


def test_frozen_blocks_are_not_kept_alive():
    model = mlp()
    model[0].width_frac.requires_grad_(False)
    widths = Widths(gaudi_layers(model), math.inf)
    after = widths.keep_alive(torch.zeros_like(widths.read()), widths.read())
    assert not after[:, : model[0].num_blocks].any() and after[:, model[0].num_blocks :].any(0).all()

import copy

import pytest
import torch
from torch import nn

import gblr
from gblr.conversion import grams
from gblr.conversion.choosing import choose
from gblr.conversion.filters import linear_layers
from gblr.conversion.grams import LastInputs, add_gram_, gram_of
from gblr.conversion.statistics import collect


class Attention(nn.Module):
    """q and k are given one tensor, v another, o a third; `spoiled` changes the first between q and k."""

    def __init__(self, spoiled=False):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))
        self.spoiled = spoiled

    def forward(self, x):
        x = x + 0
        q = self.q(x)
        if self.spoiled:
            x.mul_(2)
        return self.o(q * self.k(x) + self.v(x + 1))


@pytest.mark.parametrize("size", [1, 255, 256, 600])
def test_half_of_a_gram_matrix_is_all_of_it(size, generator):
    x = torch.randn(50, size, generator=generator, dtype=torch.float64)
    start = torch.randn(size, size, generator=generator, dtype=torch.float64)
    found = start.clone()
    add_gram_(found, x)
    torch.testing.assert_close(found, start + x.T @ x)
    torch.testing.assert_close(gram_of(x), x.T @ x)


def test_wide_layers_need_no_second_matrix(generator, monkeypatch):
    """Neither in a product nor in what layers share."""
    monkeypatch.setattr(grams, "_SLICE", 300)
    x, last = torch.randn(20, 40, generator=generator, dtype=torch.float64), LastInputs()
    total, largest = torch.zeros(40, 40, dtype=torch.float64), []
    matmul = torch.Tensor.__matmul__

    def seen(a, b):
        found = matmul(a, b)
        largest.append(found.numel())
        return found

    monkeypatch.setattr(torch.Tensor, "__matmul__", seen)
    assert torch.equal(last.vectors(x, None, None), x)
    last.add_gram_(total)
    monkeypatch.undo()
    assert max(largest) <= 300
    torch.testing.assert_close(total, x.T @ x)


@pytest.mark.parametrize("spoiled", [False, True])
def test_layers_with_one_input_share_its_product_and_no_others(spoiled, generator, monkeypatch):
    model = Attention(spoiled)
    made, gram = [], grams.gram_of
    monkeypatch.setattr(grams, "gram_of", lambda x: made.append(len(x)) or gram(x))
    sources, _ = choose(model, linear_layers(include=("q", "k", "v", "o")), split_fused=True)
    batches = [torch.randn(5, 8, generator=generator) for _ in range(2)]
    found = collect(model, sources, batches)
    assert len(made) == 2 * (4 if spoiled else 3)
    x = torch.cat(batches).double()
    torch.testing.assert_close(found["q"].gram, x.T @ x, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found["k"].gram, (4 if spoiled else 1) * x.T @ x, rtol=1e-5, atol=1e-5)
    later = (2 if spoiled else 1) * x + 1
    torch.testing.assert_close(found["v"].gram, later.T @ later, rtol=1e-5, atol=1e-5)
    assert {layer.positions for layer in found.values()} == {10}


@pytest.mark.parametrize("spoiled", [False, True])
def test_a_streamed_block_shares_the_product_of_an_input_that_was_not_changed_in_between(spoiled, generator):
    model = Attention(spoiled)
    sources, _ = choose(model, linear_layers(include=("q", "k", "v", "o")), split_fused=True)
    seen = grams.Grams(sources, lambda name, size: torch.zeros(size, size, dtype=torch.float64))
    x = torch.randn(5, 8, generator=generator)
    with torch.no_grad(), seen.hooked({s.name: s.module for s in sources}, lambda name: None):
        model(x)
    assert seen.owners["k"] == ("k" if spoiled else "q")
    gram = x.double().T @ x.double() * (4 if spoiled else 1)
    torch.testing.assert_close(seen.grams[seen.owners["k"]], gram, rtol=1e-5, atol=1e-5)


def test_layers_that_cease_to_share_their_input_are_refused(generator):
    """What k was given would be counted as that of q."""
    model = nn.ModuleDict({"q": nn.Linear(8, 8), "k": nn.Linear(8, 8)})
    sources, _ = choose(model, linear_layers(), split_fused=True)
    seen = grams.Grams(sources, lambda name, size: torch.zeros(size, size, dtype=torch.float64))
    x = torch.randn(5, 8, generator=generator)
    with torch.no_grad(), seen.hooked(dict(model.items()), lambda name: None):
        model["q"](x), model["k"](x)
    with (
        pytest.raises(ValueError, match="k is given the same input as q in the first batch"),
        torch.no_grad(),
        seen.hooked(dict(model.items()), lambda name: None),
    ):
        model["q"](x), model["k"](x + 1)


def test_the_padding_of_another_batch_is_not_taken_for_this_one(generator):
    x, last = torch.randn(2, 3, 4, generator=generator), LastInputs()
    first = last.vectors(x, None, torch.tensor([[True, True, False], [True, False, False]]))
    same = last.vectors(x, None, torch.tensor([[True, True, False], [True, False, False]]))
    other = last.vectors(x, None, torch.tensor([[True, True, True], [True, False, False]]))
    assert same is first and torch.equal(other, x.flatten(0, 1)[:4])
    assert torch.equal(last.vectors(x, None, None), x.flatten(0, 1))


def test_inputs_of_inference_mode_are_never_taken_for_others():
    """Nobody counts their changes."""
    last = LastInputs()
    with torch.inference_mode():
        x = torch.ones(2, 3)
        first = last.vectors(x, None, None).clone()
        x.mul_(2)
        assert torch.equal(last.vectors(x, None, None), 2 * first)


def test_calibration_under_autocast_runs_the_model_in_bfloat16_and_nothing_else(generator):
    """The model that is measured; sums and fits are as precise as without."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32))
    batches, seen = [torch.randn(64, 32, generator=generator) for _ in range(2)], set()
    model[1].register_forward_hook(lambda module, args, output: seen.add(output.dtype))
    plain, other = copy.deepcopy(model), copy.deepcopy(model)
    where, config = linear_layers(include=("0", "2")), gblr.GaudiConfig(0.6)
    expected = gblr.convert_(plain, config, where, batches)
    assert seen == {torch.float32}
    seen.clear()
    with torch.autocast("cpu", torch.bfloat16):
        report = gblr.convert_(other, config, where, batches)
        gblr.heal_(other, copy.deepcopy(model), batches)
    assert seen == {torch.bfloat16}
    assert report.rows[0].error == pytest.approx(expected.rows[0].error, rel=1e-6)  # its inputs are the batches
    assert report.rows[1].error == pytest.approx(expected.rows[1].error, rel=0.02)
    assert {p.dtype for p in other.parameters()} == {torch.float32}

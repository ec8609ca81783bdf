"""Attention is computed once where it would come out the same again, and only there."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import gblr
from gblr.conversion.kept_attention import KeptAttention
from gblr.conversion.refit import refit_layers_

from .test_block_runs import gpt2, llama


class Attentions(TorchDispatchMode):
    """Counts what is really computed."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += "scaled_dot_product" in func.__name__
        return func(*args, **(kwargs or {}))


class Block(nn.Module):
    """Attention, a layer, and attention once more."""

    def __init__(self, in_place=False):
        super().__init__()
        self.layer, self.in_place = nn.Linear(8, 8), in_place

    def forward(self, x):
        x = functional.scaled_dot_product_attention(x, x, x)
        y = x.mul_(2) if self.in_place else x * 2
        y = self.layer(y)
        return functional.scaled_dot_product_attention(y, y, y)


@torch.no_grad()
def run(kept, block, x, number=0, **options):
    with Attentions() as seen, kept.run(block, number, **options):
        found = block(x)
    return found, seen.count


def settling(kept, in_place=False):
    block = Block(in_place)
    block.layer.register_forward_pre_hook(lambda *_: kept.settle())
    return block


def test_what_comes_before_a_changing_layer_is_kept_and_what_comes_after_is_not():
    kept, x = KeptAttention(), torch.randn(1, 2, 3, 8)
    block = settling(kept)
    assert run(kept, block, x)[1] == 2
    nn.init.ones_(block.layer.weight)
    found, computed = run(kept, block, x)
    assert computed == 1
    torch.testing.assert_close(found, block(x))


def test_each_batch_has_its_own_and_another_block_none():
    kept, (x, y) = KeptAttention(), torch.randn(2, 1, 2, 3, 8)
    block = Block()
    for number, each in enumerate((x, y)):
        assert run(kept, block, each, number)[1] == 2
    for number, each in enumerate((x, y)):
        found, computed = run(kept, block, each, number)
        assert computed == 0
        torch.testing.assert_close(found, block(each))
    kept.forget()
    assert run(kept, block, x)[1] == 2


def test_the_last_run_uses_what_is_there_and_keeps_nothing():
    kept, x = KeptAttention(), torch.randn(1, 2, 3, 8)
    block = Block()
    assert [run(kept, block, x, is_last=True)[1] for _ in range(2)] == [2, 2]
    run(kept, block, x)
    assert run(kept, block, x, is_last=True)[1] == 0


def test_what_the_block_changed_in_place_is_computed_again():
    kept, x = KeptAttention(), torch.randn(1, 2, 3, 8)
    block = Block(in_place=True)
    expected = block(x)
    for _ in range(3):
        found, computed = run(kept, block, x)
        torch.testing.assert_close(found, expected)
        assert computed >= 1


def test_tensors_that_count_no_changes_are_not_kept():
    kept, x = KeptAttention(), torch.randn(1, 2, 3, 8)
    block = Block()
    with torch.inference_mode():
        assert [run(kept, block, x)[1] for _ in range(2)] == [2, 2]


def test_compiled_blocks_run_as_they_are():
    kept, x = KeptAttention(), torch.randn(1, 2, 3, 8)
    block = Block()
    expected = block(x)
    block.compile(backend="eager")
    for _ in range(2):
        found, computed = run(kept, block, x)
        torch.testing.assert_close(found, expected)
        assert computed == 2


@pytest.mark.parametrize("make", (llama, gpt2))
def test_a_refit_computes_attention_once_a_block(make):
    """Of the model and of its teacher, for each batch; the first looks at both models take runs of one batch."""
    teacher, batches = make()
    dense = copy.deepcopy(teacher.eval())
    counts = []
    for given in (batches, 3 * batches):
        model = copy.deepcopy(dense)
        gblr.convert_(model, gblr.LowRankConfig(0.5))
        with Attentions() as seen:
            refit_layers_(model, teacher, given)
        counts.append(seen.count)
    blocks = 3
    assert counts[1] - counts[0] == blocks * 2 * (3 - 1) * len(batches)

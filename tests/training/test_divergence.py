"""The divergence of scores against its plain formula."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from gblr.training import divergence as module
from gblr.training.divergence import divergence

ROWS, CLASSES = 12, 7


def plain(found, aimed, temperature, weight=None):
    found, aimed = ((scores.float() / temperature).log_softmax(-1) for scores in (found, aimed))
    each = nn.functional.kl_div(found, aimed, reduction="none", log_target=True).sum(-1)
    weight = torch.ones_like(each) if weight is None else weight
    return temperature**2 * (each * weight).sum() / weight.sum()


def scores(generator, dtype=torch.float32, shape=(3, 4, CLASSES)):
    found, aimed = (2 * torch.randn(shape, generator=generator) for _ in range(2))
    return found.to(dtype).requires_grad_(), aimed.to(dtype)


@pytest.mark.parametrize("at_once", [1, 5 * CLASSES, 1 << 26])
@pytest.mark.parametrize("temperature", [1.0, 4.0])
@pytest.mark.parametrize("weighted", [False, True])
def test_value_and_gradient_are_those_of_the_formula_however_many_rows_at_once(
    at_once, temperature, weighted, generator, monkeypatch
):
    monkeypatch.setattr(module, "_AT_ONCE", at_once)
    found, aimed = scores(generator)
    weight = torch.rand(3, 4, generator=generator) if weighted else None
    value, expected = (form(found, aimed, temperature, weight) for form in (divergence, plain))
    torch.testing.assert_close(value, expected)
    slopes = [torch.autograd.grad(3.0 * one, found)[0] for one in (value, expected)]
    torch.testing.assert_close(*slopes)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_rounds_the_gradient_alone(dtype, generator):
    """Scaled as mixed precision scales losses."""
    found, aimed = scores(generator, dtype)
    value, expected = (form(found, aimed, 1.0) for form in (divergence, plain))
    torch.testing.assert_close(value, expected)
    mine, theirs = (torch.autograd.grad(1024 * one, found)[0].float() for one in (value, expected))
    assert (mine - theirs).norm() < 2 * torch.finfo(dtype).eps * theirs.norm()


def test_classes_that_both_rule_out_count_nothing(generator):
    """Some models give words that fill up their vocabulary a score of -inf."""
    found, aimed = scores(generator)
    fill = torch.full((3, 4, 2), -torch.inf)
    filled = torch.cat([found, fill], -1)
    value = divergence(filled, torch.cat([aimed, fill], -1))
    torch.testing.assert_close(value, plain(found, aimed, 1.0))
    torch.testing.assert_close(*(torch.autograd.grad(one, found)[0] for one in (value, divergence(found, aimed))))


def test_one_sample_needs_no_axis_of_its_own(generator):
    found, aimed = scores(generator, shape=(CLASSES,))
    torch.testing.assert_close(divergence(found, aimed, 2.0), plain(found, aimed, 2.0))


class _Largest(TorchDispatchMode):
    """The most elements of a tensor in float32 that any operation gives."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor) and found.dtype == torch.float32:
            self.most = max(self.most, found.numel())
        return found


def test_no_copy_of_all_scores_is_made_in_float32(generator, monkeypatch):
    monkeypatch.setattr(module, "_AT_ONCE", 2 * CLASSES)
    found, aimed = scores(generator, torch.float16)
    with _Largest() as mine:
        divergence(found, aimed).backward()
    with _Largest() as theirs:
        plain(found, aimed, 1.0).backward()
    assert mine.most == 2 * CLASSES
    assert theirs.most == ROWS * CLASSES

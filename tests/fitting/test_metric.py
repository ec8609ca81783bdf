import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gblr.fitting.metric import GramMetric, PlainMetric, PreparedAtOnce, make_metric
from tests.fitting.baselines import randn, random_gram


def leftover(target: torch.Tensor, content: torch.Tensor, gram: torch.Tensor) -> float:
    error = target - content
    return float(((error @ gram) * error).sum())


def best_content(target: torch.Tensor, gram: torch.Tensor, start: int, size: int) -> torch.Tensor:
    """Least squares on the columns of the interval, by the normal equations."""
    columns = [(start + i) % gram.shape[0] for i in range(size)]
    content = torch.zeros_like(target)
    if size:
        inner = torch.linalg.inv(gram[columns][:, columns])
        content[:, columns] = (target @ gram)[:, columns] @ inner
    return content


def case(length: int, rank: int, seed: int):
    generator = torch.Generator().manual_seed(seed)
    return randn(2, rank, length, generator=generator), random_gram(2, length, generator)


@settings(max_examples=25)
@given(st.integers(2, 9), st.integers(1, 3), st.integers(0, 99), st.data())
def test_content_on_a_given_interval_is_the_least_squares_solution(length, rank, seed, data):
    target, gram = case(length, rank, seed)
    start = data.draw(st.lists(st.integers(0, length - 1), min_size=2, max_size=2))
    size = data.draw(st.lists(st.integers(0, length), min_size=2, max_size=2))
    found = GramMetric(gram).restrict(target, torch.tensor(start), torch.tensor(size), max(size))
    for i in range(2):
        torch.testing.assert_close(found[i], best_content(target[i], gram[i], start[i], size[i]), rtol=1e-6, atol=1e-8)


@settings(max_examples=25)
@given(st.integers(2, 9), st.integers(1, 3), st.integers(0, 99), st.data())
def test_contents_are_the_same_whether_blocks_are_prepared_one_by_one_or_at_once(length, rank, seed, data):
    target, gram = case(length, rank, seed)
    metric, num = GramMetric(gram), 3
    start, size = (
        torch.tensor(data.draw(st.lists(st.lists(numbers, min_size=num, max_size=num), min_size=2, max_size=2)))
        for numbers in (st.integers(0, length - 1), st.integers(0, length))
    )
    one_by_one = metric.prepare(start, size)
    at_once = PreparedAtOnce(metric, start, size, max(1, int(size.max())))
    for k in range(num):
        expected = metric.restrict(target, start[:, k], size[:, k], int(size[:, k].max()))
        torch.testing.assert_close(one_by_one.restrict(target, k), expected)
        torch.testing.assert_close(at_once.restrict(target, k), expected, rtol=1e-6, atol=1e-8)


@settings(max_examples=25)
@given(st.integers(2, 9), st.integers(1, 3), st.integers(0, 99), st.sampled_from([0.0, 0.05, 0.5, 5.0]))
def test_the_chosen_interval_is_the_best_of_all(length, rank, seed, price):
    target, gram = case(length, rank, seed)
    content, start, size, _ = GramMetric(gram).project(target, torch.full((2,), price, dtype=torch.float64), align=1)
    for i in range(2):
        best = min(
            leftover(target[i], best_content(target[i], gram[i], s, w), gram[i]) + price * w
            for s in range(length)
            for w in range(length + 1)
        )
        assert leftover(target[i], content[i], gram[i]) + price * int(size[i]) == pytest.approx(best, rel=1e-6)
        expected = best_content(target[i], gram[i], int(start[i]), int(size[i]))
        torch.testing.assert_close(content[i], expected, rtol=1e-5, atol=1e-7)


@settings(max_examples=25)
@given(st.sampled_from([8, 12, 10, 13]), st.integers(0, 99), st.sampled_from([0.0, 0.05, 0.5]))
def test_aligned_intervals_start_and_end_on_multiples_or_take_all(length, seed, price):
    target, gram = case(length, 2, seed)
    content, start, size, _ = GramMetric(gram, align=4).project(target, torch.full((2,), price, dtype=torch.float64), 4)
    for i in range(2):
        s, w = int(start[i]), int(size[i])
        assert s % 4 == 0 and (w % 4 == 0 or w == length)
        assert length % 4 == 0 or s + w <= length
        torch.testing.assert_close(content[i], best_content(target[i], gram[i], s, w), rtol=1e-5, atol=1e-7)


def test_an_identity_gram_is_the_plain_metric(generator):
    target = randn(2, 2, 12, generator=generator)
    identity = torch.eye(12, dtype=torch.float64).expand(2, -1, -1)
    price = torch.full((2,), 0.8, dtype=torch.float64)
    plain, weighted = PlainMetric().project(target, price, 1), GramMetric(identity).project(target, price, 1)
    for a, b in zip(plain, weighted, strict=True):
        torch.testing.assert_close(a, b)
    assert torch.equal(PlainMetric().times(target), target)
    torch.testing.assert_close(GramMetric(identity).times(target), target)


def test_the_metric_follows_from_the_gram():
    assert isinstance(make_metric(None, 1), PlainMetric)
    assert isinstance(make_metric(torch.eye(4)[None], 1), GramMetric)

import torch
from hypothesis import given
from hypothesis import strategies as st

from gblr.fitting.intervals import best_interval, best_window, interval_mask

GAINS = st.lists(st.integers(0, 9), min_size=1, max_size=9)
PRICES = st.sampled_from([0.0, 0.5, 2.5, 4.5, 8.5, 20.0])


def allowed(length: int, align: int) -> list[tuple[int, int]]:
    """Every interval (start, size) that may be chosen, the empty one first."""
    if length % align == 0:
        places = [(s, w) for w in range(align, length + 1, align) for s in range(0, length, align)]
    else:
        places = [(s, w) for w in range(align, length + 1, align) for s in range(0, length - w + 1, align)]
        places.append((0, length))
    return [(0, 0), *places]


def value(gain: torch.Tensor, price: float, start: int, size: int) -> float:
    return sum(float(gain[(start + i) % len(gain)]) - price for i in range(size))


@given(GAINS, PRICES, st.integers(1, 4))
def test_no_interval_is_better(gains, price, align):
    gain = torch.tensor(gains, dtype=torch.float64)
    start, size = (int(t) for t in best_interval(gain, torch.tensor(price, dtype=torch.float64), align))
    places = allowed(len(gain), align)
    assert size == 0 or (start, size) in places or (size == len(gain) and start % align == 0)
    best = max(value(gain, price, *place) for place in places)
    assert abs(value(gain, price, start, size) - best) < 1e-9
    assert size > 0 or best <= 1e-9


@given(GAINS, st.integers(1, 9), st.integers(1, 4))
def test_no_window_of_that_size_is_better(gains, num_cells, align):
    gain = torch.tensor(gains, dtype=torch.float64)
    start, size = (int(t) for t in best_window(gain, torch.tensor(num_cells), align))
    places = [place for place in allowed(len(gain), align) if place[1] == size]
    assert size == min(num_cells, len(gain) // align) * align or (len(gain) < align and size == len(gain))
    assert (start, size) in places
    assert value(gain, 0.0, start, size) == max(value(gain, 0.0, *place) for place in places)


@given(st.lists(st.lists(st.integers(0, 9), min_size=6, max_size=6), min_size=1, max_size=4), st.integers(1, 4))
def test_a_batch_gives_what_each_row_gives_alone(rows, align):
    gain = torch.tensor(rows, dtype=torch.float64)
    price = torch.linspace(0.3, 5, len(rows), dtype=torch.float64)
    start, size = best_interval(gain, price, align)
    for i in range(len(rows)):
        alone = best_interval(gain[i], price[i], align)
        assert (int(start[i]), int(size[i])) == (int(alone[0]), int(alone[1]))


def test_a_run_over_the_end_is_found():
    start, size = best_interval(torch.tensor([5.0, 0, 0, 0, 5, 5]), torch.tensor(1.0))
    assert (int(start), int(size)) == (4, 3)


def test_nothing_is_taken_when_nothing_pays():
    assert int(best_interval(torch.ones(5), torch.tensor(2.0))[1]) == 0


def test_an_align_above_the_axis_leaves_all_or_nothing():
    for price, expected in ((0.5, 5), (2.0, 0)):
        assert int(best_interval(torch.ones(5), torch.tensor(price), align=8)[1]) == expected


def test_the_mask_is_the_cyclic_interval():
    inside = interval_mask(torch.tensor([3, 0, 2]), torch.tensor([3, 0, 5]), length=5)
    assert inside.long().tolist() == [[1, 0, 0, 1, 1], [0] * 5, [1] * 5]

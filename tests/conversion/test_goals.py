import pytest
import torch

from gblr.conversion import goals
from gblr.conversion.goals import Halves, Inputs, Moments, goal, halves_of

CPU = torch.device("cpu")


def seen(x, y, batch=8):
    halves = Halves.zeros(x.shape[1], y.shape[1], CPU)
    for part in zip(x.split(batch), y.split(batch), strict=True):
        halves.add(halves_of(part[0]), part[1])
    return halves


def randn(*shape, generator):
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def test_outputs_that_follow_from_the_inputs_give_the_weight_itself(generator):
    dense, true, x = (randn(*shape, generator=generator) for shape in ((4, 6), (4, 6), (200, 6)))
    halves = seen(x, x @ true.T)
    found = goal(dense, halves, halves.whole())
    assert float((found - true).norm() / (dense - true).norm()) < 0.02  # the damping is 0.01


@pytest.mark.parametrize("rounding", [0.0, 1e-9])
def test_where_nothing_is_missing_the_dense_weight_stays(rounding, generator):
    """Sums of squares cancel there, and may leave an error below 0."""
    dense, x = randn(4, 6, generator=generator), randn(200, 6, generator=generator)
    halves = seen(x, x @ dense.T + rounding * randn(200, 4, generator=generator))
    torch.testing.assert_close(goal(dense, halves, halves.whole()), dense, rtol=1e-8, atol=1e-8)


def test_inputs_that_are_all_alike_call_for_no_correction(generator):
    """Without their mean, which a bias takes care of, rounding is left: no matrix that could be factored."""
    x, y = (torch.randn(1, size, generator=generator).expand(60, size) for size in (32, 4))
    dense, halves = randn(4, 32, generator=generator), seen(x, y, batch=6).centred()
    assert torch.equal(goal(dense, halves, halves.whole()), dense)


@pytest.mark.parametrize("samples", [40, 160, 5000])
def test_few_samples_do_little_harm_on_new_inputs_and_more_of_them_help(samples, generator):
    """The teacher's outputs have a part that the inputs do not tell, as in a model whose other layers have errors."""
    dense, change = randn(8, 32, generator=generator), 0.2 * randn(8, 32, generator=generator)

    def draw(count):
        x = randn(count, 32, generator=generator)
        return x, x @ (dense + change).T + 3 * randn(count, 8, generator=generator)

    halves, (new_x, new_y) = seen(*draw(samples)), draw(20_000)
    found, plain = goal(dense, halves, halves.whole()), dense + goals._correction(dense, halves.whole())
    stayed, ours, theirs = (float((new_y - new_x @ w.T).square().mean()) for w in (dense, found, plain))
    if samples == 40:  # for 32 numbers of every row
        assert ours < 1.1 * stayed and theirs > 2 * stayed
    elif samples == 160:
        assert ours < 0.98 * stayed and ours < theirs
    else:  # half of the correction, as it explains a tenth of what is missing, has three quarters of its gain
        assert stayed - ours > 0.7 * (stayed - theirs) > 0


def test_halves_are_samples_of_every_batch_and_add_up(generator):
    x, y = randn(21, 3, generator=generator), randn(21, 2, generator=generator)
    halves, whole = seen(x, y), Moments.zeros(3, 2, CPU)
    whole.add(Inputs.of(x), y)
    assert (halves.first.count, halves.second.count) == (4 + 4 + 2, 4 + 4 + 3)
    both = halves.whole()
    assert both.count == 21
    for name in ("gram", "cross", "inputs", "outputs", "squares"):
        torch.testing.assert_close(getattr(both, name), getattr(whole, name))
    torch.testing.assert_close(both.centred().gram, (x - x.mean(0)).T @ (x - x.mean(0)))


def test_sums_of_float32_are_as_good_as_those_of_float64_even_around_large_means(generator):
    """Products about zero would leave nothing of these variances but rounding."""
    x = (randn(500, 6, generator=generator) + 3000).float()
    y = (x.double() @ randn(6, 4, generator=generator) + 1e4).float()
    found, exact = (seen(*pair, 100).whole().centred() for pair in ((x, y), (x.double(), y.double())))
    for name in ("gram", "cross", "squares"):
        torch.testing.assert_close(getattr(found, name), getattr(exact, name), rtol=1e-3, atol=1e-2)
    naive = (x.T @ x).double() - torch.outer(x.double().sum(0), x.double().sum(0)) / len(x)
    assert float((naive - exact.gram).abs().max()) > 10


@pytest.mark.parametrize(("rows", "scale"), [(1, 1.0), (4, 0.0)])
def test_the_dense_weight_stays_where_nothing_can_be_told(rows, scale, generator):
    """One sample, so that a half is empty; inputs of zeros."""
    dense = randn(4, 6, generator=generator)
    halves = seen(scale * randn(rows, 6, generator=generator), randn(rows, 4, generator=generator))
    assert torch.equal(goal(dense, halves, halves.whole()), dense)

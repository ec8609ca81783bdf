from dataclasses import dataclass

import pytest
import torch

from gblr.fitting.config import BlastConfig, Config, GaudiConfig, LowRankConfig, MonarchConfig, PixelflyConfig
from gblr.fitting.fit import fit, fit_batch, num_ticks, prepare_gram, unusual_size
from gblr.fitting.threads import few_threads
from tests.fitting.baselines import randn
from tests.helpers import raises_value_error

EVERY = [
    GaudiConfig(0.6, steps=2),
    LowRankConfig(0.6),
    MonarchConfig(0.6),
    PixelflyConfig(0.6, steps=2),
    BlastConfig(0.6, steps=2),
]
every_config = pytest.mark.parametrize("config", EVERY, ids=lambda config: type(config).__name__)


@every_config
@pytest.mark.parametrize("weighted", [False, True])
def test_every_config_fits_within_its_cost(config, weighted, generator):
    weight = randn(24, 16, generator=generator)
    x = randn(50, 16, generator=generator)
    matrix = fit(weight, config, gram=x.T @ x if weighted else None)
    assert matrix.shape == (24, 16)
    assert 0 < matrix.num_mults <= 0.6 * 24 * 16
    assert float((matrix.to_dense() - weight).norm() / weight.norm()) < 1


@every_config
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_the_dtype_of_the_weight_comes_back_and_costs_no_more_error(config, dtype, generator):
    weight = randn(24, 16, generator=generator)
    exact, found = fit(weight, config), fit(weight.to(dtype), config)
    assert found.to_dense().dtype == dtype
    error, exact_error = (float((m.to_dense().double() - weight).norm() / weight.norm()) for m in (found, exact))
    assert error < exact_error + 0.03


def test_float64_is_fitted_in_float64(generator):
    weight = randn(3, 24, generator=generator).T @ randn(3, 16, generator=generator)
    matrix = fit(weight, GaudiConfig(0.5, steps=1, init="low_rank"))
    assert float((matrix.to_dense() - weight).norm() / weight.norm()) < 1e-6


@every_config
def test_the_weight_and_the_gram_are_left_alone(config, generator):
    weight, x = torch.randn(24, 16, generator=generator), torch.randn(50, 16, generator=generator)
    weight.requires_grad_()
    gram = x.T @ x
    before = weight.detach().clone(), gram.clone()
    matrix = fit(weight, config, gram)
    assert torch.equal(weight, before[0]) and torch.equal(gram, before[1])
    assert not matrix.to_dense().requires_grad


@every_config
def test_the_scale_of_the_gram_does_not_matter(config, generator):
    weight, x = randn(24, 16, generator=generator), randn(50, 16, generator=generator)
    small, large = (fit(weight, config, gram=scale * x.T @ x).to_dense() for scale in (1e-6, 1e6))
    torch.testing.assert_close(small, large, rtol=1e-5, atol=1e-5)


@every_config
@pytest.mark.parametrize("weighted", [False, True])
def test_the_scale_of_the_weight_does_not_matter(config, weighted, generator):
    weight, x = (torch.randn(size, 16, generator=generator) for size in (24, 50))
    gram = x.T @ x if weighted else None
    expected = fit(weight, config, gram).to_dense()
    for scale in (2.0**-80, 2.0**80):
        torch.testing.assert_close(fit(scale * weight, config, gram).to_dense() / scale, expected, rtol=1e-3, atol=1e-3)


def test_weights_of_usual_size_are_not_scaled():
    weight = torch.ones(3, 4, 5) * torch.tensor([1e-6, 0.0, 1e6])[:, None, None]
    assert unusual_size(weight) is None
    weight[1, 2, 3] = -1e-20
    size = unusual_size(weight)
    assert size[0] == size[2] == 1 and 0.5 < 1e-20 / float(size[1]) <= 2


@every_config
def test_a_layer_that_saw_no_input_is_fitted_plainly(config, generator):
    weight = randn(24, 16, generator=generator)
    plain, unused = fit(weight, config), fit(weight, config, gram=torch.zeros(16, 16, dtype=torch.float64))
    error, unused_error = (float((m.to_dense() - weight).norm()) for m in (plain, unused))
    assert unused_error < 1.1 * error


@every_config
def test_inputs_in_a_subspace_make_no_trouble(config, generator):
    weight, x = torch.randn(24, 16, generator=generator), torch.randn(3, 16, generator=generator)
    matrix = fit(weight, config, gram=x.T @ x)
    assert bool(matrix.to_dense().isfinite().all())


def test_a_prepared_gram_has_a_mean_diagonal_of_1_and_can_be_factored(generator):
    x = randn(2, 3, 8, generator=generator)
    gram = prepare_gram(x.mT @ x)
    torch.testing.assert_close(gram.diagonal(dim1=1, dim2=2).mean(1), torch.full((2,), 1.01, dtype=torch.float64))
    torch.linalg.cholesky(gram)
    assert torch.equal(prepare_gram(torch.zeros(1, 2, 2)), 0.01 * torch.eye(2)[None])
    of_tiny_inputs = torch.tensor([[[1.4e-45, 2.8e-45], [2.8e-45, 1.4e-45]]])  # a few of the smallest numbers there are
    assert torch.equal(prepare_gram(of_tiny_inputs.double()), 0.01 * torch.eye(2).double()[None])


def test_a_weight_without_values_is_refused():
    with raises_value_error("`weight`", "meta"):
        fit(torch.empty(8, 8, device="meta"), LowRankConfig(0.5))


def test_weights_that_are_no_matrix_of_finite_floats_are_refused():
    config = LowRankConfig(0.5)
    for bad in (float("nan"), float("inf")):
        weight = torch.ones(8, 6)
        weight[3, 2] = bad
        with raises_value_error("`weight`", "NaN", "infinity"):
            fit(weight, config)
    with raises_value_error("`weight`", "2-D", (2, 8, 6)):
        fit(torch.ones(2, 8, 6), config)
    with raises_value_error("`weight`", "torch.int64"):
        fit(torch.ones(8, 6, dtype=torch.long), config)


def test_grams_that_do_not_fit_are_refused():
    with raises_value_error("`gram`", (6, 6), (8, 8)):
        fit(torch.ones(8, 6), LowRankConfig(0.5), gram=torch.eye(8))
    with raises_value_error("`gram`", "NaN"):
        fit(torch.ones(8, 6), LowRankConfig(0.5), gram=torch.full((6, 6), torch.nan))


def test_an_unknown_config_is_refused_by_name():
    @dataclass(frozen=True)
    class MyConfig(Config):
        pass

    with pytest.raises(TypeError, match="MyConfig"):
        fit(torch.ones(8, 6), MyConfig(0.5))
    assert num_ticks(MyConfig(0.5)) == 0


@every_config
def test_ticks_are_as_many_as_announced(config, generator):
    ticks = []
    weight = torch.randn(2, 24, 16, generator=generator)
    fit_batch(config, weight, None, torch.tensor([200.0, 220.0]), lambda: ticks.append(1))
    assert len(ticks) == num_ticks(config)


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_the_number_of_threads_is_restored(two_threads):
    fit(torch.randn(24, 16), GaudiConfig(0.5, steps=1))
    assert torch.get_num_threads() == 2
    with raises_value_error("`relative_cost`"):
        fit(torch.randn(24, 16), GaudiConfig(0.001))
    assert torch.get_num_threads() == 2


def test_small_fits_stay_on_one_thread(two_threads):
    with few_threads(torch.zeros(1, 24, 16)):
        assert torch.get_num_threads() == 1
    with few_threads(torch.zeros(1, 1024, 1024)):
        assert torch.get_num_threads() == 2

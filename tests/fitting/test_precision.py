import copy

import pytest
import torch
from torch import nn

import gblr
from gblr.fitting.precision import full_precision


@pytest.fixture(params=["autocast", "tf32"])
def less_precise(request):
    if request.param == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    yield
    assert torch.get_float32_matmul_precision() == "medium"  # the caller's choice is given back
    torch.set_float32_matmul_precision(before)


def test_what_was_asked_for_is_given_back():
    with torch.autocast("cpu", torch.bfloat16):
        with full_precision():
            assert not torch.is_autocast_enabled("cpu")
        assert torch.is_autocast_enabled("cpu")


def test_products_are_those_of_float32(less_precise, generator):
    x = torch.randn(64, 64, generator=generator)
    with full_precision():
        found = x @ x
        settings = torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision
    assert found.dtype == torch.float32 and set(settings) <= {"ieee", "none"}
    torch.testing.assert_close(found.double(), x.double() @ x.double(), rtol=1e-5, atol=1e-5)


CONFIGS = [
    gblr.GaudiConfig(0.6),
    gblr.GaudiConfig(0.6, block_rank=4),
    gblr.LowRankConfig(0.6),
    gblr.MonarchConfig(0.6),
    gblr.PixelflyConfig(0.6),
    gblr.BlastConfig(0.6),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{type(config).__name__}")
def test_fits_come_out_the_same(config, generator):
    weight, x = torch.randn(32, 32, generator=generator), torch.randn(100, 32, generator=generator)
    gram = x.T @ x
    expected = gblr.fit(weight, config, gram)
    with torch.autocast("cpu", torch.bfloat16):
        found = gblr.fit(weight, config, gram)
    assert torch.equal(found.to_dense(), expected.to_dense())


@pytest.mark.parametrize("step", [lambda model: gblr.harden_(model, plan="dense"), gblr.densify_])
def test_weights_that_are_put_together_are_precise(step, generator):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.GELU())
    gblr.convert_(model, gblr.GaudiConfig(0.6), where=gblr.linear_layers(include=("0",)))
    other, x = copy.deepcopy(model), torch.randn(4, 32, generator=generator)
    with torch.autocast("cpu", torch.bfloat16):
        step(other)
    torch.testing.assert_close(other.eval()(x), model.eval()(x), rtol=1e-5, atol=1e-5)

import pytest
import torch

import gblr
from gblr.fitting import descent, metric
from gblr.fitting.svd import squared_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("block_rank", [1, 4, 16])
@pytest.mark.parametrize("weighted", [False, True])
def test_visits_that_are_captured_fit_as_visits_one_by_one(block_rank, weighted, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(96, 64, generator=generator).cuda()
    inputs = torch.randn(300, 64, generator=generator).cuda()
    gram = inputs.T @ inputs if weighted else None
    config = gblr.GaudiConfig(0.4, block_rank=block_rank)
    captured = gblr.fit(weight, config, gram)
    monkeypatch.setattr(descent._Visits, "_captured", lambda self: None)
    one_by_one = gblr.fit(weight, config, gram)
    torch.testing.assert_close(captured.to_dense(), one_by_one.to_dense(), rtol=1e-4, atol=1e-4)
    assert captured.num_mults == one_by_one.num_mults


@pytest.mark.parametrize("block_rank", [1, 4, 16])
@pytest.mark.parametrize("weighted", [False, True])
def test_fits_are_as_good_as_on_a_cpu(block_rank, weighted):
    generator = torch.Generator().manual_seed(0)
    weight, inputs = torch.randn(96, 64, generator=generator), torch.randn(300, 64, generator=generator)
    gram = inputs.T @ inputs if weighted else torch.eye(64)
    config = gblr.GaudiConfig(0.4, block_rank=block_rank)
    errors = []
    for device in ("cpu", "cuda"):
        found = gblr.fit(weight.to(device), config, gram.to(device) if weighted else None)
        errors.append(float(squared_error((found.to_dense().cpu() - weight)[None], gram[None])))
        assert found.num_mults <= 0.4 * weight.numel()
    assert errors[1] == pytest.approx(errors[0], rel=1e-2)


def test_blocks_whose_systems_are_solved_at_once_fit_as_one_by_one(monkeypatch):
    """By their errors: rounding turns blocks within what they span together, so contents differ in the third digit."""
    generator = torch.Generator().manual_seed(0)
    weight, inputs = torch.randn(96, 64, generator=generator).cuda(), torch.randn(300, 64, generator=generator).cuda()
    gram, config = inputs.T @ inputs, gblr.GaudiConfig(0.4, block_rank=4)
    at_once = gblr.fit(weight, config, gram)
    monkeypatch.setattr(metric, "room", lambda device: 0)
    one_by_one = gblr.fit(weight, config, gram)
    errors = [float(squared_error((m.to_dense() - weight)[None], gram[None])) for m in (at_once, one_by_one)]
    assert errors[0] == pytest.approx(errors[1], rel=1e-3)
    assert at_once.num_mults == one_by_one.num_mults

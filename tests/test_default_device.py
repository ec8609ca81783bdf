"""`torch.set_default_device("cuda")` moves tensors that name no device: plans and tables, which belong on the CPU.

The meta device stands in for the GPU: whatever is made there by mistake has no values.
"""

import copy

import pytest
import torch
from torch import nn

import gblr
from gblr.ops.block_matmul import tiling
from gblr.training.latency import _fit as time_of_layer
from gblr.training.order import PartSampler
from tests.ops.packed_blocks import random_packed


@pytest.fixture
def elsewhere():
    with torch.device("meta"):
        yield


def with_cpu_default(action):
    with torch.device("cpu"):
        return action()


def made_on_cpu(action):
    """What `action` gives on the CPU, with the CPU's default and with another one."""
    expected = with_cpu_default(action)
    found = action()
    torch.testing.assert_close(found, expected)
    return found


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 24)).eval()


CONFIGS = [
    gblr.GaudiConfig(0.4, steps=2),
    gblr.GaudiConfig(0.4, block_rank=4, align=4, steps=2),
    gblr.GaudiConfig(0.4, refine="gradient", steps=2),
    gblr.GaudiConfig(0.4, init="scratch"),
    gblr.LowRankConfig(0.4),
    gblr.MonarchConfig(0.9),
    gblr.PixelflyConfig(0.6),
    gblr.BlastConfig(0.6, steps=3),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: type(config).__name__)
def test_models_are_converted(elsewhere, config):
    model, x = with_cpu_default(lambda: (network(), torch.randn(64, 48)))

    def outputs():
        torch.manual_seed(0)
        converted = copy.deepcopy(model)
        gblr.convert_(converted, config, calibration=[x], where=gblr.linear_layers())
        return converted(x)

    assert made_on_cpu(outputs).isfinite().all()


def test_budgets_are_shared_out_by_sensitivity_and_layers_hardened(elsewhere):
    model, x = with_cpu_default(lambda: (network(), torch.randn(64, 48)))

    def outputs():
        converted, config = copy.deepcopy(model), gblr.GaudiConfig(0.4, steps=2, allocation="global")
        gblr.convert_(converted, config, calibration=[x], sensitivity=True, where=gblr.linear_layers())
        gblr.harden_(converted, x, plan="packed")
        return converted.eval()(x)

    made_on_cpu(outputs)


@pytest.mark.parametrize("block_rank", [2, 64])
def test_blocks_are_laid_out_for_a_gpu(elsewhere, block_rank):
    s = with_cpu_default(lambda: random_packed(130, 97, 7, block_rank).structure)
    sides = s.row_width, s.row_location, s.col_width, s.col_location
    made_on_cpu(lambda: tiling.tile_blocks(*sides, block_rank, (130, 97))[0])


@pytest.mark.parametrize("rounding", [True, False])
@pytest.mark.parametrize("method", ["projection", "shrinkage"])
def test_structure_is_learned(elsewhere, rounding, method):
    x = with_cpu_default(lambda: torch.randn(8, 16))

    def learned():
        torch.manual_seed(0)
        model = nn.Sequential(gblr.GaudiLinear(16, 12, rounding=rounding, device="cpu"))
        optimizer = torch.optim.AdamW(gblr.param_groups(model, lr=1e-3, structure_lr=5e-3))
        budget, sigma = gblr.Budget(relative_cost=0.3, method=method), gblr.SigmaSchedule(1.0, 20.0, sharp=0.0)
        learner = gblr.StructureLearner(model, optimizer, budget=budget, sigma=sigma, total_steps=3)
        for _ in range(3):
            model(x).square().mean().backward()
            optimizer.step()
        return torch.tensor(learner.relative_cost, device="cpu")

    made_on_cpu(learned)


def test_training_shuffles_and_layers_are_timed(elsewhere):
    def order():
        batches = PartSampler(length=50, batch_size=8, train=True, seed=3)
        return torch.tensor([sample.place for batch in batches for sample in batch], device="cpu")

    made_on_cpu(order)
    time_of_layer(16, 16, 2, 1, torch.float32, 4, torch.device("cpu"))


def test_models_are_exported(elsewhere, tmp_path):
    pytest.importorskip("onnxruntime")
    model, x = with_cpu_default(lambda: (network(), torch.randn(4, 48)))
    gblr.convert_(model, gblr.GaudiConfig(0.4, steps=2), where=gblr.linear_layers())
    gblr.harden_(model)
    assert gblr.export_onnx(model, (x,), tmp_path / "model.onnx").difference < 1e-4

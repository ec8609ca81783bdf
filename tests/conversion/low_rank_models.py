"""Models whose weights have so low a rank that a conversion loses nothing: outputs must then stay as they were."""

import torch
from torch import nn

from gblr.conversion.filters import is_conv1d
from gblr.fitting.config import GaudiConfig, LowRankConfig

RANK = 3
LOSSLESS = [GaudiConfig(0.7, init="low_rank", steps=1), LowRankConfig(0.7)]


def make_low_rank_(model: nn.Module) -> nn.Module:
    """Cuts every linear and convolution weight down to rank 3; biases become random, so that a lost one shows."""
    torch.manual_seed(1)
    tied = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Conv2d)) or is_conv1d(module):
            with torch.no_grad():
                if id(module.weight) not in tied:
                    matrix = module.weight.flatten(1)
                    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
                    low = (u[:, :RANK] * s[:RANK]) @ v[:RANK]
                    module.weight.copy_((low * (s.norm() / s[:RANK].norm())).view_as(module.weight))
                if module.bias is not None:
                    module.bias.normal_(0, 0.1)
    return model.eval()


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return make_low_rank_(nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 24), nn.GELU(), nn.Linear(24, 8)))


def random_mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 24), nn.GELU(), nn.Linear(24, 8))


def modules_of(model: nn.Module) -> dict[str, int]:
    return {name: id(module) for name, module in model.named_modules(remove_duplicate=False)}


def assert_same(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-3) -> None:
    """The outputs differ by less than `tolerance` of their size."""
    error = float(((actual - expected).norm() / expected.norm()).detach())
    assert error < tolerance, error

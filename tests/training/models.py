"""Small models and a loop that the tests of training share."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from gblr.layers.conv import GaudiConv2d
from gblr.layers.gaudi import GaudiLinear, GaudiModule
from gblr.training.budget import Budget
from gblr.training.learner import StructureLearner
from gblr.training.param_groups import param_groups
from gblr.training.schedules import SigmaSchedule

SHARP = SigmaSchedule(1.0, 20.0)
SOFT = SigmaSchedule(1.0, 20.0, end=1.0, sharp=0.0)
IMAGES = torch.linspace(-1, 1, 4 * 3 * 6 * 6).sin().view(4, 3, 6, 6)
ROWS = torch.linspace(-3, 3, 5 * 12).cos().view(5, 12)


def mixed_model(seed: int = 0, block_rank: int = 1, **options: Any) -> nn.Sequential:
    """Two convolutions that see many positions, two linear layers that see one, and a dense rest; random sizes."""
    torch.manual_seed(seed)
    a, b, c = torch.randint(5, 14, (3,)).tolist()
    stride = 1 + seed % 2
    side = 6 // stride - 2
    return nn.Sequential(
        GaudiConv2d(3, a, 3, stride=stride, padding=1, block_rank=block_rank, **options),
        nn.BatchNorm2d(a),
        nn.ReLU(),
        GaudiConv2d(a, b, 3, bias=False, block_rank=block_rank, **options),
        nn.ReLU(),
        nn.Flatten(),
        GaudiLinear(b * side * side, c, block_rank=block_rank, **options),
        nn.ReLU(),
        GaudiLinear(c, 7, block_rank=block_rank, **options),
        nn.Linear(7, 2),
    )


def mlp(seed: int = 0, **options: Any) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(GaudiLinear(12, 16, **options), nn.Tanh(), GaudiLinear(16, 8, **options))


def gaudi_layers(model: nn.Module) -> list[GaudiModule]:
    return [module for module in model.modules() if isinstance(module, GaudiModule)]


def adamw(model: nn.Module, structure_lr: float = 0.02, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(param_groups(model, lr=0.01, structure_lr=structure_lr), **options)


def learner_of(model: nn.Module, optimizer: Any = None, **options: Any) -> StructureLearner:
    options = {"budget": Budget(relative_cost=0.3), "sigma": SHARP, "total_steps": 8} | options
    return StructureLearner(model, adamw(model) if optimizer is None else optimizer, **options)


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor = ROWS) -> Tensor:
    optimizer.zero_grad()
    loss = (model(x) - 1).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def train(learner: StructureLearner, model: nn.Module, x: Tensor = ROWS, steps: int | None = None) -> None:
    for _ in range(learner.total_steps if steps is None else steps):
        one_step(model, learner.optimizer, x)


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def changed(model: nn.Module, before: dict[str, Tensor]) -> list[str]:
    return [name for name, value in model.state_dict().items() if not torch.equal(value, before[name])]


class _NoReads(TorchDispatchMode):
    def __torch_dispatch__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in {"_local_scalar_dense", "nonzero", "masked_select", "equal"}, f"{name} waits for the device"
        return func(*args, **(kwargs or {}))


@contextmanager
def no_values_read() -> Iterator[None]:
    """Fails where a tensor's value comes to the host: on a GPU that would wait for the device."""
    with _NoReads():
        yield

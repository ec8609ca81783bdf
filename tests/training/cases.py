"""A tiny classifier, its data and settings: what the tests of `gblr.train` share, and the processes they start."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from gblr.layers.gaudi import GaudiLinear
from gblr.training.budget import Budget
from gblr.training.train_config import TrainConfig

BUDGET = Budget(relative_cost=0.3)
WIDTH = 16


class Block(nn.Module):
    def __init__(self, dropout: float):
        super().__init__()
        self.norm, self.fc, self.dropout = nn.LayerNorm(WIDTH), GaudiLinear(WIDTH, WIDTH), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.relu(self.fc(self.norm(x))))


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.stem, self.head = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 4)
        self.blocks = nn.ModuleList([Block(dropout), Block(dropout)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make_net(dropout: float = 0.0, seed: int = 0) -> Net:
    """No block is full: the location of a full one has a gradient of pure rounding noise, which Adam makes large."""
    torch.manual_seed(seed)
    net = Net(dropout)
    with torch.no_grad():
        for block in net.blocks:
            block.fc.width_frac.uniform_(0.3, 0.8)
            block.fc.location_frac.uniform_(0.0, 1.0)
    return net


def make_data(length: int = 160) -> TensorDataset:
    """Four classes that a linear map tells apart."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(8, 4, generator=generator)
    x = torch.randn(length, 8, generator=generator)
    return TensorDataset(x, (x @ weight).argmax(-1))


def make_config(**changes: Any) -> TrainConfig:
    return TrainConfig(**{"epochs": 6, "batch_size": 32, "lr": 0.01, "budget": BUDGET} | changes)


def without_seconds(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name != "seconds"} for row in history]

"""Residual networks for CIFAR (He et al. 2016): three stages of 3 x 3 convolutions, shortcuts without parameters."""

from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor, nn

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of the images that the published weights were trained on


class CifarResNet(nn.Module):
    """Images (*, 3, 32, 32) to class scores; `depth` is 6 n + 2 for n blocks a stage: 20, 32, 44, 56.

    >>> CifarResNet(depth=8, widths=(4, 8, 16))(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """

    def __init__(self, depth: int = 20, widths: tuple[int, int, int] = (16, 32, 64), num_classes: int = 10):
        super().__init__()
        if depth < 8 or (depth - 2) % 6:
            raise ValueError(f"`depth` must be 6 n + 2, e.g. 20 or 56; got {depth}.")
        blocks = (depth - 2) // 6
        self.conv1 = nn.Conv2d(3, widths[0], 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(widths[0])
        self.layer1 = _stage(widths[0], widths[0], blocks, stride=1)
        self.layer2 = _stage(widths[0], widths[1], blocks, stride=2)
        self.layer3 = _stage(widths[1], widths[2], blocks, stride=2)
        self.linear = nn.Linear(widths[2], num_classes)

    def forward(self, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b classes"]:
        x = torch.relu(self.bn1(self.conv1(images)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.linear(x.mean((2, 3)))

    @classmethod
    def from_file(cls, file: str | Path, depth: int) -> "CifarResNet":
        """The network with stored weights: safetensors, `conv1`, `bn1`, `layer1.0.conv1`, ..., `linear`."""
        from safetensors.torch import load_file

        model = cls(depth)
        missing, unexpected = model.load_state_dict(load_file(file), strict=False)
        missing = [name for name in missing if not name.endswith("num_batches_tracked")]  # a count that nothing reads
        if missing or unexpected:
            raise ValueError(f"{file} does not fit ResNet-{depth}: missing {missing[:3]}, unexpected {unexpected[:3]}.")
        return model.eval()


def _stage(channels: int, width: int, blocks: int, stride: int) -> nn.Sequential:
    first = Block(channels, width, stride)
    return nn.Sequential(first, *(Block(width, width, 1) for _ in range(blocks - 1)))


class Block(nn.Module):
    def __init__(self, channels: int, width: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.stride, self.more = stride, width - channels

    def forward(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b d h2 w2"]:
        y = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(y)) + self._shortcut(x))

    def _shortcut(self, x: Tensor) -> Tensor:
        """Option A of the paper: every second pixel, and channels of zeros, half before and half after."""
        x = x[:, :, :: self.stride, :: self.stride]
        before = self.more // 2
        return nn.functional.pad(x, (0, 0, 0, 0, before, self.more - before)) if self.more else x

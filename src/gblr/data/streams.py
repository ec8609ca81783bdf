"""Batches of pictures that do not fit into memory: decoded ahead by threads, cropped and mirrored on the device."""

import math
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from gblr.data.pictures import Pictures

_AHEAD = 4  # batches that are decoded while the device works on another
_AREA, _RATIO = (0.08, 1.0), (3 / 4, 4 / 3)  # of a random crop, as is usual for ImageNet


class PictureBatches:
    """Like `ImageBatches`, for `Pictures`: in training shuffled, a random part of each scaled to `size`, mirrored.

    Pictures are decoded at 8/7 of `size` (256 for 224), their middle, and random parts are cut from that. In evaluation
    the middle is decoded at `size`. Order and augmentation of an epoch depend on `seed` and the epoch alone.
    """

    def __init__(
        self,
        data: Pictures,
        batch_size: int,
        train: bool,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        size: int,
        device: Any = "cpu",
        seed: int = 0,
    ):
        self.batch_size, self.train, self.size, self.device = batch_size, train, size, torch.device(device)
        side = round(size * 8 / 7) if train else size
        self.data = replace(data, size=(side, side), crop_share=1.0 if train else 7 / 8)
        self.seed, self.epoch = seed, 0
        self._mean, self._std = (torch.tensor(c, device=self.device).view(1, -1, 1, 1) * 255 for c in (mean, std))

    def __len__(self) -> int:
        n = len(self.data)
        return n // self.batch_size if self.train else math.ceil(n / self.batch_size)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(self.seed + 1_000_003 * self.epoch)
        n = len(self.data)
        order = torch.randperm(n, generator=generator) if self.train else torch.arange(n)
        for images, labels in self._decoded(order.split(self.batch_size)[: len(self)]):
            x = images.to(self.device, non_blocking=True).float()
            if self.train:
                x = random_part(x, self.size, generator)
            yield (x - self._mean) / self._std, labels.to(self.device)

    def _decoded(self, parts: tuple[Tensor, ...]) -> Iterator[tuple[Tensor, Tensor]]:
        with ThreadPoolExecutor(_AHEAD) as pool:
            waiting: list[Future] = [pool.submit(self.data.__getitem__, part.tolist()) for part in parts[:_AHEAD]]
            for i in range(len(parts)):
                if i + _AHEAD < len(parts):
                    waiting.append(pool.submit(self.data.__getitem__, parts[i + _AHEAD].tolist()))
                yield waiting.pop(0).result()


def random_part(x: Float[Tensor, "b c h w"], size: int, generator: torch.Generator) -> Float[Tensor, "b c size size"]:
    """A random part of each image, 8 to 100 % of its area and up to 4 : 3 long, scaled to `size`; half are mirrored."""
    b = len(x)
    area, shape, side, across, down = torch.rand(5, b, generator=generator)
    area = _AREA[0] + (_AREA[1] - _AREA[0]) * area
    ratio = torch.exp(math.log(_RATIO[0]) + (math.log(_RATIO[1]) - math.log(_RATIO[0])) * shape)
    width, height = (area * ratio).sqrt().clamp(max=1), (area / ratio).sqrt().clamp(max=1)  # shares of the image
    theta = torch.zeros(b, 2, 3)
    theta[:, 0, 0] = torch.where(side < 0.5, -width, width)
    theta[:, 1, 1] = height
    theta[:, 0, 2], theta[:, 1, 2] = (2 * across - 1) * (1 - width), (2 * down - 1) * (1 - height)
    grid = functional.affine_grid(theta.to(x.device), [b, x.shape[1], size, size], align_corners=False)
    return functional.grid_sample(x, grid, padding_mode="reflection", align_corners=False)

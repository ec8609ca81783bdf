"""Labelled images that fit into memory, and augmented batches of them made where they lie, e.g. on the GPU."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.data import Dataset

PadMode = Literal["reflect", "constant"]


@dataclass(frozen=True)
class ImageSet(Dataset):
    """Images (n, channels, height, width), as bytes or normalised, and their classes. A map-style data set."""

    images: Tensor
    labels: Int[Tensor, " n"]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: Any) -> tuple[Tensor, Tensor]:
        return self.images[index], self.labels[index]

    def to(self, device: Any) -> "ImageSet":
        return ImageSet(self.images.to(device), self.labels.to(device))


class ImageBatches:
    """Batches of an `ImageSet` where it lies: normalised, and in training shuffled, cropped at random and flipped.

    The order and the augmentation of an epoch depend on `seed` and the epoch alone. A rest smaller than a batch is
    left out in training and served in evaluation.
    """

    def __init__(
        self,
        data: ImageSet,
        batch_size: int,
        train: bool,
        mean: tuple[float, ...] = (0.0,),
        std: tuple[float, ...] = (1.0,),
        pad: int = 0,
        pad_mode: PadMode = "reflect",
        flip: bool = False,
        seed: int = 0,
    ):
        if batch_size < 1 or (train and batch_size > len(data)):
            raise ValueError(f"`batch_size` must lie between 1 and the {len(data)} images; got {batch_size}.")
        self.data, self.batch_size, self.train = data, batch_size, train
        self.pad, self.pad_mode, self.flip, self.seed, self.epoch = pad, pad_mode, flip, seed, 0
        device = data.images.device
        scale = 255.0 if data.images.dtype == torch.uint8 else 1.0
        self._mean, self._std = (torch.tensor(c, device=device).view(1, -1, 1, 1) * scale for c in (mean, std))

    def __len__(self) -> int:
        n = len(self.data)
        return n // self.batch_size if self.train else math.ceil(n / self.batch_size)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        device = self.data.images.device
        generator = torch.Generator(device).manual_seed(self.seed + 1_000_003 * self.epoch)
        n = len(self.data)
        order = torch.randperm(n, generator=generator, device=device) if self.train else torch.arange(n, device=device)
        for index in order.split(self.batch_size)[: len(self)]:
            images, labels = self.data[index]
            x = self._augment(images.float(), generator) if self.train else images.float()
            yield (x - self._mean) / self._std, labels

    def _augment(self, x: Float[Tensor, "b c h w"], generator: torch.Generator) -> Float[Tensor, "b c h w"]:
        if self.flip:
            flipped = torch.rand(len(x), generator=generator, device=x.device) < 0.5
            x = torch.where(flipped[:, None, None, None], x.flip(-1), x)
        return random_crop(x, self.pad, self.pad_mode, generator) if self.pad else x


def random_crop(
    x: Float[Tensor, "b c h w"], pad: int, mode: PadMode, generator: torch.Generator
) -> Float[Tensor, "b c h w"]:
    """Pads, by reflection or with zeros, and cuts each image out at its own random place."""
    b, _, h, w = x.shape
    padded = torch.nn.functional.pad(x, (pad,) * 4, mode=mode)
    top, left = torch.randint(0, 2 * pad + 1, (2, b), generator=generator, device=x.device)
    rows = top[:, None] + torch.arange(h, device=x.device)  # (b, h)
    cols = left[:, None] + torch.arange(w, device=x.device)
    image = torch.arange(b, device=x.device)[:, None, None]
    return padded.permute(0, 2, 3, 1)[image, rows[:, :, None], cols[:, None, :]].permute(0, 3, 1, 2)

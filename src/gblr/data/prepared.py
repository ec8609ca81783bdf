"""Images as a model takes them: its size, its channels, its normalisation."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Num
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Dataset

from gblr.data.images import ImageSet, random_crop


@dataclass(frozen=True)
class PreparedImages(Dataset):
    """Images that are normalised when read; in training, with `pad` or `flip`, cropped at random and mirrored too.

    `data` gives (images, labels) for a list of numbers. Augmentation draws from torch's own generator, which
    `gblr.train` seeds for each batch.
    """

    data: Any
    mean: tuple[float, ...]
    std: tuple[float, ...]
    pad: int = 0
    flip: bool = False
    dtype: torch.dtype = torch.float32

    def __len__(self) -> int:
        return len(self.data)

    def inputs(self, index: Sequence[int]) -> Float[Tensor, "b c h w"]:
        return self._normalised(self.data[list(index)][0])

    def labelled(self, index: Sequence[int]) -> tuple[Tensor, Tensor]:
        images, labels = self.data[list(index)]
        return self._augmented(self._normalised(images)), labels

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.__getitems__([index])[0]

    def __getitems__(self, index: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        return list(zip(*self.labelled(index), strict=True))

    def _normalised(self, images: Num[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
        scale = 255.0 if images.dtype == torch.uint8 else 1.0
        mean, std = (torch.tensor(value).view(1, -1, 1, 1) for value in (self.mean, self.std))
        return ((images.float() / scale - mean) / std).to(self.dtype)

    def _augmented(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
        if self.flip:
            x = torch.where(torch.rand(len(x))[:, None, None, None] < 0.5, x.flip(-1), x)
        return random_crop(x, self.pad, "reflect", torch.default_generator) if self.pad else x


def fitted(data: ImageSet, size: int | None, channels: int | None) -> ImageSet:
    """The images at `size` x `size` with 1 or 3 channels; None keeps what is there."""
    images = data.images
    if channels is not None and channels != images.shape[1]:
        images = with_channels(images, channels)
    if size is not None and images.shape[-2:] != (size, size):
        images = resized(images, size)
    return ImageSet(images, data.labels)


def with_channels(images: Num[Tensor, "n c h w"], channels: int) -> Num[Tensor, "n d h w"]:
    """Grey becomes equal channels; colours become their mean."""
    if images.shape[1] == 1:
        return images.expand(-1, channels, -1, -1)
    if channels != 1:
        raise ValueError(f"images of {images.shape[1]} channels cannot become images of {channels}.")
    return images.float().mean(1, keepdim=True).to(images.dtype)


def resized(images: Num[Tensor, "n c h w"], size: int) -> Num[Tensor, "n c s s"]:
    """Bilinear, smoothed where it shrinks; in parts, as float32 takes four times the memory of bytes."""
    parts = [
        functional.interpolate(part.float(), (size, size), mode="bilinear", antialias=True)
        .round_()
        .clamp_(0, 255)
        .to(images.dtype)
        if images.dtype == torch.uint8
        else functional.interpolate(part, (size, size), mode="bilinear", antialias=True)
        for part in images.split(1024)
    ]
    return torch.cat(parts)


def channel_statistics(images: Num[Tensor, "n c h w"]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel, for pixels of 0 to 1."""
    x = images.float() / (255.0 if images.dtype == torch.uint8 else 1.0)
    std, mean = torch.std_mean(x, dim=(0, 2, 3))
    return tuple(mean.tolist()), tuple(std.clamp(min=1e-3).tolist())

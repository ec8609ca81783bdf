"""The data of the experiments: all of CIFAR on the device, ImageNet streamed, or a few generated images."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gblr.atomic import appearing
from gblr.data.cifar import MEAN, STD, load_cifar10, load_cifar100
from gblr.data.folder import read_image_folder
from gblr.data.images import ImageBatches, ImageSet
from gblr.data.pictures import Pictures
from gblr.data.streams import PictureBatches
from gblr.data.tables import class_names, class_numbers, find_columns, parts_of, pictures, read_parquet
from gblr.experiments.run import Run
from gblr.models.resnet_cifar import MEAN as IMAGENET_MEAN
from gblr.models.resnet_cifar import STD as IMAGENET_STD

_JUDGED = 10_000  # training images on which a streamed run is judged
Images = ImageSet | Pictures
Batches = ImageBatches | PictureBatches


@dataclass(frozen=True)
class Task:
    """Training and test images with their classes. `size` is that of streamed images, which have none of their own."""

    train: Images
    test: Images
    num_classes: int
    mean: tuple[float, ...] = MEAN
    std: tuple[float, ...] = STD
    size: int = 0
    device: Any = "cpu"
    tiny: bool = False

    def to(self, device: Any) -> "Task":
        moved = [part.to(device) if isinstance(part, ImageSet) else part for part in (self.train, self.test)]
        return replace(self, train=moved[0], test=moved[1], device=device)

    def training(self, run: Run) -> Batches:
        """Shuffled and augmented: crops and flips of images in memory, random parts of streamed ones."""
        if isinstance(self.train, Pictures):
            return PictureBatches(
                self.train, run.batch_size, True, self.mean, self.std, self.size, self.device, seed=run.seed
            )
        return ImageBatches(self.train, run.batch_size, True, self.mean, self.std, pad=4, flip=True, seed=run.seed)

    def judging(self, images: Images, batch_size: int = 2000) -> Batches:
        if isinstance(images, Pictures):
            few = images.select(range(min(len(images), _JUDGED))) if images is self.train else images
            return PictureBatches(few, min(batch_size, 250), False, self.mean, self.std, self.size, self.device)
        return ImageBatches(images, batch_size, False, self.mean, self.std)

    def calibration(self, num: int) -> list[Tensor]:
        """Training images, unchanged, as a model takes them."""
        found: list[Tensor] = []
        for x, _ in self.judging(self.train, batch_size=min(num, 256)):
            found.append(x[: num - sum(map(len, found))])
            if sum(map(len, found)) >= num:
                break
        return found

    def holding_out(self, num: int) -> "Task":
        """The last `num` training images are judged in place of test images, and not trained on."""
        if isinstance(self.train, Pictures):
            raise ValueError("streamed images cannot be held out.")
        kept = len(self.train) - num
        return replace(self, train=ImageSet(*self.train[:kept]), test=ImageSet(*self.train[kept:]))


def generated(num_classes: int = 10, num: int = 64, size: int = 32, seed: int = 0) -> Task:
    """Coloured patterns, one for each class, under noise: enough for losses to fall within a few steps."""
    generator = torch.Generator().manual_seed(seed)
    patterns = torch.rand(num_classes, 3, 4, 4, generator=generator).repeat_interleave(size // 4, -1)
    patterns = patterns.repeat_interleave(size // 4, -2)
    labels = torch.arange(2 * num) % num_classes
    noise = torch.rand(2 * num, 3, size, size, generator=generator)
    images = (255 * (0.6 * patterns[labels] + 0.4 * noise)).to(torch.uint8)
    halves = (ImageSet(images[:num], labels[:num]), ImageSet(images[num:], labels[num:]))
    return Task(*halves, num_classes, (0.5,) * 3, (0.25,) * 3, size=size, tiny=True)


def load_task(name: str, folder: Path, cache: Path | None = None) -> Task:
    """`name` is "cifar10", "cifar100", "cifar10-resnet" (other normalisation) or "imagenet".

    CIFAR is decoded once into `cache`, for all processes of a sweep.
    """
    if name == "imagenet":
        return _imagenet(folder)
    mean, std = (IMAGENET_MEAN, IMAGENET_STD) if name == "cifar10-resnet" else (MEAN, STD)
    kind = name.partition("-")[0]
    train, test = _cached(kind, folder, cache)
    return Task(train, test, 100 if kind == "cifar100" else 10, mean, std)


def _cached(kind: str, folder: Path, cache: Path | None) -> tuple[ImageSet, ImageSet]:
    file = None if cache is None else cache / f"{kind}.pt"
    if file is not None and file.exists():
        parts = torch.load(file, weights_only=True)
        return ImageSet(*parts[:2]), ImageSet(*parts[2:])
    train, test = load_cifar100(folder) if kind == "cifar100" else load_cifar10(folder)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        with appearing(file) as new:  # sweeps of two recipes may begin at once
            torch.save([train.images, train.labels, test.images, test.labels], new)
    return train, test


def _imagenet(folder: Path) -> Task:
    """A folder of class folders below train and val, as torchvision has it, or parquet files."""
    if any(folder.rglob("*.parquet")):
        train, test, num_classes = _from_parquet(folder)
    else:
        found = read_image_folder(folder)
        train, test, num_classes = found.train, found.test, len(found.classes)
    if test is None or num_classes == 0:
        raise ValueError(f"{folder} must have training and validation images with classes (train/CLASS, val/CLASS).")
    return Task(train, test, num_classes, IMAGENET_MEAN, IMAGENET_STD, size=224)


def _from_parquet(folder: Path) -> tuple[Pictures, Pictures | None, int]:
    tables = read_parquet(folder)
    columns = find_columns(next(iter(tables.values())), str(folder))
    if columns.image is None or columns.label is None:
        raise ValueError(f"{folder} must have a column of images and one of labels.")
    train, test = parts_of(tables, columns.label)
    names = class_names(train, columns.label)
    parts = [
        None if table is None else pictures(table, columns.image, class_numbers(table, columns.label, names))
        for table in (train, test)
    ]
    assert parts[0] is not None
    return parts[0], parts[1], len(names) if names else int(parts[0].labels.max()) + 1

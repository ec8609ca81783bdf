"""Classification of images."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gblr.data.images import ImageSet
from gblr.data.prepared import PreparedImages, channel_statistics, fitted
from gblr.models.load import LoadedModel
from gblr.progress import progress
from gblr.training.objective import logits_of
from gblr.workflows.task import Task, call, device_of, main_output

_EVAL_BATCH = 256


@dataclass(frozen=True)
class ImageData:
    """Training and test images of `num_classes` classes; `mean` and `std` where they are known beforehand."""

    train: ImageSet
    test: ImageSet
    num_classes: int
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    pad: int = 0
    flip: bool = False


def image_task(data: ImageData, source: str, loaded: LoadedModel, seed: int) -> Task:
    """Top-1 accuracy, in percent."""
    train, test = (fitted(part, loaded.image_size, loaded.in_channels) for part in (data.train, data.test))
    mean, std = _normalisation(data, train, loaded)
    train_images = PreparedImages(train, mean, std, data.pad, data.flip)
    test_images = PreparedImages(test, mean, std)
    _check_classes(loaded, train_images, data.num_classes, source)
    size = " x ".join(str(n) for n in train.images.shape[-2:])
    return Task(
        name="image classification",
        source=source,
        what=f"{len(train)} training and {len(test)} test images of {size}, {data.num_classes} classes",
        metric="accuracy", unit="%", higher_is_better=True,
        samples=train_images, train_data=train_images, eval_data=test_images,
        score=lambda model: accuracy(model, test_images),
        train_defaults=_train_defaults(loaded, len(train)),
        batch_size=64, seed=seed, device=loaded.device,
    )  # fmt: skip


def accuracy(model: nn.Module, images: PreparedImages) -> float:
    """In percent; classes that were left without an output count as wrong."""
    right, device = 0, device_of(model)
    parts = torch.arange(len(images)).split(_EVAL_BATCH)
    with progress("evaluating", len(parts)) as tick:
        for part in parts:
            x, labels = images.labelled(part.tolist())
            right += int((logits_of(call(model, x.to(device))).argmax(-1).cpu() == labels).sum())
            tick()
    return 100 * right / len(images)


def _normalisation(data: ImageData, train: ImageSet, loaded: LoadedModel) -> tuple[tuple[float, ...], ...]:
    """The model's own, else that of the data, else as measured."""
    for mean, std in ((loaded.image_mean, loaded.image_std), (data.mean, data.std)):
        if mean is not None and std is not None and len(mean) in (1, train.images.shape[1]):
            return tuple(mean), tuple(std)
    return channel_statistics(train.images[:1000])


def _check_classes(loaded: LoadedModel, images: PreparedImages, num_classes: int, source: str) -> None:
    try:
        with torch.no_grad():
            scores = main_output(call(loaded.model, images.inputs([0, 1][: len(images)]).to(loaded.device)))
    except (RuntimeError, ValueError, TypeError) as error:
        shape = tuple(images.inputs([0]).shape[1:])
        raise ValueError(
            f"{loaded.architecture} cannot take images of {source} as (batch, channels, height, width) = "
            f"(batch, {', '.join(map(str, shape))}): {str(error).splitlines()[0]} If it needs another size, give the "
            "model the attributes `image_size` and `in_channels`."
        ) from error
    if scores.dim() != 2 or scores.shape[1] != num_classes:
        raise ValueError(
            f"{source} has {num_classes} classes, but {loaded.architecture} gives outputs of shape "
            f"(batch, {', '.join(map(str, scores.shape[1:]))}). Use a model whose head has {num_classes} outputs, e.g. "
            "by python:module:function."
        )


def _train_defaults(loaded: LoadedModel, num_train: int) -> dict[str, Any]:
    """From scratch as in examples/learn_digits.py and docs/results/cifar10.md; gently where weights are trained."""
    if loaded.pretrained:
        return {"lr": 2e-4, "structure_lr": 2e-3, "batch_size": min(64, num_train), "epochs": 3.0, "warmup": 0.1}
    few = num_train < 10_000
    return {
        "lr": 3e-3 if few else 1e-3,
        "structure_lr": 0.01 if few else 5e-3,
        "batch_size": min(64 if few else 256, num_train),
        "epochs": 60.0 if few else 30.0,
        "label_smoothing": 0.1,
        "warmup": 0.1,
    }

"""Tasks of images: classification, or being like the dense model where there are no labels."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from gblr.data.images import ImageSet
from gblr.data.pictures import Pictures
from gblr.data.prepared import PreparedImages, channel_statistics, fitted
from gblr.data.splits import draw_held_out, draw_some
from gblr.models.load import LoadedModel
from gblr.progress import progress
from gblr.training.objective import logits_of
from gblr.training.train_config import FITTED_STRUCTURE_LR
from gblr.workflows.outputs_task import outputs_task
from gblr.workflows.task import Request, Task, call, device_of, main_output

Images = ImageSet | Pictures
MEASURED = 1000  # images that mean and standard deviation are taken of
_EVAL_BATCH = 256
_IN_MEMORY = 1 << 30  # bytes of decoded images that are kept; more than that are decoded whenever they are read
_PART = 512  # images decoded between two ticks of progress


@dataclass(frozen=True)
class ImageData:
    """Training and test images (None: a part of the training images) and their number of classes, 0 without labels.

    `at_least` marks a number of classes that was only counted: the model may have more. `mean` and `std` of the pixels
    stand here where they are known; else they are measured, on `to_measure` where `train` is a part of the images.
    `pad` and `flip` are for training from scratch.
    """

    train: Images
    test: Images | None
    num_classes: int
    at_least: bool = False
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    to_measure: Images | None = None
    pad: int = 0
    flip: bool = False


def image_task(data: ImageData, request: Request) -> Task:
    """Top-1 accuracy in percent, or likeness to the dense model."""
    loaded = request.loaded
    if loaded.kind not in ("images", "unknown"):
        raise ValueError(f"{request.source} has images, but {loaded.architecture} takes text.")
    whole, test = _parts(data, request)
    size, remark = _size(data.to_measure or whole, loaded)
    train = _ready(_some(whole, draw_some(len(whole), request.max_train, request.seed)), loaded, size)
    test = _ready(_some(test, draw_some(len(test), request.max_eval, request.seed)), loaded, size)
    mean, std = _normalisation(data, whole, train, loaded, size)
    pad, flip = (0, False) if loaded.pretrained else (data.pad, data.flip)
    train_images = PreparedImages(train, mean, std, pad, flip, dtype=loaded.dtype)
    test_images = PreparedImages(test, mean, std, dtype=loaded.dtype)
    scores = _try(loaded, train_images, request.source)
    pixels = " x ".join(str(n) for n in train_images.inputs([0]).shape[-2:])
    counts = f"{len(train)} training and {len(test)} test images of {pixels}"
    if data.num_classes == 0 or (scores.dim() != 2 and loaded.kind == "images"):
        task = outputs_task(train_images, test_images, counts, request, batch_size=64)
        return replace(task, image_mean=mean, image_std=std, remark=remark)
    _check_classes(scores, data, request)
    return Task(
        name="image classification", source=request.source, what=f"{counts}, {data.num_classes} classes",
        metric="accuracy", unit="%", higher_is_better=True,
        samples=train_images, train_data=train_images, eval_data=test_images,
        score=lambda model: accuracy(model, test_images),
        train_defaults=_train_defaults(loaded, len(train)), distill=0.9 if loaded.pretrained else 0.0,
        batch_size=64, seed=request.seed, device=loaded.device, image_mean=mean, image_std=std, remark=remark,
    )  # fmt: skip


def accuracy(model: nn.Module, images: PreparedImages) -> float:
    """In percent."""
    right, device = 0, device_of(model)
    parts = torch.arange(len(images)).split(_EVAL_BATCH)
    with progress("evaluating", len(parts)) as tick:
        for part in parts:
            x, labels = images.labelled(part.tolist())
            right += int((logits_of(call(model, x.to(device))).argmax(-1).cpu() == labels).sum())
            tick()
    return 100 * right / len(images)


def _parts(data: ImageData, request: Request) -> tuple[Images, Images]:
    train, test = data.train, data.test
    if test is None:
        kept, held_out = draw_held_out(len(train), request.seed)
        train, test = _some(data.train, kept), _some(data.train, held_out)
    return train, test


def _some(images: Images, index: list[int]) -> Images:
    if len(index) == len(images):
        return images
    return images.select(index) if isinstance(images, Pictures) else ImageSet(*images[index])


def _size(images: Images, loaded: LoadedModel) -> tuple[tuple[int, int] | None, str]:
    """Height and width of encoded images: what the model says, else the commonest size, alike for all parts of the data
    and every --max-train. With a remark where that is not the only one.
    """
    if loaded.image_size or isinstance(images, ImageSet):
        return (loaded.image_size, loaded.image_size) if loaded.image_size else None, ""
    some = _some(images, draw_some(len(images), MEASURED, seed=0))
    assert isinstance(some, Pictures)
    sizes = some.original_sizes()
    size, count = sizes.most_common(1)[0]
    if len(sizes) == 1:
        return size, ""
    return size, (
        f"note: images have {len(sizes)} sizes; all are fitted to the commonest, {size[0]} x {size[1]} ({count} of "
        f"{sizes.total()}). The attribute `image_size` of your model sets another"
    )


def _ready(images: Images, loaded: LoadedModel, size: tuple[int, int] | None) -> Images:
    """At the given size, decoded if they fit into memory."""
    if isinstance(images, ImageSet):
        return fitted(images, loaded.image_size, loaded.in_channels)
    assert size is not None
    images = replace(images, size=size, channels=loaded.in_channels or 3, crop_share=loaded.crop_share)
    if len(images) * images.channels * size[0] * size[1] > _IN_MEMORY:
        return images
    parts = torch.arange(len(images)).split(_PART)
    with progress("reading images", len(parts)) as tick:
        pixels = []
        for part in parts:
            pixels.append(images[part.tolist()][0])
            tick()
    return ImageSet(torch.cat(pixels), images.labels)


def _normalisation(
    data: ImageData, whole: Images, train: Images, loaded: LoadedModel, size: tuple[int, int] | None
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The model's own, else that of the data, else as measured: alike for every --max-train."""
    channels = train[[0]][0].shape[1]
    for mean, std in ((loaded.image_mean, loaded.image_std), (data.mean, data.std)):
        if mean is not None and std is not None and len(mean) in (1, channels):
            return tuple(mean), tuple(std)
    images = data.to_measure or whole
    some = _ready(_some(images, draw_some(len(images), MEASURED, seed=0)), loaded, size)
    return channel_statistics(some[list(range(len(some)))][0])


def _try(loaded: LoadedModel, images: PreparedImages, source: str) -> Tensor:
    """Outputs for two images."""
    batch = images.inputs([0, 1][: len(images)])
    try:
        with torch.no_grad():
            return main_output(call(loaded.model, batch.to(loaded.device)))
    except Exception as error:  # of the model's own code
        shape = ", ".join(map(str, batch.shape[1:]))
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise ValueError(
            f"{loaded.architecture} cannot take the images of {source}, (batch, {shape}): {reason}. If it needs "
            "another size, give the model the attributes `image_size` and `in_channels`, to which images are fitted."
        ) from error


def _check_classes(scores: Tensor, data: ImageData, request: Request) -> None:
    found = scores.shape[1] if scores.dim() == 2 else 0
    if found == data.num_classes or (data.at_least and found > data.num_classes):
        return
    raise ValueError(
        f"{request.source} has {data.num_classes} classes, but {request.loaded.architecture} gives outputs of shape "
        f"(batch, {', '.join(map(str, scores.shape[1:]))}). Use a model whose head has {data.num_classes} outputs, "
        "e.g. by python:module:function."
    )


def _train_defaults(loaded: LoadedModel, num_train: int) -> dict[str, Any]:
    """From scratch as in examples/learn_digits.py and docs/results/cifar10.md; gently where weights are trained."""
    modules = list(loaded.model.modules())
    layout = {"channels_last": any(isinstance(module, nn.Conv2d) for module in modules)}
    if loaded.pretrained:
        # Batch normalization bears higher rates: ResNet-20, 10,000 images, 3 epochs, ended at 86.5 % with 2e-4 and
        # 87.0 with 5e-4 at cost 0.55, 81.2 and 82.4 at 0.3; 1e-3 gave 0.2 more, but larger networks may not bear it.
        lr = 5e-4 if any(isinstance(module, nn.BatchNorm2d) for module in modules) else 2e-4
        return layout | {
            "lr": lr, "structure_lr": FITTED_STRUCTURE_LR, "batch_size": min(64, num_train), "epochs": 3.0,
            "warmup": 0.1, "label_smoothing": 0.1,
        }  # fmt: skip
    few = num_train < 10_000
    return layout | {
        "lr": 3e-3 if few else 1e-3,
        "structure_lr": 0.01 if few else 5e-3,
        "batch_size": min(64 if few else 256, num_train),
        "epochs": 60.0 if few else 30.0,
        "label_smoothing": 0.1,
        "warmup": 0.1,
    }

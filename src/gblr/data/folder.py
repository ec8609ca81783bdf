"""Folders of images: one subfolder a class, with train and test folders above them or not; or images alone."""

from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch

from gblr.data.pictures import SUFFIXES, Pictures
from gblr.data.splits import by_split, train_and_test


@dataclass(frozen=True)
class FoundPictures:
    """Training pictures, test pictures if they stand apart, and the names of the classes; none without labels."""

    train: Pictures
    test: Pictures | None
    classes: tuple[str, ...]


def read_image_folder(folder: str | Path, class_order: tuple[str, ...] | None = None) -> FoundPictures:
    """Images as torchvision's ImageFolder has them, below `folder` or below its subfolders train and test (or val).

    Classes are numbered by their sorted names, or as in `class_order` if that has them all.
    """
    folder = Path(folder)
    train, test = _parts(folder)
    classes = tuple(sorted({path.name for root in train for path in _subfolders(root) if _images(path)}))
    if not classes:
        files = [file for root in train for file in _images(root)]
        if not files:
            raise FileNotFoundError(
                f"no images in {folder}: expected class/name.png, train/class/name.png and test/class/name.png, or "
                f"name.png without classes. Images end in {', '.join(sorted(SUFFIXES))}."
            )
        loose = [file for root in test or () for file in _images(root)]
        return FoundPictures(_unlabelled(files), _unlabelled(loose) if loose else None, ())
    if class_order and set(classes) <= set(class_order):
        classes = class_order
    return FoundPictures(_labelled(train, classes), _labelled(test, classes) if test else None, classes)


def _parts(folder: Path) -> tuple[list[Path], list[Path] | None]:
    """Folders that train and that judge. One named "train" may also be a class, beside others such as "bus"; a test
    part without classes, as contests publish it, gives way to validation.
    """
    splits = by_split((path.name, path) for path in _subfolders(folder))
    train, test = train_and_test(splits) if "train" in splits else (None, None)
    if train is None or (any(map(_images, splits.get("", []))) and not any(map(_subfolders, train))):
        return [folder], None
    judges = [splits[name] for name in ("test", "validation") if name in splits]
    return train, next((roots for roots in judges if any(map(_images, _below(roots)))), test)


def _below(roots: list[Path]) -> list[Path]:
    return sorted(chain.from_iterable(_subfolders(root) for root in roots))


def _labelled(roots: list[Path], classes: tuple[str, ...]) -> Pictures:
    number = {name: i for i, name in enumerate(classes)}
    files, labels = [], []
    for folder in _below(roots):
        images = _images(folder)
        if images and folder.name not in number:
            raise ValueError(f"{folder} is a class that the training images do not have ({', '.join(classes[:10])}).")
        files += images
        labels += [number[folder.name]] * len(images) if images else []
    if not files:
        where = ", ".join(str(root) for root in roots)
        raise FileNotFoundError(
            f"no images in class folders in {where}: expected one subfolder for each class, as in training. Where "
            "there is no such part, some of the training images judge."
        )
    return Pictures(files, torch.tensor(labels))


def _unlabelled(files: list[Path]) -> Pictures:
    return Pictures(files, torch.zeros(len(files), dtype=torch.long))


def _subfolders(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def _images(folder: Path) -> list[Path]:
    """Hidden ones are none: macOS leaves "._name.jpg" beside images on foreign disks, which hold no picture."""
    files = (file for file in folder.iterdir() if file.suffix.lower() in SUFFIXES)
    return sorted(file for file in files if not file.name.startswith("."))

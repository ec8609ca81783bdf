"""CIFAR-10 and CIFAR-100 from a folder: parquet files of encoded images, or the Python batches of the original."""

import io
import itertools
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gblr.data.images import ImageSet

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
_SIZES = {"train": 50_000, "test": 10_000}


def load_cifar10(folder: str | Path) -> tuple[ImageSet, ImageSet]:
    """Training and test images as bytes, (n, 3, 32, 32).

    `folder` (or its subfolder `cifar10`) holds `train-*` and `test-*` as .parquet with columns `img` and `label`, or as
    .npz with the encoded images one after the other (`data`, `off`, `y`); or it holds `cifar-10-batches-py`.
    """
    folder = Path(folder)
    for place in (folder, folder / "cifar10"):
        if (place / "cifar-10-batches-py").is_dir():
            return _from_batches(place / "cifar-10-batches-py", "train"), _from_batches(
                place / "cifar-10-batches-py", "test"
            )
        if any(place.glob("train-*")):
            return _from_files(place, "train"), _from_files(place, "test")
    raise FileNotFoundError(
        f"no CIFAR-10 in {folder}: expected train-*.parquet and test-*.parquet, or the folder cifar-10-batches-py."
    )


def load_cifar100(folder: str | Path) -> tuple[ImageSet, ImageSet]:
    """Like `load_cifar10`, with the 100 fine classes; `folder` or its subfolder `cifar100`, or `cifar-100-python`."""
    folder = Path(folder)
    for place in (folder, folder / "cifar100"):
        if (batches := place / "cifar-100-python").is_dir():
            train, test = (_from_batches(batches, split, [split], b"fine_labels") for split in ("train", "test"))
            return train, test
        if any(place.glob("train-*")):
            return _from_files(place, "train"), _from_files(place, "test")
    raise FileNotFoundError(
        f"no CIFAR-100 in {folder}: expected train-*.parquet and test-*.parquet, or the folder cifar-100-python."
    )


def _from_files(folder: Path, split: str) -> ImageSet:
    files = sorted((*folder.glob(f"{split}-*.parquet"), *folder.glob(f"{split}-*.npz")))
    if not files:
        raise FileNotFoundError(f"no {split}-*.parquet or {split}-*.npz in {folder}.")
    parts = [_read_parquet(file) if file.suffix == ".parquet" else _read_npz(file) for file in files]
    encoded = [image for images, _ in parts for image in images]
    with ThreadPoolExecutor() as pool:  # Pillow decodes without Python's lock
        pixels = np.stack(list(pool.map(_decode, encoded, chunksize=256)))
    return _checked(
        torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous(), np.concatenate([y for _, y in parts]), split
    )


def _read_parquet(file: Path) -> tuple[list[bytes], np.ndarray]:
    from pyarrow import parquet  # comes with `datasets`, in the extra `hf`

    table = parquet.read_table(file)
    label = "label" if "label" in table.column_names else "fine_label"
    return [row["bytes"] for row in table["img"].to_pylist()], table[label].to_numpy()


def _read_npz(file: Path) -> tuple[list[bytes], np.ndarray]:
    stored = np.load(file)
    data, ends = stored["data"].tobytes(), stored["off"].tolist()
    return [data[a:b] for a, b in itertools.pairwise(ends)], stored["y"]


def _decode(encoded: bytes) -> np.ndarray:
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(encoded)).convert("RGB"))


def _from_batches(folder: Path, split: str, names: list[str] | None = None, label: bytes = b"labels") -> ImageSet:
    if names is None:
        names = [f"data_batch_{i}" for i in range(1, 6)] if split == "train" else ["test_batch"]
    batches: list[dict[bytes, Any]] = []
    for name in names:
        with (folder / name).open("rb") as file:
            batches.append(_PlainUnpickler(file, encoding="bytes").load())
    pixels = np.concatenate([batch[b"data"] for batch in batches]).reshape(-1, 3, 32, 32)
    return _checked(torch.from_numpy(pixels), np.concatenate([batch[label] for batch in batches]), split)


_MULTIARRAY = ("_reconstruct",)
_ARRAY_PARTS = {
    "numpy": ("ndarray", "dtype"),
    "numpy.core.multiarray": _MULTIARRAY,
    "numpy._core.multiarray": _MULTIARRAY,
    "_codecs": ("encode",),
}


class _PlainUnpickler(pickle.Unpickler):
    """The original files are pickles; nothing but arrays may come out of them."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _ARRAY_PARTS.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"unexpected {module}.{name} in a CIFAR-10 batch.")


def _checked(images: Tensor, labels: np.ndarray, split: str) -> ImageSet:
    if len(images) != _SIZES[split]:
        raise ValueError(f"CIFAR has {_SIZES[split]} {split} images; found {len(images)}. Is a file missing?")
    return ImageSet(images, torch.from_numpy(np.asarray(labels)).long())

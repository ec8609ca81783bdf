"""Encoded images (PNG, JPEG, ...), from files or from bytes, decoded when they are read."""

import io
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int, UInt8
from torch import Tensor

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"})
_DAMAGED = (OSError, ValueError, TypeError, SyntaxError, EOFError, struct.error)  # what Pillow's readers raise


@dataclass(frozen=True)
class Pictures:
    """Paths or encoded bytes, and their classes; read as bytes (n, channels, height, width) of one `size`.

    An image is scaled so that `crop_share` of it covers `size`, and its middle is kept. `channels` is 1 or 3.
    """

    encoded: Sequence[Path | bytes]
    labels: Int[Tensor, " n"]
    size: tuple[int, int] | None = None
    channels: int = 3
    crop_share: float = 1.0

    def __len__(self) -> int:
        return len(self.encoded)

    def __getitem__(self, index: Sequence[int]) -> tuple[UInt8[Tensor, "b c h w"], Int[Tensor, " b"]]:
        with ThreadPoolExecutor(min(8, len(index))) as pool:  # Pillow decodes without Python's lock
            pixels = list(pool.map(self._decode, index))
        return torch.from_numpy(np.stack(pixels)), self.labels[list(index)]

    def select(self, index: Sequence[int]) -> "Pictures":
        kept = [self.encoded[i] for i in index]
        return Pictures(kept, self.labels[list(index)], self.size, self.channels, self.crop_share)

    def original_size(self, index: int = 0) -> tuple[int, int]:
        """Height and width as stored."""
        with self._readable(index), _open(self.encoded[index]) as image:
            return image.height, image.width

    def original_sizes(self) -> Counter[tuple[int, int]]:
        """How many have which height and width."""
        with ThreadPoolExecutor(8) as pool:
            return Counter(pool.map(self.original_size, range(len(self))))

    def _decode(self, index: int) -> np.ndarray:
        assert self.size is not None
        with self._readable(index), _open(self.encoded[index]) as image:
            plain = _eight_bits(image).convert("L" if self.channels == 1 else "RGB")
            fitted = _fit(plain, self.size, self.crop_share)
        pixels = np.asarray(fitted)
        return pixels[None] if pixels.ndim == 2 else np.ascontiguousarray(pixels.transpose(2, 0, 1))

    @contextmanager
    def _readable(self, index: int) -> Iterator[None]:
        try:
            yield
        except _DAMAGED as error:
            name = self.encoded[index]
            what = f"image {name if isinstance(name, Path) else index}"
            raise OSError(f"{what} cannot be read: {error}. Replace it or take it out of the data.") from error


def _open(encoded: Path | bytes) -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError("images are decoded by Pillow: pip install pillow.") from error
    return Image.open(encoded if isinstance(encoded, Path) else io.BytesIO(encoded))


def _eight_bits(image: Any) -> Any:
    """Grey of 16 bits at the same brightness: Pillow itself would make all but the darkest white."""
    if not image.mode.startswith("I;16"):
        return image
    from PIL import Image

    return Image.fromarray(((np.asarray(image).astype(np.uint32) + 128) // 257).astype(np.uint8))


def _fit(image: Any, size: tuple[int, int], crop_share: float) -> Any:
    """The middle of the image, scaled to `size`; an image that has it stays as it is."""
    height, width = size
    if (image.height, image.width) == size and crop_share == 1:
        return image
    scale = crop_share * min(image.height / height, image.width / width)
    h, w = min(scale * height, image.height), min(scale * width, image.width)  # rounding may lead beyond the edge
    left, top = (image.width - w) / 2, (image.height - h) / 2
    return image.resize((width, height), resample=2, box=(left, top, left + w, top + h))  # 2: bilinear, smoothed

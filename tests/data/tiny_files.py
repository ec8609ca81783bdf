"""Tiny images and tables on disk."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image


def pixels(value: int, size: tuple[int, int] = (8, 8)) -> np.ndarray:
    """A picture whose red is `value`, with a gradient in green."""
    height, width = size
    image = np.zeros((height, width, 3), np.uint8)
    image[..., 0] = value
    image[..., 1] = np.linspace(0, 255, width, dtype=np.uint8)
    return image


def png(value: int, size: tuple[int, int] = (8, 8)) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels(value, size)).save(buffer, "PNG")
    return buffer.getvalue()


def write_images(folder: Path, num: int, classes: tuple[str, ...] = ("bird", "cat", "dog"), **options: Any) -> None:
    """`num` of each class, of a red that tells the class; straight into `folder` without classes."""
    for number, name in enumerate(classes or ("",)):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for i in range(num):
            (folder / name / f"{i}.png").write_bytes(png(50 * number + i % 5, **options))


def write_table(file: Path, columns: dict[str, Any], classes: dict[str, list[str]] | None = None) -> str:
    """A parquet file; `classes` are names of labels as `datasets` stores them."""
    table = pa.table(columns)
    if classes:
        features = {name: {"names": names, "_type": "ClassLabel"} for name, names in classes.items()}
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, file)
    return str(file)


def image_rows(labels: list[int]) -> dict[str, Any]:
    return {"image": [{"bytes": png(50 * y), "path": None} for y in labels], "label": labels}

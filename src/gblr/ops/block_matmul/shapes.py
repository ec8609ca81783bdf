"""How the work of a GPU product is cut, and which way is chosen: by `tuned.json`, which benchmarks/tune_gpu.py makes.

A product is known by its kind, its tokens and its tiles of outputs; the measured product nearest to it decides.
"""

import functools
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

FEW_TOKENS = 16  # at most so many can go to the kernel for few
TABLE = Path(__file__).with_name("tuned.json")


class Shape(NamedTuple):
    """Constants of `_many_tokens_kernel`."""

    tokens: int
    tiles: int  # of outputs, one after the other in one program
    group: int  # of programs of other tokens that are beside each other
    stages: int
    warps: int
    swapped: bool  # whether values are the left factor: outputs are then the rows of the sums
    descriptors: bool  # whether tiles come by descriptors: Hopper and newer
    stores: bool  # whether outputs leave by them too, which takes shared memory


class FewShape(NamedTuple):
    """Constants of `_few_tokens_kernel`: outputs of a program, entries that it reads at a time."""

    rows: int
    entries: int
    warps: int


class Product(NamedTuple):
    """One of the two products of a layer, as far as its best shape depends on it."""

    kind: str  # "columns": z = V x; "columns, transposed": z lies transposed; "rows" and "rows, gathered": y = U z
    tokens: int
    tiles: int


def choose_shape(product: Product, x: Tensor) -> Shape | FewShape:
    """By the table; for float32 and for a GPU that is not in it, what fits into any from Ampere on."""
    measured = None if x.dtype == torch.float32 else _nearest(product, x.device)
    if measured is not None:
        return (FewShape if len(measured) == len(FewShape._fields) else Shape)(*measured)
    if product.tokens <= FEW_TOKENS:
        return FewShape(16, 8, 4) if product.tokens == 1 else FewShape(16, 4, 4)
    if x.dtype == torch.float32:
        return Shape(32, 1, 8, 2, 4, False, False, False)
    return Shape(64 if product.tokens <= 64 else 128, 1, 8, 3, 4, False, False, False)


@functools.lru_cache(4096)
def _nearest(product: Product, device: torch.device) -> list[Any] | None:
    """The best shape of the measured product most like this one; None on a GPU without measurements."""
    if device.type != "cuda":
        return None
    rows = _table().get(torch.cuda.get_device_name(device), [])
    found = [row for row in rows if row["kind"] == product.kind and _class(row["tokens"]) == _class(product.tokens)]
    return min(found, key=functools.partial(_distance, product))["shape"] if found else None


def _class(tokens: int) -> int:
    """Shapes are exchanged only within: one token, few, many."""
    return (tokens > 1) + (tokens > FEW_TOKENS)


def _distance(product: Product, row: dict[str, Any]) -> float:
    return abs(math.log(product.tokens / row["tokens"])) + abs(math.log(product.tiles / row["tiles"]))


@functools.cache
def _table() -> dict[str, list[dict[str, Any]]]:
    """By the name of a GPU."""
    return json.loads(TABLE.read_text())["gpus"]

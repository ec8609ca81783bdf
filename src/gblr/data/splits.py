"""Which part of the data trains and which judges: by names where they tell, else drawn by a seed."""

import re
from collections.abc import Iterable, Mapping
from typing import Literal, TypeVar

import torch

Split = Literal["train", "validation", "test"]
T = TypeVar("T")
_WORDS: dict[str, Split] = {
    "train": "train", "training": "train", "test": "test", "testing": "test",
    "validation": "validation", "valid": "validation", "val": "validation", "dev": "validation", "eval": "validation",
}  # fmt: skip
HELD_OUT = 0.1  # of data that comes without a test part


def split_of(name: str) -> Split | None:
    """
    >>> split_of("train-00000-of-00002.parquet"), split_of("wiki.valid.txt"), split_of("latest.txt")
    ('train', 'validation', None)
    """
    words = [word for word in re.split(r"[^a-z]+", name.lower()) if word in _WORDS]
    return _WORDS[words[0]] if words else None


def by_split(named: Iterable[tuple[str, T]]) -> dict[str, list[T]]:
    """Things by the split that their names tell; "" for those that tell none."""
    found: dict[str, list[T]] = {}
    for name, thing in named:
        found.setdefault(split_of(name) or "", []).append(thing)
    return found


def train_and_test(splits: Mapping[str, T]) -> tuple[T | None, T | None]:
    """What trains ("train", else what tells nothing) and what judges ("test", else "validation"), if they are there."""
    return splits.get("train", splits.get("")), splits.get("test", splits.get("validation"))


def draw_held_out(num: int, seed: int, share: float = HELD_OUT) -> tuple[list[int], list[int]]:
    """Numbers that train and numbers that judge, at least one of each."""
    if num < 2:
        raise ValueError(f"{num} sample cannot be divided into a training and a test part; give more data.")
    order = torch.randperm(num, generator=torch.Generator().manual_seed(seed)).tolist()
    cut = min(max(1, round(num * share)), num - 1)
    return sorted(order[cut:]), sorted(order[:cut])


def draw_some(num: int, most: int | None, seed: int) -> list[int]:
    """At most `most` of `num` numbers, in order."""
    if most is None or most >= num:
        return list(range(num))
    return sorted(torch.randperm(num, generator=torch.Generator().manual_seed(seed))[:most].tolist())

"""Layers for bench_cpu.py: random blocks of a given cost beside nn.Linear, and the floor that the machine sets."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gblr.layers.structured import StructuredLinear
from gblr.matrices.packed import PackedGBLR
from gblr.matrices.structure import Structure


@dataclass(frozen=True)
class Case:
    """Random blocks whose widths spread by a factor of five around their mean, at any place."""

    out_features: int
    in_features: int
    cost: float
    block_rank: int = 1
    align: int = 1
    targets: tuple[float, ...] = ()  # of dense time, for batches 1, 16, 197, 2048

    @property
    def num_blocks(self) -> int:
        return min(self.out_features, self.in_features) // self.block_rank

    def __str__(self) -> str:
        rank = f", block_rank {self.block_rank}" + (f" aligned {self.align}" if self.align > 1 else "")
        return f"{self.out_features} x {self.in_features}, cost {self.cost:g}{rank}"


def random_packed(case: Case, seed: int = 0) -> PackedGBLR:
    generator = torch.Generator().manual_seed(seed)
    size = case.out_features * case.in_features
    mean = case.cost * size / (case.num_blocks * case.block_rank * (case.out_features + case.in_features))
    sides = []
    for length in (case.out_features, case.in_features):
        fraction = mean * (1 / 3 + 4 / 3 * torch.rand(case.num_blocks, generator=generator))
        width = (fraction * length / case.align).round().long().clamp(1, length // case.align) * case.align
        location = torch.randint(length // case.align, (case.num_blocks,), generator=generator) * case.align
        sides += [width, location]
    structure = Structure(*sides)
    numbers = [case.block_rank * int(structure.row_width.sum()), case.block_rank * int(structure.col_width.sum())]
    u, v = (torch.randn(n, generator=generator) / case.in_features**0.5 for n in numbers)
    return PackedGBLR(structure, u, v, case.block_rank, (case.out_features, case.in_features))


def packed_layer(case: Case, bias: bool = True, seed: int = 0) -> StructuredLinear:
    layer = StructuredLinear(random_packed(case, seed), torch.zeros(case.out_features) if bias else None)
    layer.planned = "packed"
    layer.prepare()
    return layer


def in_turns(calls: Sequence[Callable[[], Any]], seconds: float, least: int = 5) -> list[float]:
    """Median seconds of each; several calls a turn where one is short, as the clock is coarse."""
    once = [_time(call, 1) for call in calls]
    per_turn = max(1, int(0.002 / max(1e-6, min(once))))
    rounds = max(least, int(seconds / (per_turn * sum(once))))
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, found in zip(calls, times, strict=True):
            found.append(_time(call, per_turn))
    return [statistics.median(found) for found in times]


def _time(call: Callable[[], Any], count: int) -> float:
    begin = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - begin) / count


class Machine:
    """What one thread of this machine can do at best, measured: multiplications, and bytes read from where they lie."""

    def __init__(self) -> None:
        a, b = torch.randn(2, 1536, 1536)
        self.mults_per_second = 1536**3 / min(_time(lambda: a @ b, 1) for _ in range(10))

    def bytes_per_second(self, size: int) -> float:
        """Of reading `size` bytes again and again, from the caches where they fit."""
        a, b = (torch.randn(max(1, size // 8)) for _ in range(2))  # both aligned
        return 8 * len(a) / min(_time(lambda: torch.dot(a, b), 5) for _ in range(60))

    def floor(self, layer: StructuredLinear, batch: int) -> float:
        numbers = layer.u.numel() + layer.v.numel()
        return max(batch * numbers / self.mults_per_second, 4 * numbers / self.bytes_per_second(4 * numbers))


def measure(case: Case, batch: int, machine: Machine, seconds: float) -> dict[str, Any]:
    layer, dense = packed_layer(case), nn.Linear(case.in_features, case.out_features)
    x = torch.randn(batch, case.in_features)
    dense_time, packed_time = in_turns([lambda: dense(x), lambda: layer(x)], seconds)
    floor = machine.floor(layer, batch)
    return {
        "case": str(case), "batch": batch, "relative_cost": round(layer.matrix.relative_cost, 4),
        "ratio": round(packed_time / dense_time, 4), "dense_us": round(dense_time * 1e6, 1),
        "packed_us": round(packed_time * 1e6, 1), "floor_us": round(floor * 1e6, 1),
        "over_floor": round(packed_time / floor, 2),
    }  # fmt: skip

"""Layers for bench_gpu.py and tune_gpu.py: packed blocks, low rank of equal cost and nn.Linear, timed as CUDA graphs.

A graph holds several calls, each with weights and inputs of its own where they would else stay in the cache. Variants
are replayed in turns; medians.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from cpu_cases import Case, random_packed
from torch import Tensor
from torch.nn import functional

from gblr.conversion import timing
from gblr.ops.block_matmul import gpu, tiling

Call = Callable[[], Any]
_CACHE = 2e8  # bytes: several times the L2 of any GPU
_MOST_COPIES = 16


def on_gpu() -> bool:
    return torch.cuda.is_available()


def device() -> torch.device:
    return torch.device("cuda" if on_gpu() else "cpu")


def captured(calls: Sequence[Call]) -> Call:
    """All of them as one graph; on a CPU, for trying the scripts, one after the other."""
    if not on_gpu():
        return lambda: [call() for call in calls]
    return timing.captured(calls)


def in_turns(runs: Sequence[Call], rounds: int) -> list[float]:
    """Median seconds of each run."""
    times: list[list[float]] = [[] for _ in runs]
    for turn in range(rounds + 2):
        for run, found in zip(runs, times, strict=True):
            seconds = seconds_of(run)
            if turn >= 2:  # the first two warm up
                found.append(seconds)
    return [statistics.median(found) for found in times]


def seconds_of(run: Call) -> float:
    if not on_gpu():
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


class Machine:
    """What this device can do at best, measured: multiplications in bfloat16, and bytes read and written."""

    def __init__(self, size: int = 8192):
        a, b = (torch.randn(size, size, device=device(), dtype=torch.bfloat16) for _ in range(2))
        run = captured([lambda: a @ b] * 4)
        self.mults_per_second = 4 * size**3 / min(seconds_of(run) for _ in range(10))
        source = torch.zeros(8 * size * size, device=device(), dtype=torch.bfloat16)
        negated = torch.empty_like(source)  # by a kernel: copies in a graph may take a slower engine
        run = captured([lambda: torch.neg(source, out=negated)] * 4)
        self.bytes_per_second = 16 * source.numel() / min(seconds_of(run) for _ in range(10))

    def floor(self, mults: float, numbers: float) -> float:
        """Seconds for so many multiplications, and so many numbers of two bytes moved once."""
        return max(mults / self.mults_per_second, 2 * numbers / self.bytes_per_second)


class Layer:
    """One case with its three kinds of weights, in bfloat16."""

    def __init__(self, case: Case, seed: int = 0):
        self.case = case
        matrix = random_packed(case, seed).to(torch.bfloat16).to(device())
        s = matrix.structure
        sides = (s.row_width, s.row_location, s.col_width, s.col_location)
        self.index, self.sizes = tiling.tile_blocks(*sides, case.block_rank, matrix.shape)
        self.values = tiling.pack(*matrix.factors(), self.index, self.sizes)
        self.weight = matrix.to_dense()
        self.mults = matrix.num_mults
        self.rank = max(64, round(self.mults / (case.out_features + case.in_features) / 64) * 64)
        new = {"dtype": torch.bfloat16, "device": device()}
        self.down = torch.randn(self.rank, case.in_features, **new) / case.in_features**0.5
        self.up = torch.randn(case.out_features, self.rank, **new) / self.rank**0.5

    def dense(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight)

    def low_rank(self, x: Tensor) -> Tensor:
        return functional.linear(functional.linear(x, self.down), self.up)

    def packed(self, x: Tensor) -> Tensor:
        return gpu.tile_matmul(x, self.values, self.index, None, self.sizes)

    def error(self, x: Tensor) -> float:
        """Of the packed product, by torch's own float32."""
        expected = x.float() @ self.weight.float().T
        return float((self.packed(x).float() - expected).norm() / expected.norm())


def measure(case: Case, tokens: int, machine: Machine, rounds: int = 15) -> dict[str, Any]:
    first = Layer(case)
    numbers = first.values.numel() + tokens * (case.in_features + case.out_features)
    copies = min(_MOST_COPIES, math.ceil(_CACHE / (2 * numbers)))
    layers = [first, *(Layer(case, seed) for seed in range(1, copies))]
    inputs = [torch.randn(tokens, case.in_features, device=device(), dtype=torch.bfloat16) for _ in layers]
    error = first.error(inputs[0])
    if not error < 0.02:
        raise RuntimeError(f"{case}, {tokens} tokens: the packed product is wrong, relative error {error:.3g}.")
    runs = []
    for kind in ("dense", "low_rank", "packed"):
        calls = [partial(getattr(layer, kind), x) for layer, x in zip(layers, inputs, strict=True)]
        runs.append(captured(calls))
    dense, low_rank, packed = (seconds / copies for seconds in in_turns(runs, rounds))
    floor = machine.floor(tokens * first.mults, first.mults + tokens * (case.in_features + case.out_features))
    return {
        "case": str(case), "tokens": tokens, "relative_cost": round(first.mults / first.weight.numel(), 4),
        "low_rank_cost": round(first.rank * sum(first.weight.shape) / first.weight.numel(), 4),
        "padding": round(first.sizes.num_values / first.mults, 3), "dense_us": round(dense * 1e6, 2),
        "low_rank_us": round(low_rank * 1e6, 2), "packed_us": round(packed * 1e6, 2),
        "floor_us": round(floor * 1e6, 2), "over_dense": round(dense / packed, 3),
        "over_low_rank": round(low_rank / packed, 3), "over_floor": round(packed / floor, 2),
    }  # fmt: skip

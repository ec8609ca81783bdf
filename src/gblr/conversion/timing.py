"""Times that can be compared: calls in turns, so that a busy moment hits all alike."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gblr.fitting import graphs

_GPU_CALLS = 5


def interleaved_medians(calls: Sequence[Callable[[], Any]], device: torch.device, rounds: int = 7) -> list[float]:
    """Seconds of each call, the median of `rounds`."""
    return [statistics.median(found) for found in interleaved(calls, device, rounds)]


def interleaved(
    calls: Sequence[Callable[[], Any]], device: torch.device, rounds: int, seconds: float = 0.0
) -> list[list[float]]:
    """Seconds of each call in every round: at least `rounds` of them, and more until `seconds` have gone by.

    One round before them warms up and does not count.
    """
    times: list[list[float]] = [[] for _ in calls]
    begin = time.perf_counter()
    done = -1
    with torch.no_grad():
        while done < rounds or (time.perf_counter() - begin < seconds and done < 1000):
            done += 1
            for call, found in zip(calls, times, strict=True):
                found.append(_seconds(call, device))
    return [found[1:] for found in times]


def captured(calls: Sequence[Callable[[], Any]]) -> Callable[[], Any]:
    """All of them, one after another, as a CUDA graph to be replayed; other such graphs may overwrite its results."""
    kept: list[Any] = []
    with torch.no_grad():
        graph = graphs.captured(
            lambda: kept.extend(call() for call in calls),
            calls[0],  # kernels are compiled, libraries ready
            torch.device("cuda", torch.cuda.current_device()),
        )

    def replay(kept: Any = (calls, kept)) -> None:  # the graph reads and writes what they hold
        graph.replay()

    return replay


def _seconds(call: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":
        return _gpu_seconds(call, device)
    wait(device)
    begin = time.perf_counter()
    call()
    wait(device)
    return time.perf_counter() - begin


def _gpu_seconds(call: Callable[[], Any], device: torch.device) -> float:
    """Of one call among several in a row, as a model makes them: launches of one hide behind the work of the last."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.device(device):
        begin.record()
        for _ in range(_GPU_CALLS):
            call()
        end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / _GPU_CALLS


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

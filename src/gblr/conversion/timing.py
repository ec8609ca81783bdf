"""Times that can be compared: calls in turns, so that a busy moment hits all alike."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch


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


def _seconds(call: Callable[[], Any], device: torch.device) -> float:
    wait(device)
    begin = time.perf_counter()
    call()
    wait(device)
    return time.perf_counter() - begin


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

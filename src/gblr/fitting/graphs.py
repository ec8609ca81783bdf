"""CUDA graphs that live for a moment: made in milliseconds, in memory that all of them share."""

import functools
from collections.abc import Callable
from typing import Any

import torch


def captured(step: Callable[[], Any], before: Callable[[], Any], device: torch.device) -> Any:
    """`step` as a graph; `before` runs once, outside of it. What it leaves in memory of its own does not last: another
    graph may use the same.
    """
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        before()
        graph = _capture(step, _shared_memory(device)[0])
    torch.cuda.current_stream(device).wait_stream(side)
    return graph


def _capture(step: Callable[[], Any], pool: Any) -> Any:
    """Not by `torch.cuda.graph`, which gives all unused memory back first: fits and planners capture hundreds."""
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(pool, "thread_local")
    try:
        step()
    finally:
        graph.capture_end()
    return graph


@functools.cache
def _shared_memory(device: torch.device) -> tuple[Any, Any]:
    """With a graph that keeps it: memory of which no graph is left would be set aside, and new memory taken."""
    pool = torch.cuda.graph_pool_handle()
    number = torch.zeros((), device=device)

    def count() -> None:
        number.add_(1)

    return pool, _capture(count, pool)

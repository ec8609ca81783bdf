"""Training steps as CUDA graphs: a step of a small model is thousands of kernels, which take longer to launch than to
run.
"""

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from gblr.training.batches import map_tensors, tensors_in

_MAX_GRAPHS = 64  # shapes beyond them run as ordinary steps


class StepGraphs:
    """Calls `step(batch)` for the first batch of each shape, captures the second, and replays that from then on.

    A captured step must not wait for the device, nor depend on numbers that Python draws or counts. Graphs share their
    memory: what one leaves there, beside parameters and the optimizer's state, the next may overwrite.
    """

    def __init__(self, step: Callable[[Any], None], device: torch.device):
        self.step, self.device = step, device
        self.graphs: dict[Hashable, tuple[Any, Any]] = {}
        self._seen: set[Hashable] = set()
        self._pool: Any = None

    def __call__(self, batch: Any) -> None:
        shape = shape_of(batch)
        if shape not in self.graphs:
            if shape not in self._seen or len(self.graphs) >= _MAX_GRAPHS:
                self._seen.add(shape)
                self._plain(batch)
                return
            self.graphs[shape] = self._captured(batch)
        graph, inputs = self.graphs[shape]
        for kept, new in zip(tensors_in(inputs), tensors_in(batch), strict=True):
            kept.copy_(new, non_blocking=True)
        graph.replay()

    def _plain(self, batch: Any) -> None:
        """On a stream of its own: gradients remember where they were made, and a capture is not on the default one."""
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            self.step(batch)
        torch.cuda.current_stream(self.device).wait_stream(side)

    def _captured(self, batch: Any) -> tuple[Any, Any]:
        """The graph, and the tensors that it reads, which are not the user's own."""
        batch = map_tensors(torch.clone, batch)
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                self.step(batch)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise RuntimeError(
                "this training step cannot be captured (cuda_graphs=True): the model or `loss` waits for the device, "
                "by .item(), .tolist(), indexing with a mask or an `if` on a tensor. Train without `cuda_graphs`."
            ) from error
        return graph, batch


def shape_of(batch: Any) -> Hashable:
    """What a captured step takes for granted: shapes and dtypes of tensors, everything else as it is."""
    if isinstance(batch, Tensor):
        return tuple(batch.shape), batch.dtype
    if isinstance(batch, dict):
        return tuple((key, shape_of(value)) for key, value in batch.items())
    if isinstance(batch, (tuple, list)):
        return tuple(shape_of(value) for value in batch)
    return batch

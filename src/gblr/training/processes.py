"""What several processes of one run tell each other; alone, a process tells itself."""

import atexit
import sys
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

_GOODBYE = timedelta(seconds=5)
# DDP keeps its group, and so gloo's threads, beyond `destroy_process_group`. One that still holds a tensor of its last
# sum when Python ends aborts the process (pytorch/pytorch#179291): here it gets Python's lock to let go of it.
_LAST_WORD = 0.1


def is_one_of_several() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def leave_at_exit() -> None:
    """Lets go of the others when the program ends, as torch asks for."""
    atexit.unregister(_leave)  # once is enough, however many runs there are
    atexit.register(_leave)


def _leave() -> None:
    failed = hasattr(sys, "last_value")  # an error is on its way out: the others may never come, and NCCL would wait
    if failed or not (dist.is_available() and dist.is_initialized()):
        return
    if dist.get_backend() == "gloo":  # it aborts a process whose peer is gone a moment before it
        with suppress(RuntimeError):
            dist.monitored_barrier(timeout=_GOODBYE)
    dist.destroy_process_group()
    time.sleep(_LAST_WORD)


def sum_over_processes(value: Tensor) -> Tensor:
    if is_one_of_several():
        value = value.clone()
        dist.all_reduce(value)
    return value


def mean_over_processes(value: Tensor) -> Tensor:
    return sum_over_processes(value) / dist.get_world_size() if is_one_of_several() else value


def from_main(value: Any) -> Any:
    """What the first process has, on all of them."""
    box = [value]
    if is_one_of_several():
        dist.broadcast_object_list(box, src=0)
    return box[0]


def from_all(value: Any) -> list[Any]:
    """What each process has, in their order, on all of them."""
    values = [value]
    if is_one_of_several():
        values *= dist.get_world_size()
        dist.all_gather_object(values, value)
    return values

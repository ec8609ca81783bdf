"""How fits use the threads of a CPU: one matrix each, rather than a part of every small step.

A fit is thousands of steps of some microseconds to milliseconds. Threads that share each of them wait for one another
as many times, and where other programs run too, for longer than they work.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

Found = TypeVar("Found")
Tick = Callable[[], None]  # called after each part of the work, for a progress bar

_SMALL = 1 << 20  # numbers in a batch of weights
_LEAST = 1 << 16  # numbers of a matrix: below, most of the time is Python's, which runs one thread at a time
_MOST_SHARES = 8  # for the same reason
_lowered: list[int] = []  # numbers of threads that `few_threads` has set aside


@contextmanager
def few_threads(weight: Tensor) -> Iterator[None]:
    """One CPU thread for the steps on small weights: waking other threads costs more than each."""
    small = weight.device.type == "cpu" and weight.numel() < _SMALL
    with _one_thread() if small else nullcontext():
        yield


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    if threads == 1:
        yield
        return
    _lowered.append(threads)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(_lowered.pop())


class _Stopped(Exception):
    """Another share has failed, or the user has had enough."""


def shared_out(
    work: Callable[[slice, Tick], list[Found]], weight: Float[Tensor, "b out in"], tick: Tick = lambda: None
) -> list[Found]:
    """`work` on a batch of weights, by as many threads as there are for steps: a share of the matrices each.

    It is called with the matrices of a share and what to tick; the outcomes come in the order of the batch. On a GPU
    it is called once, with all.
    """
    shares = _shares(weight)
    if len(shares) == 1:
        return work(shares[0], tick)
    stop, modes = threading.Event(), (torch.is_inference_mode_enabled(), torch.is_grad_enabled())
    outcomes: list[list[Found]] = [[] for _ in shares]
    errors: list[BaseException] = []

    def one(number: int) -> None:
        def ticked() -> None:
            if stop.is_set():
                raise _Stopped
            if number == 0:  # they are equally far
                tick()

        try:
            with torch.inference_mode(modes[0]), torch.set_grad_enabled(modes[1]):  # each thread has its own
                outcomes[number] = work(shares[number], ticked)
        except BaseException as error:
            errors.append(error)
            stop.set()

    # daemons: an interrupt does not wait for them, and they end at their next tick, or with the program
    threads = [threading.Thread(target=one, args=(number,), daemon=True) for number in range(len(shares))]
    with _one_thread():
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            stop.set()
    if errors:
        raise errors[0]
    return [found for share in outcomes for found in share]


def _shares(weight: Tensor) -> list[slice]:
    count, threads = len(weight), _lowered[0] if _lowered else torch.get_num_threads()
    num = min(threads, count, _MOST_SHARES)
    if weight.device.type != "cpu" or num < 2 or weight[0].numel() < _LEAST:
        return [slice(0, count)]
    ends = [round(count * i / num) for i in range(num + 1)]
    return [slice(begin, end) for begin, end in pairwise(ends)]

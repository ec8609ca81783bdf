"""A progress bar with a time estimate, for work that takes more than a few seconds; quiet for anything shorter."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

_QUIET_SECONDS = 2.0
_LINE_SECONDS = 20.0  # without a terminal: one plain line this often, so that a log shows that work goes on


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[], None]]:
    """Yields a function to call after each of `total` parts of the work. Writes to stderr."""
    console = Console(stderr=True)
    bar = Progress(
        TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
        console=console, transient=True,
    )  # fmt: skip
    task = bar.add_task(what, total=total)
    begin = last_line = time.monotonic()
    done = 0

    def tick() -> None:
        nonlocal done, last_line
        done += 1
        now = time.monotonic()
        bar.advance(task)
        if now - begin < _QUIET_SECONDS:
            return
        if console.is_terminal:
            if not bar.live.is_started:
                bar.start()
        elif now - last_line > _LINE_SECONDS:
            last_line = now
            left = (now - begin) / done * (total - done)
            print(f"{what}: {done} of {total}, about {left:.0f} s left", file=sys.stderr, flush=True)

    try:
        yield tick
    finally:
        if bar.live.is_started:
            bar.stop()

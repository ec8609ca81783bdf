"""A progress bar with a time estimate, for work that takes more than a few seconds; quiet for anything shorter."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

_QUIET_SECONDS = 2.0
_LINE_SECONDS = 20.0  # without a terminal: one plain line this often, so that a log shows that work goes on


class Ticker:
    """To be called after each part of the work; writes to stderr, nothing at all if `shown` is off.

    `done` parts were finished before. A note, such as the present loss, stands beside the count until the next one.
    """

    def __init__(self, what: str, total: int, done: int = 0, shown: bool = True):
        self._what, self._total, self._done, self._shown = what, total, done, shown
        self._first, self._note = done, ""
        self._console = Console(stderr=True)
        self._bar = Progress(
            TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"), console=self._console, transient=True,
        )  # fmt: skip
        self._task = self._bar.add_task(what, total=total, completed=done, note="")
        self._begin = self._last_line = time.monotonic()

    def __call__(self, note: str | None = None) -> None:
        self._note = self._note if note is None else note
        self._done += 1
        now = time.monotonic()
        self._bar.update(self._task, completed=self._done, note=self._note)
        if now - self._begin < _QUIET_SECONDS or not self._shown:
            return
        if self._console.is_terminal:
            if not self._bar.live.is_started:
                self._bar.start()
        elif now - self._last_line > _LINE_SECONDS:
            self._last_line = now
            left = (now - self._begin) / (self._done - self._first) * (self._total - self._done)
            note = f", {self._note}" if self._note else ""
            self.say(f"{self._what}: {self._done} of {self._total}{note}, about {duration(left)} left")

    def say(self, line: str) -> None:
        """A line that stays, above the bar."""
        if not self._shown:
            return
        if self._bar.live.is_started:
            self._console.print(line, highlight=False, markup=False)
        else:
            print(line, file=sys.stderr, flush=True)

    def stop(self) -> None:
        if self._bar.live.is_started:
            self._bar.stop()


@contextmanager
def progress(what: str, total: int, done: int = 0, shown: bool = True) -> Iterator[Ticker]:
    """Yields a function to call after each of `total` parts of the work. Writes to stderr."""
    ticker = Ticker(what, total, done, shown)
    try:
        yield ticker
    finally:
        ticker.stop()


def duration(seconds: float) -> str:
    """
    >>> duration(90), duration(1800), duration(9000)
    ('90 s', '30 min', '2.5 h')
    """
    if seconds < 600:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"

"""Ctrl-C and SIGTERM, obeyed between two steps, when the run can be saved."""

import signal
import threading
from types import FrameType
from typing import Any, NoReturn

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Notes the first signal; a second one of its kind acts as it would have without this."""

    def __init__(self) -> None:
        self.received = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread():  # elsewhere python allows no handlers
            for number in _SIGNALS:
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        signal.signal(number, self._before[number])


def obey(number: int) -> NoReturn:
    """Ends as the signal asked: Ctrl-C as in any program, SIGTERM with the exit code that shells give it."""
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)

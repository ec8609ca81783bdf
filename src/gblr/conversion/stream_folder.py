"""The folder of a streamed conversion: what was asked for, what is done, and which processes are at work on it.

out/streaming.json                      the arguments; once it is finished, the report too
out/.streaming/inputs/00000.pt          a calibration batch: what each block is called with besides hidden states
out/.streaming/hidden-003/00000.pt      the hidden states that block 3 is given in the dense model
out/.streaming/converted-003/00000.pt   and, where layers are refitted, in the converted one
out/.streaming/unit-003/                block 3 on its way: Gram matrices, fitted layers, refitted ones
out/.streaming/unit-003.safetensors     block 3 done; unit-003.json says what is in it
out/.streaming/alive-1, failed-1.json   process 1 of several

Everything appears under its name only when it is complete, so a process may be killed at any moment.
"""

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from gblr.atomic import appearing, write_json

CLAIM, WORK = "streaming.json", ".streaming"
_BEAT = 2.0  # seconds between two signs of life
_POLL = 0.05
_REMOVALS = 20


class OtherConversion(ValueError):
    """The folder holds a conversion with other arguments, or something else."""


class StreamFolder:
    """Files of one conversion, seen by process `rank` of `world`."""

    def __init__(self, out: Path, rank: int, world: int, timeout: float):
        self.out, self.work = out, out / WORK
        self.rank, self.world, self.timeout = rank, world, timeout
        self._begin = time.time()

    # -- what was asked for

    def check(self, claim: dict[str, Any]) -> dict[str, Any] | None:
        """What an earlier run with the same arguments stored, if there was one; raises if it was another."""
        if not self.out.exists():
            return None
        if not self.out.is_dir():
            raise OtherConversion(f"{self.out} is a file. Choose another folder.")
        stored = read_json(self.out / CLAIM)
        if stored is None:
            # nor the claim itself on its way, which another process writes
            others = sorted(p.name for p in self.out.iterdir() if p.name != WORK and not p.name.startswith(f".{CLAIM}"))
            if others:
                raise OtherConversion(
                    f"{self.out} is not empty ({', '.join(others[:3])}) and holds no streamed conversion. Choose "
                    "another folder."
                )
            return None
        wrong = [f"{key} was {stored['claim'].get(key)!r}" for key in claim if stored["claim"].get(key) != claim[key]]
        if wrong:
            raise OtherConversion(
                f"{self.out} holds a conversion with other arguments ({'; '.join(wrong)}). Choose another folder, or "
                "delete that one."
            )
        return stored

    def claim(self, claim: dict[str, Any]) -> None:
        """Makes the folder this conversion's: the first process writes, the others wait for it."""
        if self.rank == 0:
            self.out.mkdir(parents=True, exist_ok=True)
            self.work.mkdir(exist_ok=True)
            if self.check(claim) is None:
                write_json(self.out / CLAIM, {"claim": claim})
        else:
            self.wait(lambda: (self.work.is_dir() and (self.out / CLAIM).is_file()) or self.is_finished(), "to begin")
            self.check(claim)

    def is_finished(self) -> bool:
        """Whether the report is there; the work folder may be gone then."""
        return "report" in (read_json(self.out / CLAIM) or {})

    # -- processes

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Shows the others that this process lives, and tells them if it fails."""
        failed = self.work / f"failed-{self.rank}.json"
        failed.unlink(missing_ok=True)
        stop = threading.Event()
        thread = threading.Thread(target=self._beat, args=(stop,), daemon=True)
        thread.start()
        try:
            yield
        except BaseException as error:
            if self.world > 1 and self.work.is_dir():
                write_json(failed, {"error": f"{type(error).__name__}: {error}"})
            raise
        finally:
            stop.set()
            thread.join()

    def _beat(self, stop: threading.Event) -> None:
        while True:
            if self.world > 1:
                with suppress(FileNotFoundError):  # the first process may have ended
                    (self.work / f"alive-{self.rank}").write_text(str(time.time()))
            if stop.wait(_BEAT):
                return

    def wait(self, ready: Callable[[], bool], what: str) -> None:
        """Until `ready`; an error if another process failed, or has given no sign of life for `timeout` seconds."""
        signs: dict[int, tuple[str, float]] = {}
        while not ready():
            for other in range(self.world):
                if other != self.rank:
                    self._check_other(other, signs, what)
            time.sleep(_POLL)

    def _check_other(self, other: int, signs: dict[int, tuple[str, float]], what: str) -> None:
        failed = self.work / f"failed-{other}.json"
        if failed.is_file() and failed.stat().st_mtime > self._begin:
            raise RuntimeError(f"process {other} failed: {(read_json(failed) or {}).get('error')}")
        file = self.work / f"alive-{other}"
        try:
            sign = file.read_text()
        except OSError:
            sign = ""
        if other not in signs or signs[other][0] != sign:
            signs[other] = sign, time.monotonic()
        elif time.monotonic() - signs[other][1] > self.timeout:
            raise RuntimeError(
                f"process {self.rank} waited for {what}, but process {other} of {self.world} has given no sign of life "
                f"for {self.timeout:g} seconds. Start all of them again: what is done stays done."
            )

    # -- files

    def unit(self, number: int) -> Path:
        """The folder of a block on its way."""
        return self.work / f"unit-{number:03d}"

    def unit_marker(self, number: int) -> Path:
        return self.work / f"unit-{number:03d}.json"

    def unit_file(self, number: int) -> Path:
        return self.work / f"unit-{number:03d}.safetensors"

    def inputs(self, batch: int) -> Path:
        return self.work / "inputs" / f"{batch:05d}.pt"

    def hidden(self, block: int, batch: int, converted: bool = False) -> Path:
        return self.work / f"{'converted' if converted else 'hidden'}-{block:03d}" / f"{batch:05d}.pt"

    def remove_work(self) -> None:
        """Again, if another process gives its last sign of life just then: a folder is removed only if it is empty."""
        for _ in range(_REMOVALS):
            shutil.rmtree(self.work, ignore_errors=True)
            if not self.work.exists():
                return
            time.sleep(_POLL)


def read_json(file: Path) -> Any:
    """None if it is not there."""
    try:
        return json.loads(file.read_text())
    except FileNotFoundError:
        return None


def save(file: Path, content: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with appearing(file) as new:
        torch.save(content, new)


def load(file: Path) -> Any:
    return torch.load(file, map_location="cpu", weights_only=True)

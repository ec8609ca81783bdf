"""Files and folders that are replaced as a whole: after a crash at any moment the old one or the new one is there,
complete.
"""

import errno
import importlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

fcntl: Any = importlib.import_module("fcntl") if os.name == "posix" else None


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """Yields an empty folder that takes the place of `folder` when the block ends; if it fails, nothing changes."""
    new, old = _beside(folder)
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    try:
        yield new
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    sync(new)
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)
        os.rename(folder, old)
    os.rename(new, folder)
    _sync_one(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def complete(folder: Path) -> Path | None:
    """Where the complete folder is: in its place, or, after a crash between the two renames, beside it."""
    return next((place for place in (folder, _beside(folder)[1]) if place.is_dir()), None)


def remove(folder: Path) -> None:
    for place in (folder, *_beside(folder)):
        shutil.rmtree(place, ignore_errors=True)


def sync(folder: Path) -> None:
    """Waits until everything in the folder is on the disk."""
    for path in (*folder.rglob("*"), folder):
        _sync_one(path)


def _sync_one(path: Path) -> None:
    if path.is_dir() and os.name != "posix":
        return  # only POSIX opens folders
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _beside(folder: Path) -> tuple[Path, Path]:
    return folder.with_name(f".{folder.name}.new"), folder.with_name(f".{folder.name}.old")


_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)  # what disks without locks answer


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Raises `Busy` where another process has the folder; the system frees it however a process ends. Disks and systems
    without locks have none.
    """
    handle = os.open(folder, os.O_RDONLY) if fcntl is not None else None
    try:
        if fcntl is not None and handle is not None:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Busy(f"{folder} is in use by another process: wait for it, or choose another folder.") from None
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
        yield
    finally:
        if handle is not None:
            os.close(handle)


class Busy(ValueError):
    """Another process works in the folder."""


@contextmanager
def appearing(file: Path) -> Iterator[Path]:
    """A path to write to; the file takes its name when the block ends, and is on the disk then."""
    new = file.with_name(f".{file.name}.{os.getpid()}.new")
    try:
        yield new
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    _sync_one(new)
    os.replace(new, file)


def write_json(file: Path, content: object) -> None:
    """The file appears complete or not at all."""
    with appearing(file) as new:
        new.write_text(json.dumps(content, indent=1) + "\n")

"""Texts from files: plain (.txt and the like) or one JSON object a line (.jsonl), compressed by xz or gzip or not."""

import gzip
import json
import lzma
import re
import warnings
import zlib
from io import TextIOWrapper
from pathlib import Path

from gblr.data.splits import by_split

_PLAIN = frozenset({".txt", ".text", ".raw", ".tokens", ".md"})
_LINES = frozenset({".jsonl", ".ndjson"})
_NO_UTF8 = re.compile("[\udc80-\udcff]")  # what Python reads such bytes as
_DAMAGED = (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error)
_OPENERS = {".xz": lzma.open, ".gz": gzip.open}


def is_text(file: Path) -> bool:
    return _suffix(file) in _PLAIN | _LINES


def read_texts(path: str | Path, by_line: bool = False) -> dict[str, list[str]]:
    """Texts by split ("" where names tell none): a plain file is one text, or with `by_line` one a line that is not
    empty; a .jsonl file has one under "text" in each line.
    """
    path = Path(path)
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file() and is_text(file))
    if not files:
        raise FileNotFoundError(f"no texts in {path}: expected .txt or .jsonl files, .xz or .gz behind it allowed.")
    named = [(str(file.relative_to(path)) if file != path else "", file) for file in files]
    found = {
        split: [text for file in part for text in _readable(_read(file, by_line), file)]
        for split, part in by_split(named).items()
    }
    if not any(found.values()):
        raise ValueError(f"{path} holds no text.")
    return {split: texts for split, texts in found.items() if texts}


def _readable(texts: list[str], file: Path) -> list[str]:
    """With U+FFFD for bytes that are no UTF-8; a model has hardly seen that, so it must not go unnoticed."""
    found = [_NO_UTF8.subn("\ufffd", text) for text in texts]
    if num := sum(count for _, count in found):
        warnings.warn(f"{file} is not all UTF-8: {num} bytes were replaced. Convert it to UTF-8 first.", stacklevel=3)
    return [text for text, _ in found]


def _suffix(file: Path) -> str:
    return (Path(file.stem) if file.suffix in _OPENERS else file).suffix.lower()


def _read(file: Path, by_line: bool) -> list[str]:
    try:
        with _open(file) as stream:
            if _suffix(file) in _LINES:
                return [_text_of(line, file, number) for number, line in enumerate(stream, 1) if line.strip()]
            if by_line:
                return [line.strip() for line in stream if line.strip()]
            text = stream.read()
            return [text] if text.strip() else []
    except _DAMAGED as error:
        raise OSError(f"{file} is damaged, or not compressed as its name says: {error}. Get it again.") from error


def _open(file: Path) -> TextIOWrapper:
    """Without the mark at the beginning that Windows writes."""
    return _OPENERS.get(file.suffix, open)(file, "rt", encoding="utf-8-sig", errors="surrogateescape")  # type: ignore[operator]


def _text_of(line: str, file: Path, number: int) -> str:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"line {number} of {file} is no JSON: {error}.") from error
    if not isinstance(row, dict) or not isinstance(row.get("text"), str):
        keys = ", ".join(row) if isinstance(row, dict) else type(row).__name__
        raise ValueError(f'line {number} of {file} must be an object with a string under "text"; it has {keys}.')
    return row["text"]

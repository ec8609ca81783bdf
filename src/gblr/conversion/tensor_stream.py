"""safetensors files tensor by tensor: no map of the whole file and no second copy, so that memory holds one of them."""

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gblr.conversion.tensor_files import CheckpointError

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_MOST_HEADER = 100_000_000  # bytes, the limit of safetensors itself


@dataclass(frozen=True)
class Entry:
    """A tensor in a file: where its bytes are, and what they mean."""

    name: str
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self) -> Tensor:
        """The tensor in memory of its own, on the CPU."""
        values = torch.empty(self.nbytes, dtype=torch.uint8)
        view: Any = values.numpy()
        with open_file(self.file) as stream:
            stream.seek(self.offset)
            if self.nbytes and stream.readinto(view) != self.nbytes:
                raise CheckpointError(f"{self.file} ends before tensor {self.name!r} does: it is truncated.")
        return values.view(self.dtype).view(self.shape)


def open_file(file: Path) -> BufferedReader:
    try:
        return file.open("rb")
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror or error}.") from error


def read_entries(file: Path) -> dict[str, Entry]:
    """What a safetensors file holds, by its header; raises `CheckpointError` where header and file do not agree."""
    size = file.stat().st_size if file.is_file() else 0
    with open_file(file) as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or not 2 <= length <= min(_MOST_HEADER, size - 8):
            raise CheckpointError(f"{file} is no safetensors file, or is truncated.")
        try:
            header = json.loads(stream.read(length))
            entries = {n: _entry(n, f, file, 8 + length) for n, f in header.items() if n != "__metadata__"}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"the header of {file} is damaged: {error}") from error
    for entry in entries.values():
        if entry.offset + entry.nbytes > size:
            raise CheckpointError(
                f"{file} is truncated: tensor {entry.name!r} should end at byte {entry.offset + entry.nbytes:,}, and "
                f"the file has {size:,}. Download it again."
            )
    return entries


def _entry(name: str, fields: dict[str, Any], file: Path, base: int) -> Entry:
    if fields["dtype"] not in _DTYPES:
        raise ValueError(f"tensor {name!r} has the unknown dtype {fields['dtype']!r}")
    begin, end = fields["data_offsets"]
    entry = Entry(name, file, _DTYPES[fields["dtype"]], tuple(int(n) for n in fields["shape"]), base + begin)
    if end - begin != entry.nbytes or begin < 0:
        raise ValueError(f"tensor {name!r} takes {end - begin} bytes, but its shape calls for {entry.nbytes}")
    return entry


@dataclass(frozen=True)
class Piece:
    """A tensor to write: `load` is called when its turn comes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    load: Callable[[], Tensor]


def write_pieces(file: Path, pieces: Iterable[Piece], written: Callable[[str, Tensor], None] | None = None) -> None:
    """A safetensors file of the pieces, each loaded, written and forgotten; `written` sees each once it is there."""
    ordered = sorted(pieces, key=lambda piece: (-piece.dtype.itemsize, piece.name))  # aligned, as safetensors does it
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for piece in ordered:
        begin, end = end, end + math.prod(piece.shape) * piece.dtype.itemsize
        header[piece.name] = {"dtype": _CODES[piece.dtype], "shape": list(piece.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for piece in ordered:
            tensor = piece.load().detach().cpu().contiguous()
            assert tensor.dtype == piece.dtype and tuple(tensor.shape) == piece.shape
            values: Any = tensor.reshape(-1).view(torch.uint8).numpy()
            stream.write(values)
            if written is not None:
                written(piece.name, tensor)
            del tensor, values  # before the next one is loaded: two embeddings would be twice the largest layer

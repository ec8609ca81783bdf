"""What a streamed conversion leaves: a safetensors file for each block, and the manifest of `save_pretrained`."""

import itertools
import math
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gblr.atomic import appearing, write_json
from gblr.conversion.blocks import Blocks
from gblr.conversion.checkpoint import describe_model, publish
from gblr.conversion.layer_spec import build_layer, dtype_name, dtype_of
from gblr.conversion.model_files import ModelFiles
from gblr.conversion.replace import replace_layer
from gblr.conversion.stream_folder import CLAIM, StreamFolder, read_json
from gblr.conversion.tensor_files import Record, checksum, unsaved_buffers, write_tensors
from gblr.conversion.tensor_stream import Piece, read_entries, write_pieces
from gblr.conversion.transformers_model import save_config


def write_unit(
    model: Any, files: ModelFiles, blocks: Blocks, number: int, markers: Sequence[Path], folder: StreamFolder
) -> None:
    """Puts the fitted layers of a block and all else in it into one file, tensor by tensor, and tidies up."""
    layers = [read_json(marker) for marker in markers]
    collected = read_json(folder.unit(number) / "collected.json") or {}
    gone = tuple(f"{layer['name']}." for layer in layers)
    records: dict[str, Record] = {}
    pieces = []
    for marker, layer in zip(markers, layers, strict=True):
        for name, entry in read_entries(marker.with_suffix(".safetensors")).items():
            pieces.append(Piece(name, entry.dtype, entry.shape, entry.read))
        records |= layer["records"]
    names = [name for name in _names(files, blocks, number) if not (gone and name.startswith(gone))]
    for name in names:
        shape, dtype = files.entries[name].shape, files.dtype_of(name)
        pieces.append(Piece(name, dtype, shape, lambda name=name: files.read(name)))  # type: ignore[misc]

    def written(name: str, tensor: Any) -> None:
        if name not in records:
            shape, dtype = list(tensor.shape), dtype_name(tensor.dtype)
            records[name] = {"shape": shape, "dtype": dtype, "crc32": checksum(tensor)}

    with appearing(folder.unit_file(number)) as new:
        write_pieces(new, pieces, written)
    found = {
        "records": records,
        "layers": {layer["name"]: layer["spec"] for layer in layers},
        "rows": [row for layer in layers for row in layer["rows"]],
        "inputs": {name: seen["positions"] for name, seen in collected.items()},
    }
    write_json(folder.unit_marker(number), found)
    shutil.rmtree(folder.unit(number), ignore_errors=True)


def _names(files: ModelFiles, blocks: Blocks, number: int) -> Iterator[str]:
    """Stored tensors of the block, or of all that is in none."""
    prefixes = tuple(f"{name}." for name in blocks.names)
    if number < len(prefixes):
        return (name for name in files.entries if name.startswith(prefixes[number]))
    return (name for name in files.entries if not name.startswith(prefixes))


def finish(model: Any, files: ModelFiles, num_units: int, folder: StreamFolder) -> None:
    """The files under their final names, with config, manifest and index; the report last: it says that all is done."""
    units = [read_json(folder.unit_marker(number)) for number in range(num_units)]
    for name, spec in itertools.chain.from_iterable(unit["layers"].items() for unit in units):
        replace_layer(model, name, build_layer(spec))
    manifest = describe_model(model)
    scratch = folder.work / "result"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    manifest["transformers"] = save_config(model, scratch)
    manifest["tensors"] = _records(model, units)
    buffers, aliases = unsaved_buffers(model)
    manifest["buffers"] = (
        write_tensors(buffers, scratch, "gblr_buffers.safetensors", 1 << 62) if buffers else {}
    )  # fmt: skip
    manifest["aliases"] = files.aliases | aliases
    for number in range(num_units):
        file = folder.unit_file(number)
        if file.is_file():  # else an earlier run, stopped right here, has moved it
            os.replace(file, folder.out / _final(number, num_units))
    publish(manifest, sum(_nbytes(record) for record in manifest["tensors"].values()), scratch, folder.out)
    stored = read_json(folder.out / CLAIM)
    rows = [row for unit in units for row in unit["rows"]]
    inputs = {name: count for unit in units for name, count in unit.get("inputs", {}).items()}
    write_json(folder.out / CLAIM, stored | {"report": rows, "inputs": inputs})


def _records(model: Any, units: Sequence[Any]) -> dict[str, Record]:
    """In the order of the state dict, as `save_pretrained` has them."""
    found = {
        name: record | {"file": _final(number, len(units))}
        for number, unit in enumerate(units)
        for name, record in unit["records"].items()
    }
    return {name: found[name] for name in model.state_dict() if name in found}


def _final(number: int, num_units: int) -> str:
    return f"model-{number + 1:05d}-of-{num_units:05d}.safetensors"


def _nbytes(record: Record) -> int:
    return math.prod(record["shape"]) * dtype_of(record["dtype"]).itemsize

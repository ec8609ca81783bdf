"""Named tensors in safetensors files, each with a record of what must be found there: shape, dtype, checksum, file."""

import os
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from gblr.conversion.layer_spec import dtype_name, dtype_of
from gblr.layers.gaudi import GaudiModule

Record = dict[str, Any]  # shape, dtype, crc32, file; stored, where the file keeps another dtype
SHOWN = 8  # problems named in one error; the rest is counted


class CheckpointError(ValueError):
    """A checkpoint that is damaged, or that does not fit the model; nothing was changed."""


def raise_all(directory: Path, problems: Iterable[str]) -> None:
    """One error for all problems, if there are any."""
    found = list(problems)
    if found:
        more = [f"... and {len(found) - SHOWN} more"] if len(found) > SHOWN else []
        raise CheckpointError("\n  ".join([f"{directory} cannot be loaded:", *found[:SHOWN], *more]))


def unique_tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The state dict with each shared tensor once, and the other names of those: {alias: stored name}.

    Of the names of tied weights, transformers' "source" is the stored one, as in its own checkpoints.
    """
    state: dict[str, Any] = model.state_dict(keep_vars=True)
    targets = getattr(model, "all_tied_weights_keys", None) or {}
    stored: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[Any, str] = {}
    for name in sorted(state, key=lambda name: name in targets):  # stable: sources first
        tensor = state[name]
        if not isinstance(tensor, Tensor):
            raise ValueError(
                f"{name!r} of the state dict is no tensor but {type(tensor).__name__}: it cannot be saved."
            )
        if tensor.is_meta:
            raise ValueError(f"tensor {name!r} is on the meta device and has no values to save.")
        known = first.setdefault(_identity(tensor), name)
        if known == name:
            stored[name] = tensor.detach()
        else:
            aliases[name] = known
    return {name: stored[name] for name in state if name in stored}, aliases


def unsaved_buffers(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Buffers outside the state dict (rotary frequencies, position ids), those of equal content once.

    A model built on the meta device has no other way to get them bit by bit. Tables of Gaudi layers follow from sigma.
    """
    state = set(model.state_dict())
    stored: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[Any, str] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for leaf, tensor in module.named_buffers(prefix=path, recurse=False):
            if leaf in state or isinstance(module, GaudiModule):
                continue
            known = first.setdefault((checksum(tensor), tuple(tensor.shape), tensor.dtype), leaf)
            if known == leaf:
                stored[leaf] = tensor.detach()
            else:
                aliases[leaf] = known
    return stored, aliases


def _identity(tensor: Tensor) -> Any:
    if tensor.numel() == 0:
        return id(tensor)  # empty tensors have no memory to share
    view = (tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
    return tensor.untyped_storage()._cdata, view


def checksum(tensor: Tensor) -> int:
    values: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return zlib.crc32(values)


def weights_checksum(model: nn.Module) -> int:
    """Of all tensors of a model, with their names."""
    return zlib.crc32(repr([(name, checksum(tensor)) for name, tensor in model.state_dict().items()]).encode())


def save_file(tensors: dict[str, Tensor], file: Path, metadata: dict[str, str]) -> None:
    from safetensors.torch import save_file as save  # here, since it is a quarter of the time that `import gblr` takes

    try:
        save(tensors, file, metadata)
    except SafetensorError as error:  # a full disk, for which it has no OSError
        raise OSError(f"{file} cannot be written: {error}. Make room on the disk, then do it again.") from error


def write_tensors(
    tensors: Mapping[str, Tensor], folder: Path, file: str, max_bytes: int, narrow: tuple[str, ...] = ()
) -> dict[str, Record]:
    """Writes `file`, or numbered shards of it where the tensors are larger than `max_bytes`; returns their records.

    Whole numbers of layers named in `narrow` (places and widths of blocks) take as few bytes as they need; those of
    other layers stay as transformers reads them.
    """
    prefixes = tuple(f"{layer}." if layer else "" for layer in narrow)
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > max_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    records: dict[str, Record] = {}
    for number, shard in enumerate(shards, start=1):
        target = file
        if len(shards) > 1:
            target = file.replace(".safetensors", f"-{number:05d}-of-{len(shards):05d}.safetensors")
        own = {name: _own(tensor) for name, tensor in shard.items()}
        stored = {name: _narrowed(t) if prefixes and name.startswith(prefixes) else t for name, t in own.items()}
        save_file(stored, folder / target, metadata={"format": "pt"})
        for name, tensor in own.items():
            shape, dtype = list(tensor.shape), dtype_name(tensor.dtype)
            records[name] = {"shape": shape, "dtype": dtype, "crc32": checksum(tensor), "file": target}
            if stored[name].dtype != tensor.dtype:
                records[name]["stored"] = dtype_name(stored[name].dtype)
    return records


def _narrowed(tensor: Tensor) -> Tensor:
    """int64 as int16 or int32 where the values fit."""
    if tensor.dtype != torch.int64 or not tensor.numel():
        return tensor
    low, high = (int(end) for end in tensor.aminmax())
    for dtype in (torch.int16, torch.int32):
        if torch.iinfo(dtype).min <= low and high <= torch.iinfo(dtype).max:
            return tensor.to(dtype)
    return tensor


def _own(tensor: Tensor) -> Tensor:
    """On the CPU, contiguous, and in memory that nothing else shares, as safetensors asks."""
    tensor = tensor.detach().cpu().contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def read_tensors(folder: Path, records: Mapping[str, Record]) -> dict[str, Tensor]:
    """The tensors on the CPU, each compared with its record."""
    problems: list[str] = []
    values: dict[str, Tensor] = {}
    for file in sorted({record["file"] for record in records.values()}):
        wanted = {name: record for name, record in records.items() if record["file"] == file}
        if os.path.basename(file) != file:
            raise CheckpointError(f"{folder}: {file!r} must be the name of a file in this directory.")
        try:
            with safe_open(folder / file, framework="pt", device="cpu") as opened:
                names = set(opened.keys())
                problems += [f"tensor {name!r} is missing in {file}" for name in wanted if name not in names]
                problems += [f"tensor {name!r} of {file} is not in gblr.json" for name in sorted(names - set(wanted))]
                for name in (name for name in wanted if name in names):
                    stored = _own(opened.get_tensor(name))
                    values[name], found = _widened(name, wanted[name], stored)
                    problems += found or _differences(name, wanted[name], values[name])
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{folder / file} is missing, truncated or no safetensors file: {error}") from error
    raise_all(folder, problems)
    return values


def _widened(name: str, record: Record, tensor: Tensor) -> tuple[Tensor, list[str]]:
    """The tensor in the dtype it was saved from."""
    if "stored" not in record:
        return tensor, []
    if dtype_name(tensor.dtype) != record["stored"]:
        found = describe(tensor.shape, dtype_name(tensor.dtype))
        return tensor, [f"tensor {name!r}: expected {record['stored']}, found {found} in {record['file']}"]
    return tensor.to(dtype_of(record["dtype"])), []


def _differences(name: str, record: Record, tensor: Tensor) -> list[str]:
    expected, found = describe(record["shape"], record["dtype"]), describe(tensor.shape, dtype_name(tensor.dtype))
    if expected != found:
        return [f"tensor {name!r}: expected {expected}, found {found} in {record['file']}"]
    if checksum(tensor) != record["crc32"]:
        return [
            f"tensor {name!r}: the checksum of its values differs from the one in gblr.json; {expected} as expected"
        ]
    return []


def describe(shape: Iterable[int], dtype: str) -> str:
    return f"shape {tuple(shape)} {dtype}"

"""The weights of a transformers model where they lie: safetensors files, by the names that the model gives them."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gblr.conversion.tensor_files import SHOWN, CheckpointError
from gblr.conversion.tensor_stream import Entry, read_entries
from gblr.conversion.transformers_model import build_without_weights, renamer

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_OTHERS = ("pytorch_model*.bin", "*.gguf", "*.pt", "*.pth", "tf_model.h5", "flax_model.msgpack")


@dataclass(frozen=True)
class ModelFiles:
    """Reads a tensor of the model by its name in the state dict; floating-point ones in the model's dtype."""

    folder: Path
    entries: dict[str, Entry]
    aliases: dict[str, str]  # other names of shared tensors, {alias: name in entries}
    dtype: torch.dtype | None

    def dtype_of(self, name: str) -> torch.dtype:
        stored = self.entries[name].dtype
        return self.dtype if self.dtype is not None and stored.is_floating_point else stored

    def read(self, name: str) -> Tensor:
        return self.entries[name].read().to(self.dtype_of(name))

    def fill(self, module: nn.Module, prefix: str, recurse: bool = True) -> None:
        """Gives the tensors of `module`, which the model calls `prefix`, their values."""
        for path, part in module.named_modules() if recurse else [("", module)]:
            tables: list[dict[str, Any]] = [part._parameters, part._buffers]
            for table in tables:
                for leaf, tensor in table.items():
                    name = ".".join(word for word in (prefix, path, leaf) if word)
                    name = self.aliases.get(name, name)
                    if tensor is not None and name in self.entries and tensor.is_meta:
                        value = self.read(name)
                        table[leaf] = nn.Parameter(value, False) if table is part._parameters else value


def open_model_files(source: Path) -> tuple[Any, ModelFiles]:
    """The model of a Hugging Face directory, without weights, and its files.

    Parameters are on the meta device, in the dtype that they will have; buffers that no file holds are real. Every
    tensor of the model is found in the files, in the shape that the model expects, or an error says what is not.
    """
    stored = _stored_entries(source)
    model = build_without_weights(source)
    aliases = _aliases(model)
    entries, problems = _matched(model, aliases, stored)
    if problems:
        more = [f"... and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
        lines = "\n  ".join([*problems[:SHOWN], *more])
        raise CheckpointError(
            f"the files of {source} do not fit {type(model).__name__}:\n  {lines}\nIf transformers can load the "
            "directory, load it where there is memory and write it again by `save_pretrained`."
        )
    files = ModelFiles(source, entries, aliases, _dtype(model.config))
    _adopt(model, files)
    return model.eval(), files


def _stored_entries(source: Path) -> dict[str, Entry]:
    if not source.is_dir():
        raise FileNotFoundError(f"there is no directory {source}. Streaming reads a local Hugging Face directory.")
    if not (source / "config.json").is_file():
        raise FileNotFoundError(f"{source} has no config.json, so it is no directory of a Hugging Face model.")
    if (source / "gblr.json").is_file():
        raise ValueError(f"{source} was written by gblr: its layers are structured already, and nothing is to fit.")
    index = source / INDEX
    if (source / WEIGHTS).is_file():  # first, as transformers looks for them
        names = [WEIGHTS]
    elif index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index} is damaged: {error}") from error
    else:
        raise FileNotFoundError(_no_safetensors(source))
    absent = [name for name in names if not (source / name).is_file()]
    if absent:
        raise CheckpointError(f"{source} lacks {len(absent)} of {len(names)} shards, {absent[0]} among them.")
    return {name: entry for file in names for name, entry in read_entries(source / file).items()}


def _no_safetensors(source: Path) -> str:
    others = sorted(file.name for pattern in _OTHERS for file in source.glob(pattern))
    found = f" It has {', '.join(others[:3])}: load that by transformers and write it by `save_pretrained`." * bool(
        others
    )
    return f"{source} has neither {WEIGHTS} nor {INDEX}; streaming reads safetensors alone.{found}"


def _aliases(model: nn.Module) -> dict[str, str]:
    """{other name: stored name} of tied weights; transformers' source is the stored one, as in its own files."""
    state: dict[str, Any] = model.state_dict(keep_vars=True)
    targets = getattr(model, "all_tied_weights_keys", None) or {}
    first: dict[int, str] = {}
    return {
        name: first[id(state[name])]
        for name in sorted(state, key=lambda name: name in targets)
        if first.setdefault(id(state[name]), name) != name
    }


def _matched(model: Any, aliases: dict[str, str], stored: dict[str, Entry]) -> tuple[dict[str, Entry], list[str]]:
    """The file's tensors under the model's names: as they are, as transformers renames them, or with the prefix of the
    base model on or off.
    """
    if not stored.keys() >= model.state_dict().keys() - aliases.keys():
        rename = renamer(model)
        stored = {rename(name): entry for name, entry in stored.items()} | stored
    prefix = f"{getattr(model, 'base_model_prefix', '') or ' '}."
    found: dict[str, Entry] = {}
    problems = []
    same: dict[str, list[str]] = {}
    for alias, name in aliases.items():
        same.setdefault(name, []).append(alias)
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name in aliases:
            continue
        spellings = [s for n in (name, *same.get(name, [])) for s in (n, n.removeprefix(prefix), prefix + n)]
        entry = next((stored[s] for s in spellings if s in stored), None)
        if entry is None:
            problems.append(f"tensor {name!r} of the model is in none of them")
        elif entry.shape != tuple(tensor.shape):
            problems.append(f"tensor {name!r}: expected shape {tuple(tensor.shape)}, found {entry.shape}")
        else:
            found[name] = entry
    return found, problems


def _dtype(config: Any) -> torch.dtype | None:
    """What transformers' dtype="auto" casts to; None leaves each tensor as it is stored."""
    named = getattr(config, "dtype", None)
    named = getattr(torch, named, None) if isinstance(named, str) else named
    return named if isinstance(named, torch.dtype) else None


def _adopt(model: nn.Module, files: ModelFiles) -> None:
    """Every tensor that a file holds goes to the meta device, in its dtype; tied ones stay one parameter."""
    made: dict[str, nn.Parameter] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for leaf, tensor in (*module._parameters.items(), *module._buffers.items()):
            full = f"{path}.{leaf}" if path else leaf
            name = files.aliases.get(full, full)
            if tensor is None or name not in files.entries:
                continue
            empty = torch.empty(tensor.shape, dtype=files.dtype_of(name), device="meta")
            if leaf in module._parameters:
                module._parameters[leaf] = made.setdefault(name, nn.Parameter(empty, requires_grad=False))
            else:
                module._buffers[leaf] = empty

"""Which call of `heal_` a folder belongs to: what it holds takes the place of the model's own layers."""

import hashlib
import json
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from gblr.atomic import complete, write_json
from gblr.conversion.refit import structured_layers
from gblr.conversion.tensor_files import CheckpointError
from gblr.layers.gaudi import GaudiModule
from gblr.layers.split import SplitLinear

_SAMPLED = 4096  # numbers of each tensor: enough to tell weights apart
_SAME_COST = 0.01  # fits on a GPU need not end with the very same blocks twice


def claim(folder: Path, model: nn.Module, teacher: nn.Module, options: dict[str, Any]) -> None:
    """Notes whose folder it is, or raises CheckpointError where another call has left results in it."""
    layers = structured_layers(model)
    call = {
        "teacher": _digest(teacher),
        "formats": {name: _format(layer) for name, layer in layers.items()},
        "mults": sum(_mults(layer) for layer in layers.values()),
        **options,
    }
    file = folder / "call.json"
    has_results = (folder / "layers.json").exists() or complete(folder / "train" / "last") is not None
    if has_results and file.exists() and (different := _differences(json.loads(file.read_text()), call)):
        raise CheckpointError(
            f"{folder} holds what another call of `heal_` came to: {'; '.join(different)}. Give the same model, "
            "teacher and settings to continue it, or another `out`."
        )
    folder.mkdir(parents=True, exist_ok=True)
    write_json(file, call)


def _differences(stored: dict[str, Any], call: dict[str, Any]) -> list[str]:
    found = []
    for name, now in call.items():
        before = stored.get(name)
        if name == "teacher" and before != now:
            found.append("`teacher` has other weights")
        elif name == "formats" and before != now:
            found.append("`model` has other structured layers")
        elif name == "mults" and abs(before - now) > _SAME_COST * max(before, now):
            found.append(f"`model` had {before} multiplications in its structured layers and has {now}")
        elif name not in ("teacher", "formats", "mults") and before != now:
            found.append(f"`{name}` was {before!r} and is {now!r}")
    return found


def _format(layer: Any) -> str:
    parts = layer.parts if isinstance(layer, SplitLinear) else [layer]
    return ", ".join(type(part if isinstance(part, GaudiModule) else part.matrix).__name__ for part in parts)


def _mults(layer: Any) -> int:
    if isinstance(layer, SplitLinear):
        return sum(_mults(part) for part in layer.parts)
    return layer.num_mults if isinstance(layer, GaudiModule) else layer.matrix.num_mults


def _digest(model: nn.Module) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name, value in model.state_dict().items():
        if isinstance(value, Tensor) and not value.is_meta and not hasattr(value, "full_tensor"):
            flat = value.detach().reshape(-1)
            some = flat[:: max(1, flat.numel() // _SAMPLED)].cpu().double()
            digest.update(repr((name, tuple(value.shape))).encode() + some.numpy().tobytes())
    return digest.hexdigest()

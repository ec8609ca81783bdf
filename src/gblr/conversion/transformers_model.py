"""What checkpoints need of transformers, where it is installed: config files, and models without numbers."""

import contextlib
import copy
import importlib
import json
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from gblr.conversion.layer_spec import dtype_name
from gblr.conversion.tensor_files import CheckpointError

_PORTABLE_ATTENTION = ("eager", "sdpa")  # others need packages that may be absent where the checkpoint is loaded


def is_transformers_model(model: nn.Module) -> bool:
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def save_config(model: Any, folder: Path) -> dict[str, Any]:
    """Writes config.json and generation_config.json as transformers does; returns what they do not tell."""
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = dtype_name(model.dtype)
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)
    attention = getattr(model.config, "_attn_implementation", None)
    return {"attention": attention if attention in _PORTABLE_ATTENTION else None}


def build_on_meta(directory: Path, architecture: str, attention: str | None) -> Any:
    """The model of config.json, without memory for its weights."""
    return _build(directory, architecture, attention, torch.device("meta"))


def build_without_weights(directory: Path) -> Any:
    """The model of a directory of transformers: parameters on the meta device, but buffers as they are computed.

    Rotary frequencies and position ids stand in no file; a model on the meta device could not be run without them.
    """
    try:
        config = json.loads((directory / "config.json").read_text())
        names, is_quantized = config.get("architectures") or [], "quantization_config" in config
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{directory / 'config.json'} cannot be read: {error}") from error
    if is_quantized:
        raise CheckpointError(f"{directory} holds quantized weights, which have no matrices to fit; use the originals.")
    if not names:
        raise CheckpointError(f'{directory / "config.json"} names no class of the model under "architectures".')
    return _build(directory, names[0], None, _EmptyOnMeta())


class _EmptyOnMeta(TorchFunctionMode):
    """`torch.empty`, of which modules make their weights, takes no memory; all else is computed."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return func(*args, **(kwargs | {"device": "meta"} if func is torch.empty else kwargs))


def _build(directory: Path, architecture: str, attention: str | None, mode: AbstractContextManager[Any]) -> Any:
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise ImportError("`from_pretrained` needs transformers: pip install 'gblr[hf]'.") from error
    found = getattr(transformers, architecture, None)
    if not (isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)):
        raise CheckpointError(
            f"{directory} holds a {architecture}, which is no model of transformers {transformers.__version__}. "
            "Build the model yourself, then use `gblr.load_(model, directory)`."
        )
    cls: Any = found
    try:
        config = cls.config_class.from_pretrained(directory)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{directory / 'config.json'} cannot be read: {error}") from error
    with mode:
        model = cls(copy.deepcopy(config))
        if attention in _PORTABLE_ATTENTION and model.config._attn_implementation != attention:
            config._attn_implementation = attention  # of all parts, which else may have one each
            with contextlib.suppress(ValueError):  # a part, such as a backbone, does not have it
                model = cls(config)
    if (directory / "generation_config.json").exists() and model.can_generate():
        model.generation_config = transformers.GenerationConfig.from_pretrained(directory)
    return model


def renamer(model: Any) -> Callable[[str], str]:
    """From the name of a tensor in a file to that in the model: transformers renames some when it loads them.

    Tensors that it also joins or splits keep their names; the caller will not find them in the model.
    """
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightRenaming, rename_source_key
    except ImportError:
        return lambda name: name  # an older transformers, whose files have the names of its models
    rules: Any = [rule for rule in get_model_conversion_mapping(model) if isinstance(rule, WeightRenaming)]
    return lambda name: rename_source_key(name, rules, [])[0]

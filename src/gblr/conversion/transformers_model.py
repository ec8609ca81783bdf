"""What checkpoints need of transformers, where it is installed: config files, and models without numbers."""

import copy
import importlib
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

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
    if attention in _PORTABLE_ATTENTION:
        config._attn_implementation = attention
    with torch.device("meta"):
        model = cls(config)
    if (directory / "generation_config.json").exists() and model.can_generate():
        model.generation_config = transformers.GenerationConfig.from_pretrained(directory)
    return model

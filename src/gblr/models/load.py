"""A trained model from wherever a user keeps it, with what its data needs to know: image size, tokenizer, lengths."""

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from gblr.models.hugging_face import describe, load_hugging_face
from gblr.models.loaded import LoadedModel
from gblr.models.timm_models import import_timm
from gblr.models.vit import ViT

__all__ = ["LoadedModel", "load_model"]

_ATTRIBUTES = {"image_size": int, "in_channels": int, "image_mean": tuple, "image_std": tuple}
_DIGITS: dict[str, Any] = {
    "image_size": 8, "patch_size": 2, "in_channels": 1, "width": 64, "depth": 3, "num_heads": 4, "mlp_ratio": 2.0,
}  # fmt: skip


def load_model(source: str, *, task: str | None = None, dtype: torch.dtype | None = None) -> LoadedModel:
    """Loads `source`: a directory or id of Hugging Face, a .gguf file, `timm:NAME`, `python:module:function`, or
    `vit:digits`.

    A Hugging Face model gets the class that its config names; `task` ("text-generation", "text-classification",
    "image-classification" or "feature-extraction") overrules it. `dtype` casts the weights, which else stay as stored.
    The function of `python:` takes no arguments and returns a model, or a model and its tokenizer; it is looked up in
    the current folder too. A model of one's own may carry what is to be known of its images as attributes:
    `image_size`, `in_channels`, `image_mean`, `image_std`.

    >>> load_model("vit:digits").image_size
    8
    """
    prefix, colon, rest = source.partition(":")
    if colon and prefix in _PREFIXES:
        loaded = _PREFIXES[prefix](source, rest)
    else:
        loaded = load_hugging_face(source, task, dtype)
    if dtype is not None:
        loaded.model.to(dtype)
    loaded.model.eval()
    return loaded


def _builtin(source: str, name: str) -> LoadedModel:
    if name != "digits":
        raise ValueError(f"the only built-in model is vit:digits; got {source!r}.")
    return LoadedModel(
        ViT(**_DIGITS), source, "ViT", image_size=8, in_channels=1, kind="images", pretrained=False,
        note="vit:digits has random weights: train it first, or learn its structure from scratch",
    )  # fmt: skip


def _from_timm(source: str, name: str) -> LoadedModel:
    timm = import_timm()
    if not timm.is_model(name):
        near = ", ".join(timm.list_models(f"*{name.split('_')[0]}*")[:8]) or "see timm.list_models()"
        raise ValueError(f"timm {timm.__version__} has no model {name!r}. Some that it has: {near}.")
    model, note = _timm_model(timm, name)
    given = model.pretrained_cfg
    size = given.get("input_size") or (3, None, None)
    return LoadedModel(
        model, source, type(model).__name__, image_size=size[-1], in_channels=size[0], kind="images",
        image_mean=given.get("mean"), image_std=given.get("std"), crop_share=given.get("crop_pct") or 1.0,
        pretrained=not note, note=note,
    )  # fmt: skip


def _timm_model(timm: Any, name: str) -> tuple[Any, str]:
    """With its weights if they can be had, else with random ones and a note that says so."""
    try:
        return timm.create_model(name, pretrained=True), ""
    except (OSError, RuntimeError) as error:  # no weights exist, or the hub is out of reach
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return timm.create_model(name), f"timm:{name} has random weights: the trained ones could not be had ({reason})"


def _from_python(source: str, place: str) -> LoadedModel:
    made = _call(source, _function(source, place))
    model, tokenizer = made if isinstance(made, (tuple, list)) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"{source} must return a torch module, or a module and its tokenizer; it returned {type(made).__name__}."
        )
    if hasattr(model, "config") and hasattr(model, "main_input_name"):
        loaded = describe(model, source, getattr(model.config, "_name_or_path", "") or None)
        loaded.tokenizer = tokenizer or loaded.tokenizer
        return loaded
    given: dict[str, Any] = {
        name: _numbers(source, name, getattr(model, name), convert) for name, convert in _ATTRIBUTES.items()
        if getattr(model, name, None) is not None
    }  # fmt: skip
    return LoadedModel(model, source, type(model).__name__, tokenizer=tokenizer, **given)


def _numbers(source: str, name: str, value: Any, convert: type) -> Any:
    """One whole number, or one float a channel, however they are written."""
    try:
        found = torch.as_tensor(value).flatten().tolist()
        if convert is tuple:
            return tuple(map(float, found))
        (number,) = {int(one) for one in found}
        return number
    except (TypeError, ValueError, RuntimeError) as error:
        wanted = "one whole number" if convert is int else "a number for each channel"
        raise ValueError(f"{source}: the attribute `{name}` must be {wanted}; got {value!r}.") from error


def _function(source: str, place: str) -> Callable[[], Any]:
    module_name, _, name = place.rpartition(":")
    if not module_name or not name:
        raise ValueError(f"expected python:module:function, such as python:my_models:small_vit; got {source!r}.")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and module_name.split(".")[0] != error.name.split(".")[0]:
            raise ModuleNotFoundError(f"{source}: {module_name} needs {error.name}, which is not installed.") from error
        raise ModuleNotFoundError(
            f"{source}: there is no module {module_name!r} in {os.getcwd()} or among the installed packages."
        ) from error
    except Exception as error:
        raise RuntimeError(f"{source}: importing {module_name} failed: {type(error).__name__}: {error}") from error
    found = getattr(module, name, None)
    if not callable(found):
        known = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        some = ", ".join(sorted(known)[:12]) or "none"
        raise ValueError(f"{source}: {module_name} has no function {name!r}; some that it has: {some}.")
    return found


def _call(source: str, function: Callable[[], Any]) -> Any:
    try:
        return function()
    except Exception as error:
        inside = error.__traceback__ is not None and error.__traceback__.tb_next is not None
        if isinstance(error, TypeError) and not inside:
            raise TypeError(f"{source} must be callable without arguments: {error}.") from error
        raise RuntimeError(f"{source} failed: {type(error).__name__}: {error}") from error


_PREFIXES: dict[str, Callable[[str, str], LoadedModel]] = {"vit": _builtin, "timm": _from_timm, "python": _from_python}

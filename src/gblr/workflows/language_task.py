"""Language modelling: to tell the next token of a text."""

import math
from collections.abc import Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

from gblr.data.splits import HELD_OUT
from gblr.data.tokens import Windows, pack
from gblr.progress import progress
from gblr.training.batches import to_device
from gblr.training.objective import logits_of
from gblr.training.train_config import FITTED_STRUCTURE_LR
from gblr.workflows.task import Request, Task, call, device_of

_WINDOW = 512  # tokens
_MOST_TRAIN, _MOST_EVAL = 20_000, 256  # windows unless asked otherwise: 10 million tokens, and 131 thousand
_LOGITS = 1 << 25  # scores computed at once in evaluation, 128 MiB in float32


def language_task(train: list[str], test: list[str] | None, request: Request) -> Task:
    """Perplexity of the next token, in windows that do not overlap."""
    loaded = request.loaded
    length = min(_WINDOW, loaded.max_length or _WINDOW)
    most_train, most_eval = request.max_train or _MOST_TRAIN, request.max_eval or _MOST_EVAL
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(request.seed)).tolist()
    texts = [train[i] for i in order]
    if test is None:
        windows = pack(_ticking(texts, "tokenising"), loaded.tokenizer, length, most_train + most_eval)
        cut = len(windows) - min(most_eval, max(1, round(HELD_OUT * len(windows))))
        parts = windows[: min(cut, most_train)], windows[cut:]
    else:
        parts = (
            pack(_ticking(texts, "tokenising training text"), loaded.tokenizer, length, most_train),
            pack(_ticking(test, "tokenising test text"), loaded.tokenizer, length, most_eval),
        )
    if min(len(part) for part in parts) == 0:
        raise ValueError(
            f"{request.source} is too short for windows of {length} tokens: there are {len(parts[0])} for training and "
            f"{len(parts[1])} for the test. Give more text."
        )
    is_hf = loaded.kind == "causal language model"
    train_set, test_set = (Windows(part, named=is_hf) for part in parts)
    return Task(
        name="language modelling", source=request.source,
        what=f"{len(train_set)} training and {len(test_set)} test windows of {length} tokens",
        metric="perplexity", unit="", higher_is_better=False,
        samples=train_set, train_data=train_set, eval_data=test_set,
        score=lambda model: perplexity(model, test_set), loss=None if is_hf else next_token_loss,
        train_defaults={
            "lr": 1e-4 if loaded.pretrained else 1e-3,
            "structure_lr": FITTED_STRUCTURE_LR if loaded.pretrained else 5e-3,
            "batch_size": min(8, len(train_set)), "epochs": 1.0, "warmup": 0.1,
        },
        batch_size=8, seed=request.seed, device=loaded.device,
    )  # fmt: skip


def next_token_loss(model: nn.Module, tokens: Int[Tensor, "b t"]) -> Float[Tensor, ""]:
    """For models that compute none themselves."""
    scores = logits_of(call(model, tokens)).float()
    return functional.cross_entropy(scores[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def perplexity(model: nn.Module, windows: Windows) -> float:
    device, total, count = device_of(model), 0.0, 0
    num_scores = logits_of(call(model, to_device(windows.inputs([0]), device))).numel()
    parts = torch.arange(len(windows)).split(max(1, min(32, _LOGITS // num_scores)))
    with progress("evaluating", len(parts)) as tick:
        for part in parts:
            batch = to_device(windows.inputs(part.tolist()), device)
            labels = windows.tokens[part][:, 1:].to(device)
            scores = logits_of(call(model, batch))[:, :-1].float()
            loss = functional.cross_entropy(scores.flatten(0, 1), labels.flatten(), reduction="sum")
            total, count = total + float(loss), count + labels.numel()
            tick(f"perplexity {math.exp(min(700.0, total / count)):.3f}")
    return math.exp(min(700.0, total / count))


def _ticking(texts: list[str], what: str) -> Iterator[str]:
    with progress(what, len(texts)) as tick:
        for text in texts:
            yield text
            tick()

"""Tasks of whole texts: classification, or being like the dense model where there are no labels."""

import inspect
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gblr.data.splits import draw_held_out, draw_some
from gblr.data.tokens import TextSet
from gblr.models.load import LoadedModel
from gblr.progress import progress
from gblr.training.batches import to_device
from gblr.training.objective import logits_of
from gblr.workflows.outputs_task import distillation_defaults, outputs_task
from gblr.workflows.task import Request, Task, call, device_of, main_output

LabelledTexts = tuple[list[str], Tensor]
_LENGTH = 256  # tokens of a text, as sentence encoders are used
_EVAL_BATCH = 32
_MOST_TRAIN, _MOST_EVAL, _MOST_CLASS_EVAL = 20_000, 500, 2_000  # texts unless asked otherwise


def text_outputs_task(train: list[str], test: list[str] | None, request: Request) -> Task:
    """An encoder on unlabelled text: its outputs should stay what they are."""
    loaded, seed = request.loaded, request.seed
    if test is None:
        kept, held_out = draw_held_out(len(train), seed)
        train, test = [train[i] for i in kept], [train[i] for i in held_out]
    train_texts = some_of(train, request.max_train or _MOST_TRAIN, seed)
    test_texts = some_of(test, request.max_eval or _MOST_EVAL, seed)
    what = f"{len(train_texts)} training and {len(test_texts)} test texts"
    return outputs_task(text_set(train_texts, loaded), text_set(test_texts, loaded), what, request)


def text_class_task(
    train: LabelledTexts, test: LabelledTexts | None, num_classes: int, request: Request, at_least: bool = False
) -> Task:
    """Accuracy in percent. `at_least` marks a number of classes that was only counted: the model may have more."""
    loaded, seed = request.loaded, request.seed
    if test is None:
        kept, held_out = draw_held_out(len(train[0]), seed)
        train, test = _rows(train, kept), _rows(train, held_out)
    train = _rows(train, draw_some(len(train[0]), request.max_train or _MOST_TRAIN, seed))
    test = _rows(test, draw_some(len(test[0]), request.max_eval or _MOST_CLASS_EVAL, seed))
    train_set, test_set = (text_set(texts, loaded, labels) for texts, labels in (train, test))
    _check_scores(loaded, train_set, num_classes, request.source, at_least)
    return Task(
        name="text classification", source=request.source,
        what=f"{len(train_set)} training and {len(test_set)} test texts, {num_classes} classes",
        metric="accuracy", unit="%", higher_is_better=True,
        samples=train_set, train_data=train_set, eval_data=test_set,
        score=lambda model: text_accuracy(model, test_set),
        train_defaults=distillation_defaults(len(train_set)) | {"lr": 1e-4},
        seed=seed, device=loaded.device,
    )  # fmt: skip


def text_accuracy(model: nn.Module, texts: TextSet) -> float:
    assert texts.labels is not None
    parts = torch.tensor(texts.order()).split(_EVAL_BATCH)
    right, device = 0, device_of(model)
    with progress("evaluating", len(parts)) as tick:
        for part in parts:
            scores = logits_of(call(model, to_device(texts.inputs(part.tolist()), device)))
            right += int((scores.argmax(-1).cpu() == texts.labels[part]).sum())
            tick()
    return 100 * right / len(texts)


def text_set(texts: list[str], loaded: LoadedModel, labels: Tensor | None = None) -> TextSet:
    known = inspect.signature(loaded.model.forward).parameters
    names = tuple(name for name in ("input_ids", "attention_mask", "token_type_ids") if name in known)
    return TextSet(texts, loaded.tokenizer, min(_LENGTH, loaded.max_length or _LENGTH), labels, names)


def _check_scores(loaded: LoadedModel, texts: TextSet, num_classes: int, source: str, at_least: bool) -> None:
    with torch.no_grad():
        scores = main_output(call(loaded.model, to_device(texts.inputs([0]), loaded.device)))
    if scores.shape[1:] != (num_classes,) and not (at_least and scores.shape[-1] > num_classes):
        raise ValueError(
            f"{source} has {num_classes} classes, but {loaded.architecture} gives {scores.shape[-1]} scores. Use a "
            f"model whose head has {num_classes} outputs, or leave the label column out."
        )


def some_of(texts: list[str], most: int | None, seed: int) -> list[str]:
    return [texts[i] for i in draw_some(len(texts), most, seed)]


def _rows(part: LabelledTexts, index: Sequence[int]) -> LabelledTexts:
    return [part[0][i] for i in index], part[1][list(index)]

"""Which task a table is for a model: its columns decide."""

from typing import Any

import torch

from gblr.data.splits import draw_held_out, draw_some
from gblr.data.tables import Columns, class_names, class_numbers, find_columns, parts_of, pictures, strings, take
from gblr.workflows.image_task import MEASURED, ImageData, image_task
from gblr.workflows.similarity_task import similarity_task
from gblr.workflows.task import Request, Task
from gblr.workflows.text_choice import check_reads_text, text_task
from gblr.workflows.text_tasks import LabelledTexts, text_class_task


def table_task(tables: dict[str, Any], request: Request) -> Task:
    """`tables` are pyarrow tables by split."""
    columns = find_columns(next(iter(tables.values())), request.source)
    train, test = parts_of(tables, columns.label)
    if not len(train):
        raise ValueError(f"{request.source} holds no row to train on.")
    if columns.image:
        return image_task(_images(train, test, columns, request), request)
    check_reads_text(request.loaded, request.source)
    if columns.pair:
        return _pairs(train, test, columns, request)
    assert columns.text
    if request.loaded.kind == "text classifier" and columns.label:
        classes = class_names(train, columns.label)
        parts = [_labelled(table, columns, classes) if table is not None else None for table in (train, test)]
        assert parts[0] is not None
        num_classes = len(classes) if classes else int(parts[0][1].max()) + 1
        return text_class_task(parts[0], parts[1], num_classes, request)
    test_texts = strings(test, columns.text) if test is not None else None
    task = text_task(strings(train, columns.text), test_texts, request)
    if columns.label:
        task.remark = (
            f"note: the column {columns.label!r} is not used, as {request.loaded.architecture} gives no scores of "
            f"classes: what counts is {task.metric}"
        )
    return task


def _images(train: Any, test: Any | None, columns: Columns, request: Request) -> ImageData:
    """Only as many rows are unpacked as are wanted."""
    assert columns.image
    if test is None:
        kept, held_out = draw_held_out(len(train), request.seed)
        train, test = take(train, kept), take(train, held_out)
    names = class_names(train, columns.label) if columns.label else None
    labels = class_numbers(train, columns.label, names) if columns.label else None
    num_classes = 0 if labels is None else len(names) if names else int(labels.max()) + 1
    parts = []
    for table, most in ((train, request.max_train), (test, request.max_eval)):
        some = take(table, draw_some(len(table), most, request.seed))
        numbers = class_numbers(some, columns.label, names) if columns.label else None
        parts.append(pictures(some, columns.image, numbers))
    some = take(train, draw_some(len(train), MEASURED, seed=0))
    to_measure = pictures(some, columns.image, None)
    return ImageData(parts[0], parts[1], num_classes, at_least=names is None, to_measure=to_measure)


def _pairs(train: Any, test: Any | None, columns: Columns, request: Request) -> Task:
    assert columns.pair and columns.score
    if request.loaded.kind != "text encoder":
        raise ValueError(
            f"{request.source} has pairs of sentences, which need an encoder of text; "
            f"{request.loaded.architecture} is a {request.loaded.kind}."
        )
    if test is None:
        kept, held_out = draw_held_out(len(train), request.seed)
        train, test = take(train, kept), take(train, held_out)
    first, second = columns.pair
    sentences = list(dict.fromkeys(strings(train, first) + strings(train, second)))
    pairs = test[first].to_pylist(), test[second].to_pylist()
    return similarity_task(sentences, pairs, test[columns.score].to_pylist(), request)


def _labelled(table: Any, columns: Columns, classes: tuple[str, ...] | None) -> LabelledTexts:
    assert columns.text and columns.label
    labels = class_numbers(table, columns.label, classes)
    texts = table[columns.text].to_pylist()
    kept = [i for i, text in enumerate(texts) if text and labels[i] >= 0]
    return [texts[i] for i in kept], labels[torch.tensor(kept, dtype=torch.long)]

"""Which task a table is for a model: its columns decide."""

from dataclasses import replace
from typing import Any

import torch

from gblr.data.splits import draw_held_out, draw_some, train_and_test
from gblr.data.tables import (
    Columns,
    check_columns,
    class_names,
    class_numbers,
    find_columns,
    model_order,
    parts_of,
    pictures,
    strings,
    take,
)
from gblr.workflows.image_task import MEASURED, ImageData, image_task
from gblr.workflows.similarity_task import similarity_task
from gblr.workflows.task import Request, Task
from gblr.workflows.text_choice import check_reads_text, text_task
from gblr.workflows.text_tasks import LabelledTexts, text_class_task


def table_task(tables: dict[str, Any], request: Request) -> Task:
    """`tables` are pyarrow tables by split."""
    first, _ = train_and_test(tables)
    columns = find_columns(next(iter(tables.values())) if first is None else first, request.source)
    train, test = parts_of(tables, columns.label or columns.score)
    if not len(train):
        raise ValueError(f"{request.source} holds no row to train on.")
    check_columns(train, columns, f"the training part of {request.source}")
    if test is not None:
        check_columns(test, columns, f"the test part of {request.source}")
    if columns.image:
        return image_task(_images(train, test, columns, request), request)
    check_reads_text(request.loaded, request.source)
    if columns.pair:
        return _pairs(train, test, columns, request)
    assert columns.text
    known = request.loaded.label_names
    if request.loaded.kind == "text classifier" and columns.label:
        found = class_names(train, columns.label)
        classes = model_order(found, known)
        parts = [_labelled(table, columns, classes) if table is not None else None for table in (train, test)]
        assert parts[0] is not None
        num_classes = len(classes) if classes else int(parts[0][1].max()) + 1
        task = text_class_task(parts[0], parts[1], num_classes, request, at_least=classes is None)
        num_rows = len(train) + (0 if test is None else len(test))
        num_kept = sum(len(part[0]) for part in parts if part is not None)
        left_out = f"note: {num_rows - num_kept} of {num_rows} rows have no text or a label below 0: left out"
        remarks = (_remark_on_order(found, classes, known), left_out if num_kept < num_rows else "")
        return replace(task, remark="\n".join(filter(None, remarks)))
    test_texts = strings(test, columns.text) if test is not None else None
    task = text_task(strings(train, columns.text), test_texts, request)
    if columns.label:
        task.remark = (
            f"note: the column {columns.label!r} is not used, as {request.loaded.architecture} gives no scores of "
            f"classes: what counts is {task.metric}"
        )
    elif request.loaded.kind == "text classifier":
        others = [name for name in train.column_names if name != columns.text]
        task.remark = (
            f"note: no column of classes was found ({', '.join(others) or 'none'} beside the text): what counts is "
            f"{task.metric}. One named label, of words or whole numbers, would be used"
        )
    return task


def _remark_on_order(
    found: tuple[str, ...] | None, classes: tuple[str, ...] | None, known: tuple[str, ...] | None
) -> str:
    """Where the model has names for its outputs that are not those of the data."""
    if not found or not known or classes != found or {*map(str.lower, found)} <= {*map(str.lower, known)}:
        return ""
    return (
        f"note: classes are numbered {', '.join(found[:8])}; the model calls its outputs {', '.join(known[:8])}. If "
        "that is another order, name the classes as the model does"
    )


def _images(train: Any, test: Any | None, columns: Columns, request: Request) -> ImageData:
    """Only as many rows are unpacked as are wanted."""
    assert columns.image
    if test is None:
        kept, held_out = draw_held_out(len(train), request.seed)
        train, test = take(train, kept), take(train, held_out)
    names = class_names(train, columns.label) if columns.label else None
    names = model_order(names, request.loaded.label_names)
    labels = class_numbers(train, columns.label, names) if columns.label else None
    num_classes = 0 if labels is None else len(names) if names else int(labels.max()) + 1
    parts = []
    if labels is not None and len(labels) and int(labels.min()) < 0:
        raise ValueError(f"the column {columns.label} of {request.source} has labels below 0: leave those rows out.")
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
    rows = [row for row in zip(*(test[name].to_pylist() for name in (first, second, columns.score)), strict=True)]
    whole = [row for row in rows if row[0] and row[1] and row[2] is not None and row[2] == row[2]]  # NaN is not itself
    if not whole:
        raise ValueError(f"the test part of {request.source} has no pair with both sentences and a score.")
    a, b, scores = (list(column) for column in zip(*whole, strict=True))
    task = similarity_task(sentences, (a, b), scores, request)
    if len(whole) < len(rows):
        task.remark = f"note: {len(rows) - len(whole)} of {len(rows)} test pairs lack a sentence or score: left out"
    return task


def _labelled(table: Any, columns: Columns, classes: tuple[str, ...] | None) -> LabelledTexts:
    assert columns.text and columns.label
    labels = class_numbers(table, columns.label, classes)
    texts = table[columns.text].to_pylist()
    kept = [i for i, text in enumerate(texts) if text and labels[i] >= 0]
    return [texts[i] for i in kept], labels[torch.tensor(kept, dtype=torch.long)]

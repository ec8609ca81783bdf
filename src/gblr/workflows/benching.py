"""Dense against compressed on this machine, planned anew for every batch size."""

from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import nn

from gblr.conversion.harden import harden_
from gblr.conversion.planner import as_call
from gblr.conversion.timing import interleaved_medians
from gblr.layers.structured import MatrixModule
from gblr.workflows.describe import environment
from gblr.workflows.exporting import example_of, task_of
from gblr.workflows.model_source import RECORD, open_folder
from gblr.workflows.task import length_of
from gblr.workflows.wording import counted, milliseconds


def bench_folder(folder: Path, batches: tuple[int, ...], threads: int | None) -> dict[str, Any]:
    if threads:
        torch.set_num_threads(threads)
    loaded = open_folder(folder)
    if not any(isinstance(module, MatrixModule) for module in loaded.model.modules()):
        raise ValueError(f"{folder} holds a dense model: there is nothing to compare. Compress it first.")
    dense = dense_of(folder, loaded.model)
    batch_of = batches_of(folder, loaded)
    rows = [_row(dense, loaded.model, batch_of(size), size) for size in batches]
    return {"folder": str(folder), "environment": environment(loaded.device), "rows": rows}


def dense_of(folder: Path, model: nn.Module) -> nn.Module:
    """Plain layers of the same shapes, composed from the blocks: as fast as the model before compression."""
    import copy

    from gblr.conversion.harden import densify_

    dense = copy.deepcopy(model)
    densify_(dense)
    return dense


def batches_of(folder: Path, loaded: Any) -> Any:
    if (folder / RECORD).is_file():
        return task_of(folder, loaded, max_train=256, max_eval=8).batch
    example = example_of(folder, loaded)
    return lambda size: {key: value[:1].expand(size, *value.shape[1:]) for key, value in example.items()}


@torch.no_grad()
def _row(dense: nn.Module, model: nn.Module, batch: Any, size: int) -> dict[str, Any]:
    forms: dict[str, int] = {}
    if any(isinstance(module, MatrixModule) and module.is_packed for module in model.modules()):
        for row in harden_(model, batch).rows:
            forms[str(row.form)] = forms.get(str(row.form), 0) + 1
    args, kwargs = as_call(batch)
    device = next(model.parameters()).device
    before, now = interleaved_medians(
        [lambda: dense(*args, **kwargs), lambda: model(*args, **kwargs)], device, rounds=9
    )
    times = {"dense_seconds": before, "seconds": now, "speedup": before / now}
    return {"batch": size, "tokens": length_of(batch), **times, "forms": forms}


def bench_table(found: dict[str, Any]) -> Table:
    where = found["environment"]
    threads = counted(where["threads"], "thread")
    table = Table(title=f"{found['folder']} on {where['device']}, {threads}, kernels {where['kernels']}")
    of_texts = any(row["tokens"] is not None for row in found["rows"])
    first = ("batch", "tokens of a text") if of_texts else ("batch",)
    for heading in (*first, "dense, ms", "compressed, ms", "speed-up", "layers by form"):
        table.add_column(heading, justify="right")
    for row in found["rows"]:
        forms = ", ".join(f"{count} {form}" for form, count in row["forms"].items())
        times = (milliseconds(row[key]) for key in ("dense_seconds", "seconds"))
        sizes = [str(row["batch"]), *([str(row["tokens"])] if of_texts else [])]
        table.add_row(*sizes, *times, f"{row['speedup']:.2f}", forms)
    return table

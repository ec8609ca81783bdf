"""`gblr compress` and `gblr train`: a model and data in, a smaller model and a record of what happened out.

out/settings.json       what was asked for; the same command continues, another one is refused
out/work/METHOD/        each model of the comparison: parts that are done, training to continue
out/work/calibration.safetensors    what several methods are told of the dense model, until the last is fitted
out/model/              the result, as `gblr.save_pretrained` writes it
out/run.json            the record that `gblr report` shows
"""

import datetime
import os
import shutil
import time
from pathlib import Path
from typing import Any

from gblr.atomic import replacing
from gblr.conversion.cost import cost
from gblr.conversion.planner import as_call
from gblr.models.load import LoadedModel
from gblr.reports.record import save_record
from gblr.workflows.block_ranks import with_block_rank
from gblr.workflows.calibrated import SharedCalibration
from gblr.workflows.describe import describe_layers, describe_types, environment
from gblr.workflows.measuring import note_on
from gblr.workflows.model_source import lasting_source, module_folder
from gblr.workflows.settings import TITLES, Settings, claimed
from gblr.workflows.task import length_of
from gblr.workflows.tasks import Task
from gblr.workflows.variants import Say, Variant, seconds_per_batch, where_of

FORMAT = 1
_BATCHES = (1, 64)


def compress(
    settings: Settings, loaded: LoadedModel, task: Task, out: Path, command: str = "", say: Say = print,
    calibration: SharedCalibration | None = None, dense: Path | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Runs, or goes on with, the whole comparison; returns the record, which is also in `out/run.json`.

    Interrupted at any moment, it continues where it was when called again with the same settings. Runs of the same
    model may share its `calibration`, and what a finished one has found of the `dense` model: its folder.
    """
    if settings.distill and task.loss is not None:
        raise ValueError(
            f"--distill mixes the loss of a classifier or of a language model with the dense model's scores; "
            f"{loaded.architecture} has neither here: training for {task.name} has a loss of its own. Leave it out."
        )
    if settings.batch_size and settings.batch_size > len(task.samples):
        raise ValueError(
            f"--batch-size must be at most the {len(task.samples)} training samples; got {settings.batch_size}."
        )
    settings = with_block_rank(settings, loaded.model)
    if note := note_on(settings.precision, loaded.device):
        say(note)
    with claimed(out, settings):
        if dense is not None and dense.exists() and not (out / "work" / "dense").exists():
            shutil.copytree(dense, out / "work" / "dense", copy_function=_linked)
        return _compress(settings, loaded, task, out, command, say, calibration)


def _linked(source: str, target: str) -> None:
    """The file under a second name where the disk knows that, or a copy."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _compress(
    settings: Settings, loaded: LoadedModel, task: Task, out: Path, command: str, say: Say,
    shared: SharedCalibration | None,
) -> dict[str, Any]:  # fmt: skip
    begin = time.monotonic()
    first = () if settings.from_scratch else ("dense",)
    methods = list(dict.fromkeys([*first, settings.method, *settings.baselines]))
    file = out / "work" / "calibration.safetensors" if len(methods) - len(first) > 1 else None
    calibration = shared or SharedCalibration(settings, task, loaded.model, where_of(settings), file)
    variants = {}
    for i, method in enumerate(methods, 1):
        title = f"[{i}/{len(methods)}] {TITLES[method]}"
        say(title)
        folder = out / "work" / method
        variant = Variant(
            method, settings, task, loaded.model, folder, lambda line: say(f"  {line}"), calibration
        )  # fmt: skip
        variant.run()
        say(f"  {summary(variant.result, task)}")
        variants[method] = variant
    if shared is None:
        calibration.forget()
    say("timing the models in turns")
    times = seconds_per_batch({name: variant.model for name, variant in variants.items()}, task, _BATCHES, say)
    record = make_record(settings, loaded, task, variants, times, command)
    record["seconds"] = round(time.monotonic() - begin, 1)
    _keep(variants[settings.method], loaded.tokenizer, out)
    save_record(record, out)
    return record


def hint(settings: Settings) -> str:
    """What to try next, after a run."""
    if settings.from_scratch or settings.heal or settings.epochs or not settings.calibration:
        return ""
    return "hint: nothing was trained; refitting with --heal usually keeps more (see docs/howto/heal.md)"


def summary(result: dict[str, Any], task: Task) -> str:
    value = "no score" if result["value"] is None else f"{task.metric} {result['value']:.4g}{task.unit}"
    return f"{value} at cost {result['relative_cost']:.3f}, {result['num_params']:,} parameters"


def make_record(
    settings: Settings, loaded: LoadedModel, task: Task, variants: dict[str, Variant],
    times: dict[str, dict[str, float]], command: str,
) -> dict[str, Any]:  # fmt: skip
    main = variants[settings.method]
    args, kwargs = as_call(task.example)
    spent = cost(main.model, *args, **kwargs)
    history = main.result.get("history", {})
    if history and "relative_cost" in history:
        history = history | {"budget": [settings.cost] * len(history["step"])}
    dense = loaded.model
    lengths = {size: length_of(task.batch(int(size))) for size in times[settings.method]}
    return {
        "format": FORMAT,
        "title": f"{loaded.architecture} on {settings.data}: {TITLES[settings.method]} at cost {settings.cost:g}",
        "command": command,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "environment": environment(next(main.model.parameters()).device),
        "model": {
            "source": lasting_source(loaded.source), "architecture": loaded.architecture,
            "folder": module_folder(loaded.source),
        },
        "data": {
            "source": lasting_source(settings.data), "what": task.what,
            "image_mean": task.image_mean, "image_std": task.image_std,
        },
        "method": settings.method,
        "cost": settings.cost,
        "metric": {"name": task.metric, "unit": task.unit, "higher_is_better": task.higher_is_better},
        "timed_lengths": {size: length for size, length in lengths.items() if length is not None},
        "results": [_result(v, v is main, settings, times[name]) for name, v in variants.items()],
        "layers": describe_layers(main.model, dense, spent, main.result) if spent.converted else [],
        "by_type": describe_types(spent),
        "history": history,
    }  # fmt: skip


def _result(variant: Variant, main: bool, settings: Settings, times: dict[str, float]) -> dict[str, Any]:
    learned = variant.method == "gaudi" and "history" in variant.result
    keys = ("value", "relative_cost", "model_relative_cost", "num_params", "dense_params", "file_bytes")
    name = TITLES[variant.method] + (", learned" if learned else "")
    return {"name": name, "main": main, **{k: variant.result.get(k) for k in keys}, "seconds_per_batch": times}


def _keep(variant: Variant, tokenizer: Any, out: Path) -> None:
    """The result in its own place, with the tokenizer, so that it can be opened alone."""
    with replacing(out / "model") as folder:
        for file in (variant.folder / "model").iterdir():
            shutil.copy(file, folder)
        if hasattr(tokenizer, "save_pretrained"):
            tokenizer.save_pretrained(folder)

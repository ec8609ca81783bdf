"""One run on text from its description to its result: converted, refitted, trained, hardened, judged after each."""

import copy
import json
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gblr.atomic import write_json
from gblr.conversion.checkpoint import load_, save_pretrained
from gblr.conversion.cost import cost
from gblr.conversion.harden import harden_
from gblr.conversion.tensor_files import weights_checksum
from gblr.experiments.calibrations import calibration_of
from gblr.experiments.field import Paused, Place, Result
from gblr.experiments.run import TWIN
from gblr.experiments.store import Record
from gblr.experiments.structures import structure_
from gblr.experiments.text_models import TEXT_MODELS, text_model
from gblr.experiments.text_run import TextRun
from gblr.experiments.text_tasks import TextTask
from gblr.layers.gaudi import GaudiModule
from gblr.training.heal import heal_
from gblr.training.loop import train
from gblr.training.train_config import TrainConfig
from gblr.workflows.measuring import measuring

_ROWS = 20  # of the curve
_TERMINATED = 128 + signal.SIGTERM


def make(run: TextRun, task: TextTask, place: Place) -> Result:
    task = (task.holding_out(run.held_out) if run.held_out else task).to(place.device)
    with time_limit(place.deadline):
        model = text_model(run, task, place).to(place.device)
        teacher = None
        if run.refit or (run.epochs and run.aim == "teacher"):
            teacher = copy.deepcopy(model).eval().requires_grad_(False)
        record = fitted(model, teacher, run, task, place)
        if run.epochs:
            record |= trained(model, teacher, run, task, place, record["target"])
        return finished(model, run, task, record)


@contextmanager
def time_limit(deadline: float) -> Iterator[None]:
    """At the deadline the run is told to stop: in training it saves itself first, else it ends with `Paused`."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: Any) -> None:
        raise Paused("outside of the training; what was not saved is made again")

    before = signal.signal(signal.SIGTERM, stop)
    timer = threading.Timer(max(0.0, deadline - time.time()), os.kill, (os.getpid(), signal.SIGTERM))
    timer.daemon = True
    if deadline != float("inf"):
        timer.start()
    try:
        yield
    except SystemExit as end:
        if end.code != _TERMINATED:
            raise
        raise Paused("in the training") from end
    finally:
        timer.cancel()
        signal.signal(signal.SIGTERM, before)


# -- before any training -----------------------------------------------------------------------------------------------


def fitted(model: nn.Module, teacher: nn.Module | None, run: TextRun, task: TextTask, place: Place) -> Record:
    """Converts in place, and refits. Runs that differ in their training alone share this: the first keeps it."""
    if run.method == "dense":
        return {"target": 1.0}
    fits = None if place.state is None or not run.source else place.state.parent / "fits"
    folder = None if fits is None else fits / run.fit_key
    weights = None if folder is None else weights_checksum(model)
    if folder is not None and (folder / "record.json").exists():
        kept = json.loads((folder / "record.json").read_text())
        if kept.pop("weights", weights) == weights:  # else the model it starts from is another
            load_(model, folder)
            model.to(place.device)
            return kept
    record: Record = {}
    calibration = calibration_of(model, run, task, place, fits)
    begin = time.perf_counter()
    found = structure_(model, run, TEXT_MODELS[run.model].where, task.example, calibration)
    record["target"] = found.target
    del calibration  # its Gram matrices take more than all that follows
    record["fit_seconds"] = time.perf_counter() - begin
    if place.device == "cuda":
        torch.cuda.empty_cache()  # other runs share the GPU, and gradients take more than all that follows
    if run.source:
        record["fitted"] = task.judge(model, all_metrics=False)
        place.say(f"fitted in {record['fit_seconds']:.0f} s: {_told(record['fitted'])}")
    if run.refit:
        assert teacher is not None
        begin = time.perf_counter()
        with measuring(run.precision, place.device):
            heal_(
                model, teacher, task.calibration(run.calibration), structure=run.structure,
                sensitivity=run.sensitivity and found.sensitivity, max_growth=run.max_growth,
            )  # fmt: skip
        record |= {"refit_seconds": time.perf_counter() - begin, "refitted": task.judge(model, all_metrics=False)}
        place.say(f"refitted in {record['refit_seconds']:.0f} s: {_told(record['refitted'])}")
    if folder is not None and (not run.held_out or TWIN in run.source):  # what is kept was judged on the same samples
        (folder / "record.json").unlink(missing_ok=True)
        save_pretrained(model, folder)
        write_json(folder / "record.json", record | {"weights": weights})  # last: a fit that is there is complete
    return record


def _told(metrics: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())


# -- training ----------------------------------------------------------------------------------------------------------


def trained(
    model: nn.Module, teacher: nn.Module | None, run: TextRun, task: TextTask, place: Place, target: float
) -> Record:
    batches = task.training(run)
    config = train_config(run, place, target, any(isinstance(module, GaudiModule) for module in model.modules()))
    out = None if place.state is None else place.state / "train"
    if run.aim == "teacher":
        assert teacher is not None
        healed = heal_(
            model, teacher, batches, layers=False, config=config, structure="free", match=task.match, out=place.state
        )
        result = healed.training
        assert result is not None
    else:
        result = train(model, batches, config=config, out=out, loss=task.loss)
    names = ("epoch", "train_loss", "relative_cost", "live_blocks", "sigma")
    curve = {name: [row.get(name) for row in result.history] for name in names}
    return {"curve": curve, "seconds": result.seconds, "train_tokens": round(run.epochs * num_tokens(batches))}


def num_tokens(batches: Sequence[dict[str, Tensor]]) -> int:
    """Without padding."""
    masks = (batch.get("attention_mask", torch.ones_like(batch["input_ids"])) for batch in batches)
    return sum(int(mask.sum()) for mask in masks)


def train_config(run: TextRun, place: Place, target: float, learns: bool) -> TrainConfig:
    on_gpu = place.device == "cuda"
    return TrainConfig(
        epochs=run.epochs, batch_size=run.batch_size, lr=run.lr, structure_lr=run.structure_lr,
        weight_decay=run.weight_decay, warmup=run.warmup, clip_norm=run.clip, seed=run.seed,
        budget=run.learned_to(target) if learns else None, sigma=run.sigma_schedule if learns else None,
        precision="fp16" if on_gpu else "no",  # blocks of rank 1 that partly cancel do not bear bfloat16
        cuda_graphs=on_gpu and not place.eager,
        eval_every=run.epochs / _ROWS, checkpoint_every=run.epochs,  # the end too: judging takes long
    )  # fmt: skip


# -- the end -----------------------------------------------------------------------------------------------------------


def finished(model: nn.Module, run: TextRun, task: TextTask, record: Record) -> Result:
    """The hardened model's metrics, cost and size: what is reported."""
    if any(isinstance(module, GaudiModule) for module in model.modules()):
        harden_(model, plan="dense")  # judged by plain products: costs are counted on the blocks all the same
    model.to(torch.float16).to(torch.float32)  # what is judged is what a file of float16 holds
    spent = cost(model, task.example)
    record |= {"test": task.judge(model), "metric": task.metric, "higher_is_better": task.higher_is_better}
    record |= {"reached_cost": spent.relative_cost if run.method != "dense" else 1.0}
    record |= {"model_relative_cost": spent.model_relative_cost, "num_params": spent.num_params}
    record |= {"size_bytes": size_on_disk(model)}
    record.setdefault("seconds", 0.0)
    return Result(record, model, {})


def size_on_disk(model: nn.Module) -> int:
    """Of a checkpoint in float16."""
    small = copy.deepcopy(model).to("cpu", torch.float16)
    with tempfile.TemporaryDirectory() as folder:
        save_pretrained(small, folder)
        return sum(file.stat().st_size for file in Path(folder).iterdir())

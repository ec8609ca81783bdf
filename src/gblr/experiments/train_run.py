"""`train_run`: one run from its description to its result."""

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from gblr.conversion.calibration import calibrate
from gblr.conversion.cost import Cost, cost
from gblr.conversion.harden import harden_
from gblr.conversion.tensor_files import weights_checksum
from gblr.experiments.datasets import Task
from gblr.experiments.field import Paused, Result
from gblr.experiments.networks import NETWORKS, build_network, load_network
from gblr.experiments.run import Run
from gblr.experiments.step import uncompiled
from gblr.experiments.store import Store
from gblr.experiments.structures import structure_
from gblr.experiments.training import Training, judge
from gblr.layers.gaudi import GaudiModule
from gblr.layers.structured import MatrixModule
from gblr.matrices.packed import PackedGBLR


@dataclass(frozen=True)
class Sources:
    """Where trained weights are: the folder with the results of all recipes, and what users bring."""

    results: Path = Path("runs/vision")
    weights: str = ""

    def network(self, run: Run, task: Task) -> nn.Module:
        """With random weights where the run asks for none; smoke tests always start from random ones."""
        torch.manual_seed(run.seed)
        if run.source == "weights" and not task.tiny:
            return load_network(run.model, self.weights)
        model = build_network(run.model, task.num_classes, task.tiny, run.drop_path)
        if run.source and not task.tiny:
            recipe, _, name = run.source.partition("/")
            model.load_state_dict(Store(self.results / recipe).load_model(name))
        return model


def train_run(
    run: Run,
    task: Task,
    device: Any = "cpu",
    sources: Sources | None = None,
    state: Path | None = None,
    deadline: float = float("inf"),
    say: Callable[[str], None] = lambda line: None,
    eager: bool = False,
) -> Result:
    """Trains, hardens and judges. `deadline` is a time of `time.time()`: a run that would pass it in its next epoch
    writes `state` and raises `Paused`; with that file there, the same call goes on where it stopped.
    """
    task = task.holding_out(run.held_out) if run.held_out else task
    task = task.to(device)
    model = (sources or Sources()).network(run, task).to(device)
    dense = copy.deepcopy(model) if run.distilled else None
    example = next(iter(task.judging(task.test)))[0][:1]
    saved = None if state is None or not state.exists() else torch.load(state, map_location=device, weights_only=True)
    if saved is None:
        record = _converted(model, run, task, example, None if state is None else state.parent / "fits")
    else:
        record = _resumed(model, run, task, example, saved)
    training = Training(model, run, task, record["target"], eager, dense)
    if saved is not None:
        training.load(saved)
        say(f"goes on after epoch {training.epoch}")
    _train(training, record, state, deadline, say)
    record |= {"curve": training.curve, "seconds": training.seconds, "soft": judge(model, task.judging(task.test))}
    if training.learner is not None:
        record["max_shrinkage"] = training.learner.state_dict()["max_shrinkage"] or None
    return _finished(model, task, example, record)


def _converted(
    model: nn.Module, run: Run, task: Task, example: torch.Tensor, fits: Path | None = None
) -> dict[str, Any]:
    """Structured layers in place; accuracies of trained models before it and before any training. GBLR fits of trained
    weights, which take long, are kept in `fits`, for the runs that differ in their training alone.
    """
    kept = fits / f"{run.fit_key}.pt" if fits and run.source and run.method == "gaudi" else None
    weights = None if kept is None else weights_checksum(model)
    if kept is not None and kept.exists():
        saved = torch.load(kept, map_location=task.device, weights_only=True)
        if saved.get("weights", weights) == weights:  # else the network it starts from has been made again
            found = _resumed(model, run, task, example, saved)
            model.load_state_dict(saved["model"])
            return found
    test = task.judging(task.test)
    record: dict[str, Any] = {"dense_start": judge(model, test) if run.source else None}
    begin, where = time.perf_counter(), NETWORKS[run.model].where
    seen = calibrate(model, task.calibration(run.calibration), where, run.sensitivity) if run.calibration else None
    record["target"] = structure_(model, run, where, example, seen).target
    record |= {"fit_seconds": time.perf_counter() - begin, "before": judge(model, test) if run.source else None}
    if kept is not None:
        Store(kept.parent).save(kept, {"model": model.state_dict(), "record": record, "weights": weights})
    return record


def _resumed(model: nn.Module, run: Run, task: Task, example: torch.Tensor, saved: Any) -> dict[str, Any]:
    """Layers of the same shapes, to be filled from the saved state: GBLR without fitting once more."""
    if run.method == "gaudi":
        structure_(model, replace(run, init="scratch", start_cost=1.0), NETWORKS[run.model].where, example)
    else:
        _converted(model, run, task, example)
    return saved["record"]


def _train(
    training: Training, record: dict[str, Any], state: Path | None, deadline: float, say: Callable[[str], None]
) -> None:
    last = 0.0  # the first epoch compiles, and says nothing about the next
    while not training.done:
        begin = time.time()
        if begin + 1.1 * last > deadline:
            if state is not None:
                Store(state.parent).save(state, training.state() | {"record": record})
            raise Paused(f"after epoch {training.epoch} of {training.run.epochs}")
        say(training.train_epoch())
        last = time.time() - begin if training.epoch > 1 else 0.0


def _finished(model: nn.Module, task: Task, example: torch.Tensor, record: dict[str, Any]) -> Result:
    """The hardened network's accuracy, loss and cost: what is reported."""
    if any(isinstance(module, GaudiModule) for module in model.modules()):
        harden_(model, plan="dense")  # judged by plain products: costs are counted on the blocks all the same
    with uncompiled(model):
        spent = cost(model, example)
    record |= {"test": judge(model, task.judging(task.test)), "train": judge(model, task.judging(task.train))}
    record |= {"reached_cost": spent.relative_cost, "model_relative_cost": spent.model_relative_cost}
    record |= {"num_mults": spent.num_mults, "num_params": spent.num_params, "by_type": _by_type(spent)}
    layers = {name: module for name, module in model.named_modules() if isinstance(module, MatrixModule)}
    record["layers"] = {layer.name: _layer(layer, layers[layer.name]) for layer in spent.converted}
    return Result(record, model, _blocks(layers))


def _by_type(spent: Cost) -> dict[str, Any]:
    """Converted layers alone: multiplications of one product, as in the paper's Table 3."""
    converted = replace(spent, layers=spent.converted).by_type()
    return {
        name: {
            "layers": group.num_layers, "min": group.min_product, "mean": group.mean_product,
            "max": group.max_product, "dense": group.dense_product, "relative_cost": group.relative_cost,
        }
        for name, group in converted.items()
    }  # fmt: skip


@torch.no_grad()
def _layer(found: Any, module: MatrixModule) -> dict[str, Any]:
    weight = module.weight.float()
    row = {"type": found.type, "shape": list(weight.shape), "relative_cost": found.relative_cost}
    # An SVD: minutes on a GPU that other runs fill. A network that was lost in training has no rank.
    row["rank"] = int(torch.linalg.matrix_rank(weight.cpu())) if bool(weight.isfinite().all()) else None
    if isinstance(module.matrix, PackedGBLR):
        row["live_blocks"] = module.matrix.structure.num_blocks
    return row


def _blocks(layers: dict[str, MatrixModule]) -> dict[str, np.ndarray]:
    found = {}
    for name, module in layers.items():
        if isinstance(module.matrix, PackedGBLR):
            s = module.matrix.structure
            sides = (s.row_location, s.row_width, s.col_location, s.col_width)
            found[name] = torch.stack([side.long().cpu() for side in sides], 1).numpy()
    return found


def tiny_run(run: Run, epochs: int = 2) -> Run:
    """The same run in a second or two, for smoke tests and checks."""
    return replace(
        run, epochs=min(run.epochs, epochs), batch_size=16, warmup_epochs=0.5, eval_every=1,
        held_out=min(run.held_out, 16), calibration=min(run.calibration, 32),
    )  # fmt: skip

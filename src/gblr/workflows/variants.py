"""One model of a comparison, dense or compressed: converted, trained, hardened, measured; each once per folder."""

import copy
import json
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gblr.atomic import write_json
from gblr.conversion.checkpoint import load_, save_pretrained
from gblr.conversion.convert import convert_
from gblr.conversion.cost import cost
from gblr.conversion.filters import Filter, NameFilter, is_linear_or_conv, linear_layers
from gblr.conversion.harden import harden_
from gblr.conversion.planner import as_call
from gblr.conversion.report import Report
from gblr.conversion.timing import interleaved
from gblr.fitting.config import STIFF_GROWTH, TRAINABLE_GROWTH, Allocation, Config, GaudiConfig
from gblr.layers.gaudi import GaudiModule
from gblr.training.budget import Budget
from gblr.training.distillation import TaughtLoss
from gblr.training.heal import heal_
from gblr.training.loop import train
from gblr.training.rng import derived_seed, seed_all
from gblr.training.schedules import SigmaSchedule
from gblr.training.train_config import FITTED_STRUCTURE_LR, TrainConfig
from gblr.workflows.calibrated import SharedCalibration
from gblr.workflows.measuring import measuring
from gblr.workflows.settings import METHODS, Settings
from gblr.workflows.tasks import Task
from gblr.workflows.wording import counted

Say = Callable[[str], None]
_HISTORY_ROWS = 40
_TIMED, _MOST_SECONDS = 5, 60.0  # rounds of timing, and what those of one batch size may take
_SETTLED = 20  # steps; a single one at the full rate left MiniLM a likeness to dense of 0.65, at a 20th of it 0.996
_PLANNED_BATCH = 16  # forms are chosen for it; `gblr bench` chooses for others


class Variant:
    """A method applied to a copy of the dense model, in a folder that keeps every finished part."""

    def __init__(
        self, method: str, settings: Settings, task: Task, dense: nn.Module, folder: Path, say: Say,
        calibration: SharedCalibration | None = None,
    ):  # fmt: skip
        self.method, self.settings, self.task, self.dense = method, settings, task, dense
        self.folder, self.say = folder, say
        self.calibration = calibration or SharedCalibration(settings, task, dense, where_of(settings))
        self.model: nn.Module = dense
        self.result: dict[str, Any] = {}
        self._measured: dict[str, Tensor] = {}  # sensitivity, by layer

    @property
    def is_dense(self) -> bool:
        return self.method == "dense"

    def run(self) -> None:
        """All that was not done before; afterwards `model` is the finished model and `result` what it came to."""
        self.model = copy.deepcopy(self.dense)
        file = self.folder / "result.json"
        if file.exists():
            self.result = json.loads(file.read_text())
            if (self.folder / "model").exists():
                load_(self.model, self.folder / "model")
            self.model.eval()
            self.say("done before")
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        begin = time.monotonic()
        seed_all(derived_seed(self.settings.seed, self.method))
        if not self.is_dense:
            self._convert()
            if self.settings.heal:
                self._heal()
        if self.num_epochs and (not self.is_dense or self.settings.from_scratch):
            self._train()
        self._harden()
        self._judge(time.monotonic() - begin)
        save_pretrained(self.model, self.folder / "model")
        self.result["file_bytes"] = sum(f.stat().st_size for f in (self.folder / "model").iterdir())
        write_json(file, self.result)

    @property
    def num_epochs(self) -> float:
        wanted = self.settings.epochs
        return float(self.task.train_defaults.get("epochs", 3) if wanted is None else wanted)

    @property
    def distilled(self) -> float:
        """Share of the training loss; a model that starts from scratch has no teacher."""
        if self.settings.from_scratch:
            return 0.0
        return self.task.distill if self.settings.distill is None else self.settings.distill

    def _convert(self) -> None:
        stored, errors = self.folder / "converted", self.folder / "errors.json"
        if errors.exists():  # written last
            load_(self.model, stored)
            self.result["errors"] = json.loads(errors.read_text())
            return
        config, calibration = config_of(self.settings, self.method), self.calibration.get(self.say)
        where, sensitivity = where_of(self.settings), self.settings.sensitivity
        report = convert_(self.model, config, where, calibration, sensitivity=sensitivity)
        del calibration  # Gram matrices may take more memory than the model
        self.result["errors"] = {row.layer: row.error for row in report.rows if row.error is not None}
        self.say("\n".join([f"{counted(len(report), 'layer')} converted{_error(report)}", *report.notes]))
        self._measured = report.sensitivity
        save_pretrained(self.model, stored)
        write_json(errors, self.result["errors"])

    def _heal(self) -> None:
        batches = self.task.calibration(self.settings.calibration)
        # free: the blocks were placed by a fit just now, and what they are fitted to has changed
        folder, sensitivity = self.folder / "healed", self.settings.sensitivity and (self._measured or True)
        with self._measuring():
            healed = heal_(
                self.model, self.dense, batches, structure="free", out=folder, sensitivity=sensitivity,
                max_growth=growth_of(self.settings),
            ).layers  # fmt: skip
        before, after = (sum(getattr(row, key) for row in healed) / len(healed) for key in ("error_before", "error"))
        self.say(f"layers refitted in order: mean error of their outputs {before:.3f} before, {after:.3f} after")

    def _measuring(self) -> AbstractContextManager[Any]:
        return measuring(self.settings.precision, next(self.dense.parameters()).device)

    def _train(self) -> None:
        config, loss = self._train_config(), self.task.loss
        self.say(f"training for {counted(config.epochs, 'epoch')} on {self.task.what}")
        if self.distilled:
            self.say(f"{self.distilled:g} of the loss aims at the dense model's scores")
            loss = taught_loss(self.task, self.dense, self.distilled, config)
            config = replace(config, label_smoothing=0.0)  # the loss has it
        result = train(self.model, self.task.train_data, config=config, out=self.folder / "train", loss=loss)
        self.result["history"] = history_of(result.history)
        self.result["train_seconds"] = round(result.seconds, 1)

    def _train_config(self) -> TrainConfig:
        s, epochs = self.settings, self.num_epochs
        chosen = {"lr": s.lr, "structure_lr": s.structure_lr, "batch_size": s.batch_size}
        options = {k: v for k, v in self.task.train_defaults.items() if k != "epochs"}
        options |= {k: v for k, v in chosen.items() if v is not None}
        if s.lr is None and not s.from_scratch:
            options["lr"] = self._bearable_rate(options["lr"], epochs * len(self.task.samples) / options["batch_size"])
        config = TrainConfig(epochs=epochs, seed=s.seed, eval_every=epochs / _HISTORY_ROWS, **options)
        gaudi = [module for module in self.model.modules() if isinstance(module, GaudiModule)]
        if not gaudi:
            return config
        return replace(config, budget=Budget(relative_cost=s.cost), sigma=sigma_of(s, config, gaudi))

    def _bearable_rate(self, lr: float, num_steps: float) -> float:
        """Adam's first steps are as long as the rate says, whatever the gradient; a handful of them only do harm."""
        if num_steps >= _SETTLED:
            return lr
        lower = lr * max(1.0, num_steps) / _SETTLED
        steps = counted(max(1, round(num_steps)), "step")
        self.say(f"only {steps} of training: rate {lower:.2g} in place of {lr:g} (more epochs, or --lr, change it)")
        return lower

    def _harden(self) -> None:
        self.model.eval()
        if any(isinstance(module, GaudiModule) for module in self.model.modules()):
            report = harden_(self.model, self.task.batch(_PLANNED_BATCH))
            self.result["forms"] = {
                row.layer: {"form": row.form, "seconds": dict(row.form_seconds)} for row in report.rows
            }

    def _judge(self, seconds: float) -> None:
        self.say("measuring")
        args, kwargs = as_call(self.task.example)
        spent = cost(self.model, *args, **kwargs)
        self.result |= {
            "value": finite(self.task.evaluate(self.model)),
            "relative_cost": round(spent.relative_cost, 5),
            "model_relative_cost": round(spent.model_relative_cost, 5),
            "num_params": spent.num_params,
            "dense_params": spent.dense_params,
            "seconds": round(seconds, 1),
        }


def config_of(settings: Settings, method: str) -> Config:
    kind = METHODS[method]
    allocation: Allocation = "global" if settings.sensitivity else "uniform"
    if kind is not GaudiConfig:
        return kind(settings.cost, allocation)
    if settings.from_scratch:
        return GaudiConfig(1.0, block_rank=settings.block_rank or 1, init="scratch")
    return GaudiConfig(settings.cost, allocation, block_rank=settings.block_rank or 1, max_growth=growth_of(settings))


def sigma_of(settings: Settings, config: TrainConfig, layers: list[GaudiModule]) -> SigmaSchedule:
    """Blocks that a fit has placed, and that hardly move, keep their sharp edges: to blur them undoes the fit, and
    short training does not make up for it. Those that shall learn where to be must see beyond their edges.
    """
    shortest = min(min(layer.in_features, layer.out_features) for layer in layers)
    last = float(min(100.0, max(4.0, shortest / 2)))
    if settings.from_scratch:
        return SigmaSchedule(1.0, last)
    slow = config.structure_lr <= FITTED_STRUCTURE_LR
    return SigmaSchedule.constant(math.inf) if slow else SigmaSchedule(last, last)


def taught_loss(task: Task, dense: nn.Module, share: float, config: TrainConfig) -> TaughtLoss:
    """Scores of classes are softened; those of the next token say as they are what else might have come."""
    temperature = 1.0 if task.name == "language modelling" else 4.0
    return TaughtLoss(dense, share, temperature, config.label_smoothing, config.precision)


def growth_of(settings: Settings) -> float:
    """No training: nothing need be kept for it."""
    return STIFF_GROWTH if settings.epochs == 0 else TRAINABLE_GROWTH


def where_of(settings: Settings) -> Filter:
    if not settings.convolutions:
        return linear_layers(include=settings.include, exclude=settings.exclude)
    return NameFilter(is_linear_or_conv, "linear or convolution", settings.include, settings.exclude)


def history_of(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Columns of the training history; numbers that JSON cannot hold become null."""
    columns = {"loss": "train_loss", "relative_cost": "relative_cost", "sigma": "sigma", "live_blocks": "live_blocks"}
    found: dict[str, list[Any]] = {"step": [row["step"] for row in rows]}
    for name, key in columns.items():
        if rows and key in rows[0]:
            found[name] = [finite(row[key]) for row in rows]
    return found


def finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(float(value), 6)


def _error(report: Report) -> str:
    return "" if report.mean_error is None else f", mean relative error {report.mean_error:.3f}"


@torch.no_grad()
def seconds_per_batch(
    models: dict[str, nn.Module], task: Task, sizes: tuple[int, ...], say: Say = lambda line: None
) -> dict[str, dict[str, float]]:
    """Time of one forward of each model, taken in turns, by batch size. Larger sizes are lowered to what takes about a
    minute, by the time of the first: a language model on a CPU would be timed for longer than it was fitted.
    """
    found: dict[str, dict[str, float]] = {name: {} for name in models}
    for asked in sizes:
        size = _bearable(asked, sizes[0], [times[str(sizes[0])] for times in found.values() if times])
        if size != asked:
            say(f"  batches of {asked} would take long" + (f": {size} instead" if size != sizes[0] else ""))
            if size == sizes[0]:
                continue
        args, kwargs = as_call(task.batch(size))
        device = next(next(iter(models.values())).parameters()).device
        calls = [lambda model=model: model(*args, **kwargs) for model in models.values()]  # noqa: B023
        for name, times in zip(models, interleaved(calls, device, _TIMED, seconds=0.5), strict=True):
            found[name][str(size)] = round(sorted(times)[len(times) // 2], 7)
    return found


def _bearable(asked: int, first: int, seconds: list[float]) -> int:
    """The largest of `asked`, a half of it and so on that is expected to be timed within a minute, or `first`.

    >>> _bearable(64, 1, []), _bearable(64, 1, [0.01, 0.01]), _bearable(64, 1, [0.5, 0.4]), _bearable(64, 1, [30.0])
    (64, 64, 8, 1)
    """
    rounds, size = _TIMED + 1, asked
    while size > first and rounds * sum(seconds) * size / first > _MOST_SECONDS:
        size = max(first, size // 2)
    return size

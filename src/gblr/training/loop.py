"""`gblr.train`: the whole training program, for those without a loop of their own."""

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from gblr.atomic import remove
from gblr.progress import Ticker, progress
from gblr.training.assembly import Assembly, start_accelerator
from gblr.training.batches import Batches, make_batches, to_device
from gblr.training.interrupts import Interrupts, obey
from gblr.training.objective import Loss, Objective, Sums, default_sums, mean_metrics
from gblr.training.plan import Plan
from gblr.training.processes import is_one_of_several, mean_over_processes
from gblr.training.rates import rate_at, set_rates
from gblr.training.records import Records, Row, line_of
from gblr.training.rng import derived_seed, seed_all
from gblr.training.step_graphs import StepGraphs
from gblr.training.train_checkpoint import Progress, Stored, find_last, save_best, save_last
from gblr.training.train_config import TrainConfig


@dataclass(frozen=True)
class TrainResult:
    """What a run came to.

    `history` has a row per evaluation: `step`, `epoch`, `seconds`, `lr`, `train_loss` (mean since the row before), what
    the learner reports, and the metrics on the evaluation data. `best` is the highest accuracy, or the lowest loss
    where there is no accuracy, among the evaluations at the budget and at the last sigma that gave a finite number;
    None without any.
    `relative_cost` is that of the Gaudi layers, None without them. `seconds` counts all parts of an interrupted run.
    """

    history: list[Row]
    best: float | None
    relative_cost: float | None
    seconds: float


def train(
    model: nn.Module,
    train_data: Any,
    eval_data: Any = None,
    config: TrainConfig = TrainConfig(),  # noqa: B008  frozen
    out: str | os.PathLike[str] | None = None,
    resume: bool = True,
    loss: Loss | None = None,
    evaluate: Sums | None = None,
    collate: Callable[[list[Any]], Any] | None = None,
    example_inputs: Any = None,
) -> TrainResult:
    """Trains `model` in place, and the structure of its Gaudi layers with it if `config` has a budget.

    Data is a data set (torch's or Hugging Face's; `collate` makes batches of its samples), a DataLoader, or a sized
    iterable of batches, with `set_epoch(epoch)` if it wants to know. A batch is `(inputs, labels)` for a classifier, or
    a mapping of keyword arguments for a model whose output has `.loss`. For anything else give `loss`, a function
    (model, batch) -> mean loss, and `evaluate`, a function (model, batch) -> sums over the batch, with "count" among
    them.

    With `out`, the run is saved there: `last` to continue from, `best` to use, `history.jsonl` to read. Called again
    with the same arguments it continues from `last`, in the middle of an epoch if need be, as if it had not been
    interrupted; `resume=False` starts anew. Ctrl-C and SIGTERM save before they end the run.

    Started by `torchrun --nproc_per_node 8 program.py`, the same program trains on 8 processes: `batch_size` is divided
    among them, and parameters too with `parallel="fsdp"` or GBLR_PARALLEL=fsdp in the environment. A sharded model
    stays sharded: load what it became from `out`.

    A model in evaluation mode is put into training mode as a whole. Of one in training mode, modules that are in
    evaluation mode stay so, e.g. batch norms with fixed statistics. In the end all have the modes they came with.

    `example_inputs`, a tuple or a dict, are for budgets that count the whole model or seconds; without them the first
    batch serves.

        gblr.convert_(model, gblr.GaudiConfig(relative_cost=1.0, init="scratch"))
        config = gblr.TrainConfig(epochs=30, batch_size=1024, precision="bf16", budget=gblr.Budget(relative_cost=0.25))
        result = gblr.train(model, train_set, test_set, config, out="runs/vit")
        gblr.load_(model, "runs/vit/best")
        gblr.harden_(model)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"`model` must be a torch module; got {type(model).__name__}.")
    objective = Objective(config, loss)
    accelerator = start_accelerator(config)
    seed_all(derived_seed(config.seed, accelerator.process_index))
    batches = make_batches(train_data, config, accelerator, True, collate)
    eval_batches = None if eval_data is None else make_batches(eval_data, config, accelerator, False, collate)
    plan = Plan.of(config, len(batches))
    run = Run(Assembly(model, config, accelerator), plan, batches, eval_batches, Path(out) if out else None)
    run.objective, run.sums_of = objective, evaluate or default_sums(loss)
    try:
        run.start(resume, example_inputs)
        with Interrupts() as interrupts:
            run.all_steps(interrupts)
        return run.result()
    finally:
        run.close()


class Run:
    """One call of `train`: its parts, and where it is."""

    objective: Objective
    sums_of: Sums
    records: Records | None = None

    def __init__(self, parts: Assembly, plan: Plan, batches: Batches, eval_batches: Batches | None, out: Path | None):
        self.parts, self.plan, self.config, self.out = parts, plan, parts.config, out
        self.batches, self.eval_batches = batches, eval_batches
        self.at = Progress()
        self.is_main: bool = parts.accelerator.is_main_process
        self._began = time.monotonic()
        device = parts.accelerator.device
        self._losses = torch.zeros((), dtype=torch.float32 if device.type == "mps" else torch.float64, device=device)
        self._note = ""
        self.graphs = StepGraphs(lambda batch: self._learn([batch]), device) if self.config.cuda_graphs else None

    def start(self, resume: bool, example_inputs: Any) -> None:
        """From the beginning, or from where `out/last` is."""
        found = find_last(self.out / "last", resume) if self.out else None
        stored = Stored(found, self.parts, len(self.batches)) if found else None
        if stored:
            self.at = stored.restore()
            self._losses += self.at.loss_sum
        elif self.out and self.is_main:
            self.out.mkdir(parents=True, exist_ok=True)
            remove(self.out / "last")
            remove(self.out / "best")
        self.parts.settle_rates()
        self.parts.start_learner(self.plan.total_steps, self._examples(example_inputs))
        if stored:
            stored.restore_learner_and_random_numbers()
        main_out = self.out if self.is_main else None
        self.records = Records(main_out, self.config.tensorboard and self.is_main, self.at.history)

    def _examples(self, given: Any) -> Any:
        budget = self.config.budget
        if given is not None or budget is None or not budget.needs_inputs:
            return to_device(given, self.parts.accelerator.device)
        batch, _ = next(self.batches.epoch(0))
        if not isinstance(batch, (dict, tuple)):
            raise ValueError(
                "a budget for the whole model or in seconds is counted on real inputs; pass `example_inputs`."
            )
        return batch if isinstance(batch, dict) else batch[:1]

    # -- the loop ------------------------------------------------------------------------------------------------

    def all_steps(self, interrupts: Interrupts) -> None:
        first, total = self.at.step, self.plan.total_steps
        with progress("training", total, done=first, shown=self.is_main) as tick:
            if first:
                tick.say(f"continuing {self.out} at step {first} of {total}")
            stream = self._stream(first)
            for step in range(first, total):
                self.one_step(step, stream)
                signal = self._look(step, interrupts)
                if self.plan.reports(step):
                    self._report(tick)
                if self.out and (self.plan.saves(step) or signal):
                    self._save(self.out)
                if signal:
                    self._stop(signal, tick)
                tick(self._note)

    def _stream(self, step: int) -> Iterator[Any]:
        """Batches from that step on, epoch after epoch; what does not make up a whole step is left out."""
        epoch, done = divmod(step, self.plan.steps_per_epoch)
        while True:
            skip, stop = (n * self.config.accumulate for n in (done, self.plan.steps_per_epoch))
            for batch, _ in islice(self.batches.epoch(epoch, skip), stop - skip):
                yield batch
            epoch, done = epoch + 1, 0

    def one_step(self, step: int, stream: Iterator[Any]) -> None:
        """One step of Algorithm 1; the proximal step hangs on the optimizer's."""
        parts, config = self.parts, self.config
        share = rate_at(step, self.plan.total_steps, config.schedule, config.warmup, config.final_lr)
        set_rates(parts.bare_optimizer, share)
        if self.graphs is not None:
            self.graphs(next(stream))
        else:
            self._learn(islice(stream, config.accumulate), step * config.accumulate)
        parts.update_average(step)
        self.at.step, self.at.num_losses = step + 1, self.at.num_losses + 1

    def _learn(self, batches: Iterable[Any], first: int = 0) -> None:
        """From all of them together; `first` is the number of the first in the run."""
        parts = self.parts
        for number, batch in enumerate(batches, first):
            with parts.accelerator.accumulate(parts.model):
                loss = self.objective(parts.model, batch, number)
                parts.accelerator.backward(loss)
            self._losses += loss.detach() / self.config.accumulate
        parts.step()

    # -- beside the steps ----------------------------------------------------------------------------------------

    def _look(self, step: int, interrupts: Interrupts) -> int:
        """Refreshes what progress shows; returns the signal to obey now, the same on every process, or 0."""
        if not self.plan.looks(step):
            return 0 if is_one_of_several() else interrupts.received
        seen = torch.tensor([float(self._losses), interrupts.received], device=self._losses.device)
        loss, signals = mean_over_processes(seen).tolist()
        cost = f", cost {self.parts.learner.relative_cost:.3f}" if self.parts.learner else ""
        self._note = f"epoch {self._epoch:.2f}, loss {loss / self.at.num_losses:.4f}{cost}"
        return interrupts.received or math.ceil(signals)

    def _report(self, tick: Ticker) -> None:
        """Evaluates, writes a row, keeps the model if it is the best."""
        row = self._row()
        if not math.isfinite(row["train_loss"]):
            raise FloatingPointError(
                f"the training loss is {row['train_loss']} at step {self.at.step}; lower `lr`, or raise `warmup`."
            )
        if self.eval_batches is not None:
            with self.parts.evaluated() as model:
                row |= mean_metrics(model, self.eval_batches.epoch(0), self.sums_of)
        assert self.records is not None
        self.records.add(row)
        self._losses.zero_()
        self.at.num_losses = 0
        tick.say(line_of(row, self.plan.total_steps))
        if self._is_best(row) and self.out:
            save_best(self.out / "best", self.parts, row)

    def _row(self) -> Row:
        learner = self.parts.learner
        row: Row = {
            "step": self.at.step,
            "epoch": self._epoch,
            "seconds": self._seconds(),
            "lr": float(self.parts.bare_optimizer.param_groups[0]["lr"]),
            "train_loss": float(mean_over_processes(self._losses)) / max(1, self.at.num_losses),
        }
        return row | {name: value for name, value in (learner.metrics() if learner else {}).items() if name != "step"}

    def _is_best(self, row: Row) -> bool:
        """Only a model that is done with its structure counts: before, it costs more than it was asked to."""
        name, sign = ("accuracy", 1) if "accuracy" in row else ("loss", -1)
        if name not in row or not math.isfinite(row[name]) or not self.parts.structure_is_done:
            return False
        if self.at.best is not None and sign * row[name] <= sign * self.at.best:
            return False
        self.at.best = row[name]
        return True

    def _save(self, out: Path) -> None:
        self._losses.copy_(mean_over_processes(self._losses))
        loss_sum = float(self._losses)
        if math.isnan(loss_sum):
            raise FloatingPointError(
                f"the training loss is nan at step {self.at.step}; the checkpoint before it is kept."
            )
        now = replace(self.at, loss_sum=loss_sum, seconds=self._seconds())
        save_last(out / "last", self.parts, now, len(self.batches))

    def _stop(self, signal: int, tick: Ticker) -> NoReturn:
        saved = (
            f"saved in {self.out / 'last'}; start it again as before to continue" if self.out else "nothing is saved"
        )
        tick.say(f"stopped at step {self.at.step} of {self.plan.total_steps}: {saved}.")
        obey(signal)

    @property
    def _epoch(self) -> float:
        return self.at.step / self.plan.steps_per_epoch

    def _seconds(self) -> float:
        return self.at.seconds + time.monotonic() - self._began

    def result(self) -> TrainResult:
        learner = self.parts.learner
        cost = learner.relative_cost if learner else None
        return TrainResult(self.at.history, self.at.best, cost, self._seconds())

    def close(self) -> None:
        if self.records:
            self.records.close()
        self.parts.release()

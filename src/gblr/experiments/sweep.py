"""`gblr reproduce NAME`: the runs of a recipe, several at a time on one GPU, each made once, resumed if cut short."""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch

from gblr.experiments.check import check
from gblr.experiments.field import Field, Paused, Place
from gblr.experiments.provenance import code_commit
from gblr.experiments.run import TWIN, Recipe
from gblr.experiments.store import Record, Store, by_rate, plain
from gblr.workflows.measuring import PRECISIONS

_PAUSED = 75  # exit code of a run whose time was over: sysexits' "try again"
_STATUS_SECONDS = 30.0


def main(recipe: Recipe, field: Field, arguments: Sequence[str] | None = None) -> int:
    args = parse(recipe, field, arguments)
    runs = chosen(recipe, field, args)
    if args.list:
        print("\n".join(listing(runs, _store(recipe, args), field)))
        return 0
    if args.check or args.write_check:
        return check(recipe.name, smoke_runs(runs, field), field, field.smoke_task(recipe), write=args.write_check)
    if args.smoke:
        return smoke(recipe, field, runs, args.out)
    if args.data is None and not args.tiny:
        raise ValueError(f"--data DIR or the variable GBLR_DATA must name the folder with the data ({recipe.data}).")
    if args.one:
        return one(recipe, field, args.one, runs[args.one], args)
    if recipe.data != "imagenet":
        _task(recipe, field, args)  # read and prepared once, for all processes
    return Sweep(recipe, field, runs, args).go()


def parse(recipe: Recipe, field: Field, arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"gblr reproduce {recipe.name}", description=recipe.what)
    parser.add_argument("--data", type=Path, default=_variable("GBLR_DATA"), help="folder of the data set")
    parser.add_argument("--out", type=Path, default=field.out, help="folder of the results of all recipes")
    parser.add_argument("--only", nargs="+", metavar="PATTERN", help="runs whose names match, in that order")
    parser.add_argument("--seeds", type=int, default=recipe.seeds, help="how many, for the runs that have several")
    parser.add_argument("--epochs", type=float, help="instead of what the recipe says")
    parser.add_argument(
        "--precision", choices=PRECISIONS, default="float32",
        help="of models while fits to their inputs are prepared; bfloat16 takes half of the time on many CPUs",
    )  # fmt: skip
    parser.add_argument("--workers", type=int, default=3, help="runs at a time")
    parser.add_argument("--time", type=float, metavar="SECONDS", help="then runs pause, and none is started")
    parser.add_argument("--start", type=float, metavar="SECONDS", help="then no run is started; others go on")
    parser.add_argument("--published", type=Path, metavar="DIR", help="runs in its result files are not made again")
    parser.add_argument("--model", default=recipe.model, help="trained network, for recipes that start from one")
    parser.add_argument("--eager", action="store_true", help="no compilation and no CUDA graphs: slow, for debugging")
    parser.add_argument("--list", action="store_true", help="names of the runs, and which are there already")
    parser.add_argument("--smoke", action="store_true", help="tiny networks, generated data, this process: seconds")
    parser.add_argument("--check", action="store_true", help="compare a tiny version with its stored result")
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)  # all runs, tiny, as processes
    parser.add_argument("--write-check", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--deadline", type=float, default=float("inf"), help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def _variable(name: str) -> Path | None:
    return Path(os.environ[name]) if os.environ.get(name) else None


def chosen(recipe: Recipe, field: Field, args: argparse.Namespace) -> dict[str, Any]:
    every: Mapping[str, Any] = recipe.runs(args.seeds)
    runs = {name: run for one in args.only or ["*"] for name, run in every.items() if fnmatch(name, one)}
    if unknown := [one for one in args.only or () if not any(fnmatch(name, one) for name in every)]:
        raise ValueError(f"no run matches {' '.join(unknown)}; the names are those of --list.")
    if args.epochs:  # of runs that train at all
        longer = {name: replace(run, epochs=type(run.epochs)(args.epochs)) for name, run in runs.items() if run.epochs}
        runs |= longer
    if args.precision != "float32":
        if not all(hasattr(run, "precision") for run in runs.values()):
            raise ValueError(f"--precision is for recipes with text; the runs of {recipe.name} have none.")
        runs = {name: replace(run, precision=args.precision) for name, run in runs.items()}
    return {name: field.tiny(run, int(args.epochs or 2)) for name, run in runs.items()} if args.tiny else runs


def _task(recipe: Recipe, field: Field, args: argparse.Namespace) -> Any:
    return field.smoke_task(recipe) if args.tiny else field.load_task(recipe, args.data, args.out, args.model)


def _store(recipe: Recipe, args: argparse.Namespace) -> Store:
    """With what is published of the recipe, if there is such a file."""
    if args.published is None:
        return Store(args.out / recipe.place)
    if not args.published.is_dir():
        raise ValueError(f"--published {args.published} is no folder; give the one with {recipe.result_file}.")
    file = args.published / recipe.result_file
    return Store(args.out / recipe.place, file if file.exists() else None)


def listing(runs: Mapping[str, Any], store: Store, field: Field) -> list[str]:
    """A line for each run, and how many are left to be made; of those that are there, with their rates."""
    lines, left = [], left_of(runs, store, field)
    for name, run in runs.items():
        if not store.has(name):
            lines.append(name if name in left else f"{name}  (not needed: all runs that start from it are there)")
        elif name in left and not is_outdated(run, name, store, field):
            lines.append(f"{name}  (there, but not its model, which others start from)")
        elif name in left:
            lines.append(f"{name}  (there, but {with_best_rate(run, store, field)[0].lr:g} is now the best rate)")
        else:
            lines.append(f"{name}  (there, rate {store.rate(name):g})")
    return [*lines, f"{len(left)} of {len(runs)} left"]


def left_of(runs: Mapping[str, Any], store: Store, field: Field) -> list[str]:
    """Names of the runs to be made. A twin is no result: where all that starts from it is there, published ones too,
    nothing needs it. A published run whose model is elsewhere is made again for those that start from it.
    """
    left = {name for name, run in runs.items() if not store.has(name) or is_outdated(run, name, store, field)}
    starting = {
        name: {other for other, run in runs.items() if run.source == f"{store.folder.name}/{name}"} for name in runs
    }

    def is_left(name: str) -> bool:
        if name in left:
            return not name.startswith(TWIN) or not starting[name] or not starting[name].isdisjoint(left)
        return not starting[name].isdisjoint(left) and not store.path(name, ".model.pt").exists()

    return [name for name in runs if is_left(name)]


def is_outdated(run: Any, name: str, store: Store, field: Field) -> bool:
    """A result that is there was made with a rate that is no longer the best of its trials."""
    if not store.has(name):
        return False
    best, trials = with_best_rate(run, store, field)
    return bool(trials) and store.rate(name) != best.lr


# -- one run -----------------------------------------------------------------------------------------------------------


def one(recipe: Recipe, field: Field, name: str, run: Any, args: argparse.Namespace) -> int:
    """In a process of its own: makes the run, and stores the result."""
    store = _store(recipe, args)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    place = Place(args.out, args.model or str(args.data), device, store.path(name, ".state"), args.deadline, args.eager)
    try:
        perform(recipe, field, name, run, _task(recipe, field, args), store, place)
    except Paused as paused:
        print(f"paused {paused}", flush=True)
        return _PAUSED
    return 0


def perform(recipe: Recipe, field: Field, name: str, run: Any, task: Any, store: Store, place: Place) -> Record:
    run, trials = with_best_rate(run, store, field)
    if not place.is_of(plain(run.to_dict())):
        print("starts anew: it was paused with other settings, or another rate", flush=True)
        place.forget()
    place.note(plain(run.to_dict()))
    commit = code_commit()
    result = field.make(run, task, replace(place, say=lambda line: print(line, flush=True)))
    head: Record = {"name": name, "recipe": recipe.name, "config": run.to_dict(), "seed": run.seed}
    head |= {"commit": commit, "device": _device_name(place.device)}
    head |= {"torch": torch.__version__} | ({"rate_trials": trials} if trials else {})
    record = head | result.record
    if run.method == "dense" and not run.source and (not run.held_out or name.startswith(TWIN)):  # others start from it
        store.save_model(name, result.model.state_dict())
    if result.blocks and run.seed == 0:
        store.save_blocks(name, result.blocks)
    store.write(name, record)  # last: a result that is there is complete
    place.forget()
    print(field.summary(record), flush=True)
    return record


def with_best_rate(run: Any, store: Store, field: Field) -> tuple[Any, dict[str, float]]:
    """The run with the rate of its best trial, if any was made, and how good each was, by their rates."""
    found = by_rate(store.matching(run.trials) if run.trials else [], field.goodness)
    if not found:
        return run, {}
    return replace(run, lr=max(found, key=lambda lr: found[lr])), {f"{lr:g}": found[lr] for lr in sorted(found)}


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "cpu"


# -- all runs ----------------------------------------------------------------------------------------------------------


@dataclass
class Sweep:
    """Runs as processes, `--workers` at a time; a result that is there is not made again, unless trials that came after
    it found a better rate.
    """

    recipe: Recipe
    area: Field
    runs: dict[str, Any]
    args: argparse.Namespace
    waiting: list[str] = field(default_factory=list)
    running: dict[str, Any] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    paused: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.store = _store(self.recipe, self.args)
        self.store.folder.mkdir(parents=True, exist_ok=True)
        self.deadline = time.time() + self.args.time if self.args.time else float("inf")
        self.last_start = min(self.deadline, time.time() + self.args.start if self.args.start else float("inf"))
        self.outdated = [name for name, run in self.runs.items() if is_outdated(run, name, self.store, self.area)]
        self.waiting = left_of(self.runs, self.store, self.area)
        self.told = time.time()

    def go(self) -> int:
        print(f"{len(self.runs)} runs, {len(self.runs) - len(self.waiting)} of them there already", flush=True)
        if self.args.published and not self.store.published:
            print(f"{self.args.published} has no {self.recipe.result_file}: nothing is published yet", flush=True)
        if self.outdated:
            print(f"made again, as the best of their trials has another rate: {', '.join(self.outdated)}", flush=True)
        with self._ending_its_runs():
            while self.running or self._startable():
                while len(self.running) < self.args.workers and (name := self._startable()):
                    self._start(name)
                time.sleep(0.2)
                self._gather()
                self._tell()
        return self._end()

    @contextmanager
    def _ending_its_runs(self) -> Iterator[None]:
        """However the sweep ends, SIGTERM included: runs that outlive it would be made twice, side by side."""
        is_main = threading.current_thread() is threading.main_thread()
        before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number)) if is_main else None
        try:
            yield
        finally:
            for process in self.running.values():
                process.terminate()
            if is_main:
                signal.signal(signal.SIGTERM, before)

    def _startable(self) -> str | None:
        if time.time() >= self.last_start:
            return None
        return next((name for name in self.waiting if not self.reason_to_wait(self.runs[name])), None)

    def reason_to_wait(self, run: Any) -> str:
        """A run waits for those of this sweep that choose its rate, paused ones too, and for the model that it starts
        from.
        """
        pending = [*self.waiting, *self.running, *self.paused]
        if run.trials and (trials := [name for name in pending if fnmatch(name, run.trials)]):
            return f"for {trials[0]}"
        if run.after and (first := [name for name in pending if fnmatch(name, run.after)]):
            return f"for {first[0]}"
        if "/" in run.source:
            place, _, name = run.source.partition("/")
            if Path(place) == self.recipe.place and name in pending:  # made again, perhaps: what is there is outdated
                return f"for {name}"
            if not Store(self.args.out / place).path(name, ".model.pt").exists():
                return f"for the model of `gblr reproduce {place} --only {name}`"
        return ""

    def _start(self, name: str) -> None:
        self.waiting.remove(name)
        options = ["--data", str(self.args.data), "--out", str(self.args.out), "--seeds", str(self.args.seeds)]
        options += [f"--{flag}" for flag in ("tiny", "eager") if getattr(self.args, flag)]
        options += ["--epochs", str(self.args.epochs)] if self.args.epochs else []
        options += ["--published", str(self.args.published)] if self.args.published else []
        options += ["--precision", self.args.precision] if self.args.precision != "float32" else []
        options += ["--model", self.args.model] if self.args.model else []
        command = [sys.executable, "-m", self.recipe.module, *options, "--one", name, "--deadline", str(self.deadline)]
        threads = str(max(1, (os.cpu_count() or 1) // self.args.workers))
        with self.store.path(name, ".log").open("a") as log:
            self.running[name] = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env={"OMP_NUM_THREADS": threads} | os.environ
            )

    def _gather(self) -> None:
        for name, process in list(self.running.items()):
            if process.poll() is None:
                continue
            del self.running[name]
            if process.returncode == _PAUSED:
                self.paused.append(name)
            elif process.returncode:
                self.failed.append(name)
            print(f"{name}: {'failed: ' if name in self.failed else ''}{self._last_line(name)}", flush=True)

    def _last_line(self, name: str) -> str:
        text = self.store.path(name, ".log").read_text(errors="replace")  # a letter may be half written
        lines = text.strip().splitlines()
        return lines[-1] if lines else ""

    def _tell(self) -> None:
        if time.time() - self.told < _STATUS_SECONDS:
            return
        self.told = time.time()
        for name in self.running:
            print(f"  {name}: {self._last_line(name)}", flush=True)
        print(f"  {len(self.waiting)} runs wait", flush=True)

    def _end(self) -> int:
        for name in self.waiting[:5]:
            if reason := self.reason_to_wait(self.runs[name]):
                print(f"{name} waits {reason}")
        left = len(self.waiting) + len(self.paused)
        if left:
            print(f"{left} runs are left ({len(self.paused)} paused); the same command continues.", flush=True)
        return 1 if self.failed else 0


# -- smoke -------------------------------------------------------------------------------------------------------------


def smoke_runs(runs: dict[str, Any], field: Field) -> dict[str, Any]:
    """The first with each feature, tiny; and one trial of a learning rate, if there are any."""
    seen: set[Hashable] = set()
    found = {}
    for name, run in runs.items():
        features = {("trial", bool(run.source))} if run.held_out else field.features(run)
        if not features <= seen:
            found[name] = field.tiny(run)
        seen |= features
    return found


def smoke(recipe: Recipe, field: Field, runs: dict[str, Any], out: Path) -> int:
    task, store = field.smoke_task(recipe), Store(out / "smoke" / recipe.place)
    shutil.rmtree(store.folder / "fits", ignore_errors=True)  # what earlier ones left would leave fits untried
    for name, run in smoke_runs(runs, field).items():
        print(name, flush=True)
        perform(recipe, field, name, run, task, store, Place(state=store.path(name, ".state")))
    return 0

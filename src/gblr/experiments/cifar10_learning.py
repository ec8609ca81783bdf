"""Learning the structure on complete CIFAR-10: a ViT from scratch, every budget method beside dense and low rank.

    python -m gblr.experiments.cifar10_learning --data DIR --out runs/cifar10            # the runs of docs/results
    python -m gblr.experiments.cifar10_learning --data DIR --out runs/cifar10 --only NAME  # some of them
    python -m gblr.experiments.cifar10_learning --smoke                                  # a minute on a CPU, no data

Several runs share one GPU (`--workers`); a run whose result is in --out already is not repeated. Costs are of the
converted layers (q, k, v, fc1, fc2), counted on the hardened model, whose accuracy is the one reported.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gblr.conversion.convert import convert_
from gblr.conversion.cost import cost
from gblr.conversion.filters import linear_layers
from gblr.conversion.harden import harden_
from gblr.data.cifar import MEAN, STD, load_cifar10
from gblr.data.images import ImageBatches, ImageSet
from gblr.experiments.provenance import code_commit
from gblr.experiments.step import GraphAdamW, Step, lr_share, made_fast_, uncompiled
from gblr.experiments.store import write
from gblr.experiments.structures import restore_variances_, standard_deviations
from gblr.fitting.config import GaudiConfig, LowRankConfig
from gblr.models.vit import ViT
from gblr.training.budget import Budget
from gblr.training.learner import StructureLearner
from gblr.training.param_groups import param_groups
from gblr.training.schedules import SigmaSchedule

CONVERTED = linear_layers(include=("query", "key", "value", "fc1", "fc2"))


@dataclass(frozen=True)
class Run:
    """One training run; what is not said is common to all."""

    method: str  # "dense", "low rank" or "gaudi"
    relative_cost: float = 1.0
    block_rank: int = 1
    budget: Any = "projection"
    sigma: tuple[float, float, Any, float, float] = (
        1.0,
        100.0,
        "geometric",
        0.85,
        0.05,
    )  # first, last, shape, end, sharp
    structure_lr: float = 5e-3
    start_cost: float = 1.0
    budget_start: float = 0.1
    budget_end: float | None = None
    align: int = 1
    epochs: int = 30
    batch_size: int = 1024
    lr: float = 1e-3
    weight_decay: float = 0.05
    warmup_epochs: float = 5.0
    seed: int = 0
    weights: Any = "gradient"
    max_shrinkage: float | None = None


def named_runs() -> dict[str, Run]:
    """The table: dense, and at two costs low rank and four kinds of learned structure; then one change at a time."""
    runs = {"dense": Run("dense")}
    for c in (0.25, 0.08):
        runs[f"low-rank-{c}"] = Run("low rank", c)
        for rank in (1, 16):
            for budget in ("projection", "shrinkage"):
                runs[f"gaudi-{c}-rank{rank}-{budget}"] = Run("gaudi", c, rank, budget)
    for rank in (1, 16):
        base = Run("gaudi", 0.08, rank)
        changes: dict[str, dict[str, Any]] = {
            "linear-sigma": {"sigma": (1.0, 100.0, "linear", 1.0, 0.0)},
            "soft-end": {"sigma": (1.0, 100.0, "geometric", 0.85, 0.0)},
            "sharp-15": {"sigma": (1.0, 100.0, "geometric", 0.75, 0.15)},
            "structure-lr-0.002": {"structure_lr": 2e-3},
            "structure-lr-0.01": {"structure_lr": 1e-2},
            "half-start": {"start_cost": 0.5},
            "end-0.4": {"budget_end": 0.4},
            "end-0.8": {"budget_end": 0.8},
            "equal-weights": {"weights": "equal"},
            "price-weights": {"weights": "price"},
            "seed-1": {"seed": 1},  # what chance alone does
            "shrinkage-2": {"budget": "shrinkage", "max_shrinkage": 2.0},
            "shrinkage-0.5": {"budget": "shrinkage", "max_shrinkage": 0.544},
        }
        for name, change in changes.items():
            runs[f"gaudi-0.08-rank{rank}-{name}"] = replace(base, **change)
    return runs


def build(run: Run, **sizes: Any) -> nn.Module:
    """The network with its converted layers, all with the output variance of dense ones at the start."""
    torch.manual_seed(run.seed)
    model = ViT(**sizes)
    deviations = standard_deviations(model)
    if run.method == "gaudi":
        config = GaudiConfig(run.start_cost, block_rank=run.block_rank, align=run.align, init="scratch")
        convert_(model, config, where=CONVERTED)
    elif run.method == "low rank":
        convert_(model, LowRankConfig(run.relative_cost), where=CONVERTED)
        restore_variances_(model, deviations)
    return model


def train(run: Run, data: ImageSet, **sizes: Any) -> tuple[nn.Module, dict[str, Any]]:
    device = data.images.device
    model = build(run, **sizes).to(device)
    batches = ImageBatches(data, run.batch_size, True, MEAN, STD, pad=4, flip=True, seed=run.seed)
    total = run.epochs * len(batches)
    on_gpu = device.type == "cuda"
    if on_gpu:
        made_fast_(model, compiled=True)
    optimizer = GraphAdamW(param_groups(model, run.lr, run.structure_lr, run.weight_decay), device)
    learner = None
    if run.method == "gaudi":
        first, last, shape, end, sharp = run.sigma
        budget = Budget(
            run.relative_cost, method=run.budget, start=run.budget_start if run.budget == "projection" else 0.0,
            end=run.budget_end, weights=run.weights, max_shrinkage=run.max_shrinkage,
        )  # fmt: skip
        sigma = SigmaSchedule(first, last, shape, end=end, sharp=sharp)
        learner = StructureLearner(model, optimizer, budget, sigma, total)
    step = Step(model, optimizer, on_gpu)
    begin, done = time.perf_counter(), 0
    curve: list[dict[str, float]] = []
    for epoch in range(run.epochs):
        batches.set_epoch(epoch)
        generator = torch.Generator().manual_seed(run.seed * 1000 + epoch)
        for x, y in batches:
            optimizer.set_share(lr_share(done, total, run.warmup_epochs * len(batches)))
            loss = step(*cut_and_mix(x, y, generator))
            done += 1
        if learner is not None and (epoch + 1) % 5 == 0:
            metrics = {k: round(v, 4) for k, v in learner.metrics().items()} | {"loss": round(float(loss), 4)}
            print(json.dumps(metrics), flush=True)
            curve.append({k: metrics[k] for k in ("step", "relative_cost", "live_blocks", "loss")})
    seconds = time.perf_counter() - begin
    row: dict[str, Any] = {"seconds": round(seconds, 1), "loss": round(float(loss), 4)}
    if learner is not None:
        row["curve"] = curve
    if run.budget == "shrinkage" and learner is not None:
        row["max_shrinkage"] = round(learner.state_dict()["max_shrinkage"], 3)
    return model, row


def cut_and_mix(x: Tensor, y: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """CutMix for every second batch, one box for all of it; classes as shares."""
    target = nn.functional.one_hot(y, 10).float()
    if torch.rand((), generator=generator) < 0.5:
        return x, target
    size = x.shape[-1]
    side = int(size * math.sqrt(1 - float(torch.rand((), generator=generator))))
    top, left = (int(torch.randint(0, size + 1 - side, (), generator=generator)) for _ in range(2))
    other = torch.randperm(len(x), generator=generator).to(x.device)
    mixed = x.clone()
    mixed[:, :, top : top + side, left : left + side] = x[other][:, :, top : top + side, left : left + side]
    kept = 1 - side * side / size**2
    return mixed, kept * target + (1 - kept) * target[other]


@torch.no_grad()
def accuracy(model: nn.Module, data: ImageSet) -> float:
    model.eval()
    right = 0
    device = data.images.device
    for x, y in ImageBatches(data, 2000, False, MEAN, STD):
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            right += int((model(x).argmax(1) == y).sum())
    return round(100 * right / len(data), 2)


def perform(run: Run, train_data: ImageSet, test_data: ImageSet, **sizes: Any) -> dict[str, Any]:
    model, row = train(run, train_data, **sizes)
    row["soft_accuracy"] = accuracy(model, test_data)
    if run.method == "gaudi":
        harden_(model)
    with uncompiled(model):
        spent = cost(model, test_data.images[:1].float())
        whole = round(spent.model_relative_cost, 4)
        row |= {"accuracy": accuracy(model, test_data), "model_relative_cost": whole}
        row["reached_cost"] = round(spent.relative_cost, 4)
        row["train_accuracy"] = accuracy(model, ImageSet(train_data.images[:10_000], train_data.labels[:10_000]))
    if run.method == "gaudi":
        row["by_type"] = {name: round(group.relative_cost, 4) for name, group in spent.by_type().items()}
    return asdict(run) | row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=os.environ.get("GBLR_DATA"), help="folder of CIFAR-10")
    parser.add_argument("--out", type=Path, default=Path("runs/cifar10-learning"))
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="runs whose names match one of these patterns, in that order"
    )
    parser.add_argument("--epochs", type=int, help="instead of 30")
    parser.add_argument("--workers", type=int, default=3, help="runs at a time on one GPU")
    parser.add_argument("--smoke", action="store_true", help="random images, a tiny network, two epochs, this process")
    parser.add_argument("--one", metavar="NAME", help=argparse.SUPPRESS)
    args = parser.parse_args()
    runs = {name: run for one in args.only or ["*"] for name, run in named_runs().items() if fnmatch(name, one)}
    if args.epochs:
        runs = {name: replace(run, epochs=args.epochs) for name, run in runs.items()}
    args.out.mkdir(parents=True, exist_ok=True)
    if args.smoke:
        return smoke(runs, args.out)
    if args.data is None:
        parser.error("--data DIR or the variable GBLR_DATA must name the folder of CIFAR-10.")
    if args.one:
        return one(args.one, runs[args.one], args.out)
    prepare(args.data, args.out)
    return all_of(runs, args, sys.argv[1:])


def prepare(data: Path, out: Path) -> None:
    """Decoded once, for all processes."""
    if not (out / "cifar10.pt").exists():
        train_data, test_data = load_cifar10(data)
        torch.save([train_data.images, train_data.labels, test_data.images, test_data.labels], out / "cifar10.pt")


def one(name: str, run: Run, out: Path) -> int:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    images, labels, test_images, test_labels = torch.load(out / "cifar10.pt", weights_only=True)
    commit = code_commit()
    row = perform(run, ImageSet(images, labels).to(device), ImageSet(test_images, test_labels).to(device))
    row["commit"] = commit
    write(out / f"{name}.json", {"name": name} | row)
    print(json.dumps({"name": name} | row), flush=True)
    return 0


def all_of(runs: dict[str, Run], args: Any, options: list[str]) -> int:
    waiting = [name for name in runs if not (args.out / f"{name}.json").exists()]
    running: dict[str, subprocess.Popen] = {}
    failed = []
    while waiting or running:
        while waiting and len(running) < args.workers:
            name = waiting.pop(0)
            command = [sys.executable, "-m", "gblr.experiments.cifar10_learning", *options, "--one", name]
            running[name] = subprocess.Popen(
                command, stdout=(args.out / f"{name}.log").open("w"), stderr=subprocess.STDOUT
            )
        time.sleep(0.5)
        for name, process in list(running.items()):
            if process.poll() is not None:
                del running[name]
                failed += [name] if process.returncode else []
                last = (args.out / f"{name}.log").read_text().strip().splitlines()[-1:]
                print(f"{name}: {'failed: ' if process.returncode else ''}{last[0] if last else ''}", flush=True)
    collect(runs, args.out)
    return 1 if failed else 0


def collect(runs: dict[str, Run], out: Path) -> None:
    rows = [json.loads((out / f"{name}.json").read_text()) for name in runs if (out / f"{name}.json").exists()]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    head = {
        "command": "python -m gblr.experiments.cifar10_learning --data DIR",
        "what": "test accuracy of a ViT (width 384, depth 8, patch 4, 30 epochs, one seed) on CIFAR-10; costs of the "
        "converted layers (q, k, v, fc1, fc2), accuracy of the hardened model",
        "device": device,
        "torch": torch.__version__,
    }
    write(out / "cifar10-learning.json", head, rows)


def smoke(runs: dict[str, Run], out: Path) -> int:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (128, 3, 32, 32), dtype=torch.uint8, generator=generator)
    data = ImageSet(images, torch.randint(0, 10, (128,), generator=generator))
    for name in list(runs)[:4]:
        run = replace(runs[name], epochs=2, batch_size=32, warmup_epochs=1.0)
        print(name, json.dumps(perform(run, data, data, width=48, depth=2, num_heads=2)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

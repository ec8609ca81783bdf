"""What measuring a model takes: calibration, sensitivity, and a refit of all layers, in float32 and in bfloat16.

    python benchmarks/bench_calibration.py --model FILE.gguf --data DIR --out docs/results/calibration.json

The first blocks of a language model without its head, low rank at half of the cost, windows of Wikipedia articles; each
part by itself, the two precisions in turn, medians. "difference" is how far the refitted model's outputs are from the
dense ones, on windows that were not used, relative to their size. `--float32` leaves bfloat16 out: to compare releases.
"""

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from bench_cpu import cpu_model

import gblr
from gblr.experiments.corpora import load_text_task
from gblr.models.load import load_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a language model of blocks `model.layers`, as gblr loads it")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--cache", type=Path, default=Path("runs/language"))
    parser.add_argument("--windows", type=int, default=24)
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--float32", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    dense: Any = load_model(args.model).model.float().eval().requires_grad_(False).model
    dense.layers = dense.layers[: args.blocks]
    task = load_text_task("smollm2", args.data, args.cache, args.model)
    batches, unseen = task.calibration(args.windows), task.calibration(args.windows + 8)[-2:]
    rows: dict[str, list[dict[str, float]]] = {"float32": [], "bfloat16": []}
    if args.float32:
        del rows["bfloat16"]
    for _ in range(args.rounds):
        for name, found in rows.items():
            found.append(measured(dense, batches, unseen, lambda name=name: precision(name)))
            print(name, found[-1], flush=True)
    table = [{"precision": name, **medians(found)} for name, found in rows.items()]
    if args.out:
        record = {
            "command": command(parser, args),
            "what": f"seconds for {args.windows} windows of 1,024 tokens and {args.blocks} blocks, low rank at half of "
            f"the cost, threads: {args.threads}, medians of {args.rounds}",
            "torch": torch.__version__, "cpu": cpu_model(), "rows": table,
        }  # fmt: skip
        args.out.write_text(json.dumps(record, indent=1) + "\n")


def command(parser: argparse.ArgumentParser, args: argparse.Namespace) -> str:
    """As it was called, where that decides what is measured."""
    options = ("windows", "blocks", "rounds", "threads")
    changed = [
        f"--{name} {getattr(args, name)} " for name in options if getattr(args, name) != parser.get_default(name)
    ]
    where = "--model FILE.gguf --data DIR --out docs/results/calibration.json"
    return f"python benchmarks/bench_calibration.py {''.join(changed)}{where}"


def precision(name: str) -> AbstractContextManager[Any]:
    return nullcontext() if name == "float32" else torch.autocast("cpu", torch.bfloat16)


def measured(
    dense: Any, batches: list[Any], unseen: list[Any], around: Callable[[], AbstractContextManager[Any]]
) -> dict[str, float]:
    plain, weighed = copy.deepcopy(dense), copy.deepcopy(dense)
    config = gblr.LowRankConfig(0.5)
    calibrated = seconds(around, lambda: gblr.convert_(plain, config, calibration=batches))
    both = seconds(around, lambda: gblr.convert_(weighed, config, calibration=batches, sensitivity=True))
    refit = seconds(around, lambda: gblr.heal_(plain, dense, batches))
    with torch.no_grad():
        pairs = [(dense(**batch)[0], plain(**batch)[0]) for batch in unseen]
    missing = sum(float((a - b).square().sum()) for a, b in pairs)
    size = sum(float(a.square().sum()) for a, _ in pairs)
    return {
        "calibration": calibrated, "sensitivity": both - calibrated, "refit": refit,
        "difference": (missing / size) ** 0.5,
    }  # fmt: skip


def seconds(around: Callable[[], AbstractContextManager[Any]], work: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    with around():
        work()
    return time.perf_counter() - begin


def medians(rows: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


if __name__ == "__main__":
    main()

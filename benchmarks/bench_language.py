"""Tokens per second of SmolLM2-135M with structured layers, beside dense in the same run: reading a text, and writing.

    python benchmarks/bench_language.py --out docs/results/language-speed-cpu.json
    python benchmarks/bench_language.py --device cuda --out docs/results/language-speed-gpu.json
    python benchmarks/bench_language.py --only gblr-1 'low-rank*'       # these methods alone
    python benchmarks/bench_language.py --smoke                         # tries the script, in seconds

On a CPU in float32 by one thread, under 15 minutes; on a GPU in bfloat16, as CUDA graphs. Reading is one window
of 1,024 tokens without a cache, writing one token at place 128 of a cache of 256; batch 1. Forms of GBLR layers are
planned for each of the two: measured in the first block, whose layers the other blocks repeat in shape, rank and cost,
and taken over there. Medians of turns: every variant once, then all again.
"""

import argparse
import fnmatch
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from bench_cpu import cpu_model
from cpu_models import smollm2
from language_models import (
    BLOCK_RANKS,
    METHODS,
    Variant,
    plan_like_first_block,
    reading,
    size_bytes,
    variant,
    writing,
)
from torch import Tensor

from gblr.conversion.timing import captured, interleaved
from gblr.experiments.provenance import code_commit
from gblr.experiments.smollm2_wikitext import COSTS
from gblr.ops.native import cpu_kernels

FOR_GPUS = ("low-rank-8", "blast-8")  # ranks that are multiples of 8, which matrix units ask for
TINY = {"hidden_size": 144, "intermediate_size": 192, "num_hidden_layers": 1, "vocab_size": 64}


@dataclass(frozen=True)
class Setting:
    device: torch.device
    smoke: bool = False

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def model(self) -> Any:
        torch.manual_seed(0)
        model = smollm2(**TINY) if self.smoke else smollm2()
        return model.to(self.device, torch.bfloat16 if self.on_gpu else torch.float32)

    def tokens(self, count: int) -> Tensor:
        return torch.arange(count, device=self.device)[None] % TINY["vocab_size"]


@dataclass(frozen=True)
class Task:
    """What is timed of every model: `call(model, tokens)` makes it."""

    name: str
    num_tokens: int
    rounds: int
    call: Callable[[Any, Tensor], Callable[[], Any]]


def tasks(setting: Setting) -> tuple[Task, Task]:
    """Rounds on a CPU such that the whole takes under 15 minutes."""
    window, cache = (16, 8) if setting.smoke else (1024, 256)
    rounds = (2, 2) if setting.smoke else (30, 30) if setting.on_gpu else (4, 30)
    write = Task("writing", 1, rounds[1], lambda model, tokens: writing(model, tokens, cache))
    return Task("reading", window, rounds[0], reading), write


def variants(setting: Setting, methods: Sequence[str]) -> list[Variant]:
    dense = setting.model()
    return [Variant("dense", 1.0, 1.0, dense), *(variant(dense, name, cost) for name in methods for cost in COSTS)]


@torch.no_grad()
def measure(task: Task, models: Sequence[Variant], setting: Setting) -> list[dict[str, Any]]:
    """One row a variant. The first is what the others are compared with."""
    tokens = setting.tokens(task.num_tokens)
    forms = [planned(one, tokens, setting) for one in models]
    calls = [task.call(one.model, tokens) for one in models]
    if setting.on_gpu:
        calls = [captured([call]) for call in calls]
    seconds = [statistics.median(found) for found in interleaved(calls, setting.device, task.rounds)]
    return [
        {
            "task": task.name, "method": one.method, "cost": one.cost, "relative_cost": round(one.relative_cost, 4),
            "size_bytes": size_bytes(one.model), "ms": round(spent * 1e3, 4),
            "tokens_per_second": round(task.num_tokens / spent, 2), "over_dense": round(seconds[0] / spent, 4),
            "forms": found,
        }
        for one, spent, found in zip(models, seconds, forms, strict=True)
    ]  # fmt: skip


def planned(one: Variant, tokens: Tensor, setting: Setting) -> dict[str, int]:
    """Has the planner choose how each GBLR layer multiplies for so many tokens; how many layers take which form."""
    if one.method not in BLOCK_RANKS:
        return {}
    begin = time.perf_counter()
    found = plan_like_first_block(one.model, {"input_ids": tokens, "use_cache": False}, setting.on_gpu)
    print(f"{one.method} at {one.cost:g}: planned in {time.perf_counter() - begin:.0f} s: {found}", flush=True)
    return found


def show(row: dict[str, Any]) -> None:
    print(
        f"{row['task']} {row['method']:11s} cost {row['relative_cost']:.3f}, {row['size_bytes'] / 1e6:6.1f} MB: "
        f"{row['tokens_per_second']:10.1f} tokens/s, {row['over_dense']:.3f} of dense",
        flush=True,
    )


def chosen(patterns: Sequence[str], device: str) -> list[str]:
    """Methods that a pattern names; without patterns all that are measured on this device."""
    if not patterns:
        return [name for name in METHODS if device == "cuda" or name not in FOR_GPUS]
    found = [name for name in METHODS if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)]
    if not found:
        raise SystemExit(f"--only {' '.join(patterns)} names no method; there are {', '.join(METHODS)}.")
    return found


def command(args: argparse.Namespace) -> str:
    words = ["python", "benchmarks/bench_language.py", *(["--device", "cuda"] if args.device == "cuda" else [])]
    words += [*(["--smoke"] if args.smoke else []), *(["--only", *args.only] if args.only else [])]
    return shlex.join(
        [*words, "--out", f"docs/results/language-speed-{'gpu' if args.device == 'cuda' else 'cpu'}.json"]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", nargs="+", default=[], metavar="PATTERN", help=f"of {', '.join(METHODS)}")
    parser.add_argument("--smoke", action="store_true", help="a tiny model, to try the script")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args(arguments)
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("--device cuda: torch finds no CUDA device.")
    if args.device == "cpu":
        torch.set_num_threads(1)
    begin = time.perf_counter()
    setting = Setting(torch.device(args.device), args.smoke)
    models = variants(setting, chosen(args.only, args.device))
    rows: list[dict[str, Any]] = []
    for task in tasks(setting):
        found = measure(task, models, setting)
        rows += found
        for row in found:
            show(row)
        if args.out:  # after each task: planning takes minutes, and the time on a GPU may end
            record = record_of(args, setting, rows, time.perf_counter() - begin)
            args.out.write_text(json.dumps(record, indent=1) + "\n")
    print(f"{len(rows)} rows in {time.perf_counter() - begin:.0f} s")
    return 0


def record_of(
    args: argparse.Namespace, setting: Setting, rows: Sequence[dict[str, Any]], seconds: float
) -> dict[str, Any]:
    how = "bfloat16, CUDA graphs" if setting.on_gpu else "float32, one thread"
    return {
        "command": command(args),
        "what": f"tokens per second of {'a tiny model' if args.smoke else 'SmolLM2-135M'}, batch 1, {how}, medians",
        "commit": code_commit(), "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if setting.on_gpu else f"{cpu_model()}, {cpu_kernels()} kernels",
        "rows": list(rows), "seconds": round(seconds),
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())

"""What the learner adds to a training step: ViT-Base/16 at 224 x 224 with Gaudi layers, with and without its work.

    python benchmarks/bench_learner.py --out docs/results/learner.json        # on a GPU; --smoke for a CPU

Both kinds of step are run in turns; medians, of pairs for the difference. `share` is the learner's part of the whole
step. `mode` is "eager", where the host's launches count, or "captured", the whole step with the learner's work as one
CUDA graph.
"""

import argparse
import itertools
import json
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import nn

import gblr
from gblr.experiments.provenance import code_commit
from gblr.models.vit import ViT

CONVERTED = gblr.linear_layers(include=("query", "key", "value", "fc1", "fc2"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/learner.json"))
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    modes = ("eager", "captured") if device == "cuda" else ("eager",)
    cases = itertools.product(modes, (1, 16), ("projection", "shrinkage"))
    rows = []
    for case in cases:
        rows.append(measure(device, *case, args.smoke))
        print(rows[-1], flush=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "command": "python benchmarks/bench_learner.py",
        "what": "time of a ViT-Base training step with and without the learner (batch 128, bf16)",
        "commit": code_commit(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
        "rows": rows,
    }
    args.out.write_text(json.dumps(content, indent=1) + "\n")


def measure(device: str, mode: str, block_rank: int, method: str, smoke: bool) -> dict[str, object]:
    torch.manual_seed(0)
    size, batch, repeats = (32, 4, 3) if smoke else (224, 128, 20)
    sizes = {"width": 96, "depth": 2, "num_heads": 2} if smoke else {"width": 768, "depth": 12, "num_heads": 12}
    model = ViT(image_size=size, patch_size=16, num_classes=1000, **sizes)
    gblr.convert_(model, gblr.GaudiConfig(1.0, block_rank=block_rank, init="scratch"), where=CONVERTED)
    model.to(device)
    on_gpu = device == "cuda"
    optimizer = torch.optim.AdamW(gblr.param_groups(model, lr=1e-4), fused=on_gpu, capturable=on_gpu)
    x = torch.randn(batch, 3, size, size, device=device)
    y = torch.randint(1000, (batch,), device=device)
    budget = gblr.Budget(relative_cost=0.25, method=method)
    learner = gblr.StructureLearner(model, optimizer, budget, total_steps=4 * repeats)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16, cache_enabled=False):
            loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()

    after_step = learner._after_step
    steps: dict[bool, Callable[[], None]] = {}
    for active in (True, False):
        learner._after_step = after_step if active else (lambda: None)
        steps[active] = captured(step) if mode == "captured" else partial(run_with, learner, learner._after_step, step)
    times: dict[bool, list[float]] = {True: [], False: []}
    for i in range(2 * repeats + 4):
        active = i % 2 == 0
        wait(device)
        begin = time.perf_counter()
        steps[active]()
        wait(device)
        if i >= 4:
            times[active].append(time.perf_counter() - begin)
    step_ms = 1e3 * statistics.median(times[True])
    learner_ms = 1e3 * statistics.median(a - b for a, b in zip(times[True], times[False], strict=True))
    return {
        "mode": mode,
        "block_rank": block_rank,
        "method": method,
        "step_ms": round(step_ms, 2),
        "learner_ms": round(learner_ms, 2),
        "share": round(learner_ms / step_ms, 4),
    }


def run_with(learner: gblr.StructureLearner, after_step: Callable[[], None], step: Callable[[], None]) -> None:
    learner._after_step = after_step
    step()


def captured(step: Callable[[], None]) -> Callable[[], None]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()

"""What the learner adds to a training step: ViT-Base/16 at 224 x 224 with Gaudi layers, with and without its work.

    python benchmarks/bench_learner.py --out docs/results/learner.json        # on a GPU; --smoke for a CPU

Both kinds of step are run in turns; medians. `share` is the learner's part of the whole step.
"""

import argparse
import json
import os
import platform
import statistics
import time
from pathlib import Path

import torch
from torch import nn

import gblr
from gblr.models.vit import ViT

CONVERTED = gblr.linear_layers(include=("query", "key", "value", "fc1", "fc2"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/learner.json"))
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = [
        measure(device, block_rank, method, args.smoke)
        for block_rank in (1, 16)
        for method in ("projection", "shrinkage")
    ]
    for row in rows:
        print(row)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "command": "python benchmarks/bench_learner.py",
        "what": "time of a ViT-Base training step with and without the learner (batch 128, bf16, eager)",
        "commit": os.environ.get("GBLR_COMMIT", ""),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
        "rows": rows,
    }
    args.out.write_text(json.dumps(content, indent=1) + "\n")


def measure(device: str, block_rank: int, method: str, smoke: bool) -> dict[str, object]:
    torch.manual_seed(0)
    sizes = {"image_size": 32, "width": 96, "depth": 2, "num_heads": 2} if smoke else {
        "image_size": 224, "width": 768, "depth": 12, "num_heads": 12
    }  # fmt: skip
    batch, repeats = (4, 3) if smoke else (128, 12)
    model = ViT(patch_size=16, num_classes=1000, **sizes)
    gblr.convert_(model, gblr.GaudiConfig(1.0, block_rank=block_rank, init="scratch"), where=CONVERTED)
    model.to(device)
    optimizer = torch.optim.AdamW(gblr.param_groups(model, lr=1e-4), fused=device == "cuda")
    x = torch.randn(batch, 3, sizes["image_size"], sizes["image_size"], device=device)
    y = torch.randint(1000, (batch,), device=device)
    budget = gblr.Budget(relative_cost=0.25, method=method)
    learner = gblr.StructureLearner(model, optimizer, budget, total_steps=4 * repeats)
    after_step = learner._after_step
    times: dict[bool, list[float]] = {True: [], False: []}
    for i in range(2 * repeats + 4):
        active = i % 2 == 0
        learner._after_step = after_step if active else (lambda: None)
        wait(device)
        begin = time.perf_counter()
        with torch.autocast(device, torch.bfloat16):
            loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        wait(device)
        if i >= 4:
            times[active].append(time.perf_counter() - begin)
    with_learner, without = (statistics.median(times[active]) for active in (True, False))
    return {
        "block_rank": block_rank,
        "method": method,
        "step_ms": round(1e3 * with_learner, 2),
        "learner_ms": round(1e3 * (with_learner - without), 2),
        "share": round(1 - without / with_learner, 4),
    }


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()

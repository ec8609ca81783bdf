"""How fast structured convolutions are on a CPU: one thread, interleaved medians, as ratios to nn.Conv2d in that run.

    python benchmarks/bench_conv.py --out docs/results/conv.json

3 x 3 convolutions of ResNet-20 (8 images) and of ResNet-18 (1 image), every method at the same cost, random contents.
GBLR is hardened with the image as example, so that the planner chooses its form.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from bench_cpu import cpu_model
from torch import nn

import gblr
from gblr.conversion.timing import interleaved_medians
from gblr.ops.native import cpu_kernels

LAYERS = {
    "16 channels, 8 x 32 x 32": (16, 32, 8),
    "32 channels, 8 x 16 x 16": (32, 16, 8),
    "64 channels, 8 x 8 x 8": (64, 8, 8),
    "64 channels, 56 x 56": (64, 56, 1),
    "128 channels, 28 x 28": (128, 28, 1),
    "256 channels, 14 x 14": (256, 14, 1),
    "512 channels, 7 x 7": (512, 7, 1),
}
COSTS = (0.55, 0.3)
METHODS: dict[str, Any] = {
    "low rank": gblr.LowRankConfig,
    "Monarch": gblr.MonarchConfig,
    "BLAST": gblr.BlastConfig,
    "GBLR": lambda cost: gblr.GaudiConfig(cost, init="scratch"),
}


def converted(conv: nn.Conv2d, method: str, cost: float, x: torch.Tensor) -> nn.Module:
    model = nn.Sequential(nn.Conv2d(conv.in_channels, conv.out_channels, 3, padding=1)).eval()
    model.load_state_dict({f"0.{name}": value for name, value in conv.state_dict().items()})
    gblr.convert_(model, METHODS[method](cost), where=gblr.conv_layers())
    if method == "GBLR":
        gblr.harden_(model, x)
    return model.eval()


def measure(name: str, cost: float, rounds: int) -> list[dict[str, Any]]:
    channels, side, images = LAYERS[name]
    conv, x = nn.Conv2d(channels, channels, 3, padding=1).eval(), torch.randn(images, channels, side, side)
    models = {"dense": conv} | {method: converted(conv, method, cost, x) for method in METHODS}
    times = interleaved_medians([lambda model=model: model(x) for model in models.values()], x.device, rounds)
    rows = []
    for (method, model), seconds in zip(models.items(), times, strict=True):
        if method != "dense":
            layer = model[0]  # type: ignore[index]
            row = {"layer": name, "cost": cost, "method": method, "reached_cost": round(layer.matrix.relative_cost, 3)}
            rows.append(row | {"form": getattr(layer, "form", None), "ratio": round(seconds / times[0], 3)})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="result file")
    parser.add_argument("--rounds", type=int, default=41)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = []
    for name in LAYERS:
        for cost in COSTS:
            for row in measure(name, cost, args.rounds):
                what = f"{row['layer']:28s} {row['cost']:.2f} {row['method']:10s} {row['form'] or '':8s}"
                print(f"{what} {row['ratio']:.3f}", flush=True)
                rows.append(row)
    if args.out:
        found = {"rows": rows, "torch": torch.__version__, "cpu": f"{cpu_model()}, {cpu_kernels()} kernels"}
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""How long fitting takes: the 60 matrices of ViT-Base (q, k, v, fc1, fc2 of 12 layers) at cost 0.3. Target: 60 s on
an H200.

python benchmarks/bench_fit.py --out docs/results/fit-vit-base.json
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from torch import nn

import gblr

TARGET_SECONDS = 60.0


def vit_base_linears(width: int = 768, depth: int = 12) -> nn.ModuleDict:
    """Linear layers of ViT-Base's shapes with random weights: the time does not depend on their values."""
    shapes = {"q": (width, width), "k": (width, width), "v": (width, width)}
    shapes |= {"fc1": (width, 4 * width), "fc2": (4 * width, width)}
    return nn.ModuleDict({f"{i}_{name}": nn.Linear(*shape) for i in range(depth) for name, shape in shapes.items()})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = []
    configs = {
        "block_rank 1": gblr.GaudiConfig(0.3),
        "block_rank 16": gblr.GaudiConfig(0.3, block_rank=16, align=16),
        "low rank": gblr.LowRankConfig(0.3),
    }
    gblr.convert_(vit_base_linears(64, 1).to(args.device), configs["block_rank 1"])  # libraries load on the first call
    for name, config in configs.items():
        torch.manual_seed(0)
        model = vit_base_linears(depth=args.depth).to(args.device)
        begin = time.perf_counter()
        report = gblr.convert_(model, config)
        seconds = time.perf_counter() - begin
        row = {"what": name, "matrices": len(report), "seconds": round(seconds, 1), "mean_error": report.mean_error}
        rows.append(row)
        print(row, flush=True)
    if args.out:
        gpu = torch.cuda.get_device_name() if args.device.startswith("cuda") else "CPU"
        record = {
            "command": "python benchmarks/bench_fit.py --out docs/results/fit-vit-base.json",
            "device": gpu,
            "torch": torch.__version__,
            "target_seconds": TARGET_SECONDS,
            "rows": rows,
        }
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(record, indent=1) + "\n")
    return 0 if rows[0]["seconds"] <= TARGET_SECONDS else 1


if __name__ == "__main__":
    sys.exit(main())

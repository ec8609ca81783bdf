"""Finds the best way to cut the GPU products (`Shape` in ops/block_matmul/triton.py) for layers and token counts.

    python benchmarks/tune_gpu.py --out runs/tuned.json      # on a GPU, about four minutes

Every shape that compiles is checked against float32 and timed as a CUDA graph.
"""

import argparse
import itertools
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from cpu_cases import Case
from gpu_cases import Layer, captured, device, in_turns

from gblr.ops.block_matmul import triton as kernels

CASES = (
    Case(4096, 4096, 0.25, block_rank=64, align=64),
    Case(11008, 4096, 0.25, block_rank=64, align=64),
    Case(4096, 4096, 0.25),
    Case(11008, 4096, 0.25),
    Case(3072, 768, 0.17, block_rank=64, align=64),
)
TOKENS = (1, 16, 64, 256, 4096, 25216)


def shapes(tokens: int) -> list[kernels.Shape]:
    sizes = [size for size in (64, 128, 256) if size <= max(64, 2 * tokens)]
    found = itertools.product(sizes, (4, 16), (3, 5, 7), (4, 8), (True, False))
    return [kernels.Shape(*shape) for shape in found if not (shape[0] == 256 and shape[3] == 4)]


def few_shapes(tokens: int) -> list[kernels.FewShape]:
    rows = (8, 16, 32) if tokens == 1 else (16, 32)
    return [kernels.FewShape(*shape) for shape in itertools.product(rows, (2, 4, 8), (2, 4, 8))]


def tune(case: Case, tokens: int) -> list[dict[str, Any]]:
    few = tokens <= 16
    layers = [Layer(case, seed) for seed in range(8)] if few else [Layer(case)] * 4  # few tokens: weights not in cache
    count, layer = len(layers), layers[0]
    x = torch.randn(tokens, case.in_features, device=device(), dtype=torch.bfloat16)
    (dense,) = in_turns([captured([partial(each.dense, x) for each in layers])], 7)
    rows = []
    for shape in few_shapes(tokens) if few else shapes(tokens):
        setattr(kernels, "choose_few_shape" if few else "choose_shape", lambda *_, shape=shape: shape)
        try:
            error = layer.error(x)
            (seconds,) = in_turns([captured([partial(each.packed, x) for each in layers])], 7)
        except Exception as reason:  # too much shared memory, mostly
            rows.append({"shape": shape, "failed": str(reason)[:100]})
            continue
        wrong = {} if error < 0.02 else {"error": error}
        rows.append({"shape": shape, "us": round(seconds / count * 1e6, 2), **wrong})
    for row in rows:
        row |= {"case": str(case), "tokens": tokens, "dense_us": round(dense / count * 1e6, 2)}
    best = sorted((row for row in rows if "us" in row), key=lambda row: row["us"])[:3]
    print(f"{case}, {tokens} tokens, dense {dense / count * 1e6:.1f} us:", flush=True)
    for row in best:
        print(f"    {row['us']:8.1f} us {tuple(row['shape'])} {row.get('error', '')}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/tuned.json"))
    args = parser.parse_args()
    rows = [row for case in CASES for tokens in TOKENS for row in tune(case, tokens)]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps({"device": torch.cuda.get_device_name(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

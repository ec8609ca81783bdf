"""How fast packed layers and Gaudi training are on a GPU, against dense and low rank in the same run.

    python benchmarks/bench_gpu.py --out docs/results/gpu.json     # on a GPU, under 8 minutes
    python benchmarks/bench_gpu.py --smoke                         # tries the script on a CPU, tiny sizes
    python benchmarks/bench_gpu.py --plot docs/results/gpu.json docs/images/gpu.png

Speeds are ratios: 2 is twice as fast as dense. Exit code 1 where a target is missed.
"""

import argparse
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch
from cpu_cases import Case
from gpu_cases import Machine, device, measure, on_gpu
from gpu_models import decoding_row, inference_row, training_rows

from gblr.experiments.provenance import code_commit

SQUARE = Case(4096, 4096, 0.25, block_rank=64, align=64)
WIDE = Case(11008, 4096, 0.25, block_rank=64, align=64)
FC1 = Case(3072, 768, 0.17, block_rank=64, align=64)
MANY, FEW = (4096, 25216), (1, 16, 256)
# case, tokens, least speed against low rank, against dense
TARGETS: list[tuple[Case, tuple[int, ...], float | None, float | None]] = [
    (SQUARE, MANY, 0.85, 2.5),
    (WIDE, MANY, 0.85, 2.5),
    (SQUARE, FEW, 0.85, None),
    (WIDE, FEW, 0.85, 1.5),
    (Case(4096, 4096, 0.25), MANY, None, 1.5),
    (Case(11008, 4096, 0.25), MANY, None, 1.5),
    (FC1, (25216,), None, 1.9),
]
COSTS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75)
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384)
SMOKE = Case(256, 192, 0.25, block_rank=64, align=64)
# what of a model's row is judged, in which direction, and by how much
MODEL_TARGETS = {
    "over_dense_step": ("at most", 1.25), "fft_over_masks": ("at least", 8.0), "memory_over_dense": ("at most", 1.3),
    "over_dense": ("at least", 1.0),
}  # fmt: skip


def layer_rows(machine: Machine, smoke: bool) -> list[dict[str, Any]]:
    rows = []
    for case, many, low_rank, dense in [(SMOKE, (1, 40), None, None)] if smoke else TARGETS:
        for tokens in many:
            row = measure(case, tokens, machine, 3 if smoke else 15)
            row |= {"low_rank_target": low_rank, "dense_target": dense, "met": _met(row, low_rank, dense)}
            rows.append(row)
            show(row)
    return rows


def _met(row: dict[str, Any], low_rank: float | None, dense: float | None) -> bool:
    return row["over_low_rank"] >= (low_rank or 0) and row["over_dense"] >= (dense or 0)


def show(row: dict[str, Any]) -> None:
    low_rank, dense = (f" (at least {t})" if t else "" for t in (row.get("low_rank_target"), row.get("dense_target")))
    print(
        f"{row['case']:46s} {row['tokens']:6d} tokens: dense {row['dense_us']:8.1f} us, low rank "
        f"{row['low_rank_us']:8.1f}, packed {row['packed_us']:8.1f}; speed {row['over_low_rank']:.2f} of low rank"
        f"{low_rank}, {row['over_dense']:.2f} of dense{dense}; {row['over_floor']:.1f} times the floor, padding "
        f"{row['padding']:.2f}{'' if row.get('met', True) else '  MISSED'}",
        flush=True,
    )


def model_rows(smoke: bool) -> list[dict[str, Any]]:
    rows = []
    for make in (inference_row, decoding_row, training_rows):
        found = make(smoke)
        for row in found if isinstance(found, list) else [found]:
            judged = {key: target for key, target in MODEL_TARGETS.items() if key in row}
            row["targets"] = {key: f"{way} {value}" for key, (way, value) in judged.items()}
            row["met"] = all(row[k] <= v if way == "at most" else row[k] >= v for k, (way, v) in judged.items())
            rows.append(row)
            print(row, flush=True)
    return rows


def curves(machine: Machine, smoke: bool) -> list[dict[str, Any]]:
    """Speed against cost at 4096 tokens, and against tokens at cost 0.25."""
    if smoke:
        return []
    rows = []
    for rank in (64, 1):
        for cost in COSTS:
            rows.append(measure(Case(4096, 4096, cost, rank, rank), 4096, machine, 7) | {"curve": "cost"})
        for tokens in TOKENS:
            rows.append(measure(Case(4096, 4096, 0.25, rank, rank), tokens, machine, 7) | {"curve": "tokens"})
    return [row | {"block_rank": 64 if "block_rank 64" in row["case"] else 1} for row in rows]


def plot(source: Path, target: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = json.loads(source.read_text())["curves"]
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for axis, curve, key in ((axes[0], "cost", "relative_cost"), (axes[1], "tokens", "tokens")):
        for rank, colour in ((64, "#0072b2"), (1, "#d55e00")):
            found = [row for row in rows if row["curve"] == curve and row["block_rank"] == rank]
            x = [row[key] for row in found]
            axis.plot(x, [row["over_dense"] for row in found], "o-", color=colour, label=f"GBLR, block_rank {rank}")
            if rank == 64:
                low_rank = [row["dense_us"] / row["low_rank_us"] for row in found]
                axis.plot(x, low_rank, "s--", color="#999999", label="low rank (cuBLAS)")
        axis.axhline(1, color="black", linewidth=1)
        axis.set_xscale("log")
        axis.set_yscale("log")
        _plain_ticks(axis.xaxis, COSTS if curve == "cost" else TOKENS)
        _plain_ticks(axis.yaxis, (0.7, 1, 1.5, 2, 3, 4))
        axis.set_xlabel("relative cost, 4096 tokens" if curve == "cost" else "tokens, cost 0.25")
        axis.set_ylabel("speed of dense")
        axis.legend()
    figure.suptitle("4096 x 4096 in bfloat16")
    figure.savefig(target, dpi=150)


def _plain_ticks(axis: Any, values: tuple[float, ...]) -> None:
    axis.set_ticks(values, [f"{value:,}" for value in values])
    axis.set_ticks([], minor=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--skip-models", action="store_true")
    parser.add_argument("--plot", nargs=2, type=Path)
    args = parser.parse_args()
    if args.plot:
        plot(*args.plot)
        return 0
    if not on_gpu() and not args.smoke:
        raise SystemExit("bench_gpu.py measures a CUDA device, and torch finds none; --smoke tries the script without.")
    begin = time.perf_counter()
    machine = Machine(64 if args.smoke else 8192)
    print(f"{machine.mults_per_second * 2e-12:.0f} TFLOP/s, {machine.bytes_per_second * 1e-12:.2f} TB/s", flush=True)
    rows = layer_rows(machine, args.smoke)
    models = [] if args.skip_models else model_rows(args.smoke)
    record = {
        "command": "python benchmarks/bench_gpu.py --out docs/results/gpu.json",
        "what": "speed of hardened layers and of training on a GPU, bfloat16, CUDA graphs, medians",
        "commit": code_commit(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if on_gpu() else platform.machine(),
        "tflops": round(machine.mults_per_second * 2e-12, 1),
        "terabytes_per_second": round(machine.bytes_per_second * 1e-12, 3),
        "rows": rows,
        "models": models,
        "curves": curves(machine, args.smoke),
        "seconds": round(time.perf_counter() - begin),
    }
    if args.out:
        args.out.write_text(json.dumps(record, indent=1) + "\n")
    missed = [row for row in (*rows, *models) if not row["met"]]
    print(f"{len(missed)} of {len(rows) + len(models)} rows missed a target; {record['seconds']} s on {device()}")
    return 1 if missed and not args.smoke else 0


if __name__ == "__main__":
    sys.exit(main())

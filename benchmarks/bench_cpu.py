"""How fast packed layers are on a CPU: one thread, interleaved medians, as ratios to dense torch in the same run.

python benchmarks/bench_cpu.py --quick               # the table in under two minutes; exit code 1 where a ratio is
                                                     # above 1.25 times its target
python benchmarks/bench_cpu.py --out docs/results/cpu.json   # longer, with whole models and curves over cost
python benchmarks/bench_cpu.py --plot docs/results/cpu.json docs/images/cpu.png  # draws the curves of that
"""

import argparse
import json
import platform
import sys
from pathlib import Path
from typing import Any

import torch
from bench_masks import SHAPES, closed_form, fft_form, forward_backward
from bench_masks import interleaved_medians as mask_medians
from cpu_cases import Case, Machine, measure
from cpu_models import compare_decoding, compare_vit

from gblr.ops.native import cpu_kernels

BATCHES = (1, 16, 197, 2048)
TOLERANCE = 1.25  # a noisy machine may exceed a target by this
CASES = (
    Case(3072, 768, 0.363, targets=(0.42, 0.38, 0.48, 0.45)),
    Case(3072, 768, 0.15, targets=(0.20, 0.18, 0.22, 0.20)),
    Case(3072, 768, 0.3, block_rank=16, align=16, targets=(0.36, 0.34, 0.38, 0.36)),
    Case(3072, 768, 0.3, block_rank=16, targets=(0.36, 0.34, 0.38, 0.36)),
    Case(768, 768, 0.3, targets=(0.42, 0.42, 0.42, 0.42)),
    Case(4096, 4096, 0.3, targets=(0.42, 0.42, 0.42, 0.42)),
)
CURVES = ((768, 768), (3072, 768), (4096, 4096))
COSTS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 0.9)
MASK_TARGET, VIT_TARGET, DECODING_TARGET, PACKED_SHARE = 10.0, 1.15, round(1 / 0.85, 3), 0.8


def show(row: dict[str, Any]) -> None:
    target = f"at most {row['target']:.2f}" if "target" in row else ""
    name = f"{row['case']}, batch {row['batch']}" if "case" in row else row["model"]
    floor = f", {row['over_floor']:.2f} times the floor" if "over_floor" in row else ""
    print(f"{name:56s} {row.get('judged', row['ratio']):.3f} {target}{floor}", flush=True)


def layer_rows(machine: Machine, quick: bool) -> list[dict[str, Any]]:
    rows = []
    for case in CASES:
        for batch, target in zip(BATCHES, case.targets, strict=True):
            row = measure(case, batch, machine, 0.5 if quick else 3.0) | {"target": target}
            rows.append(row)
            show(row)
    return rows


def model_rows(quick: bool) -> list[dict[str, Any]]:
    seconds = 3.0 if quick else 20.0
    rows = [row | {"target": VIT_TARGET} for row in compare_vit(seconds)]
    rows.append(compare_decoding(seconds, 8 if quick else 32) | {"target": DECODING_TARGET})
    rows = [row | {"judged": row["over_amdahl"]} for row in rows]
    for row in rows:
        show(row)
    return rows


def mask_row() -> dict[str, Any]:
    forms = {"fft": fft_form, "closed": closed_form}
    times = mask_medians({name: forward_backward(form, *SHAPES[0]) for name, form in forms.items()}, 30)
    row = {"model": "masked_content, forward + backward, 768 x 768: time over the FFT form's"}
    row |= {"ratio": round(times["closed"] / times["fft"], 4), "target": 1 / MASK_TARGET}  # type: ignore[dict-item]
    show(row)
    return row


def curve_rows(machine: Machine) -> list[dict[str, Any]]:
    return [
        measure(Case(out, in_, cost), batch, machine, 1.0) | {"shape": f"{out} x {in_}", "cost": cost}
        for out, in_ in CURVES
        for cost in COSTS
        for batch in (1, 197)
    ]


def missed(rows: list[dict[str, Any]], factor: float = 1.0) -> list[dict[str, Any]]:
    late = [row for row in rows if row.get("judged", row["ratio"]) > factor * row["target"]]
    return late + [row for row in rows if row.get("packed_share", 1.0) < PACKED_SHARE]


def plot(file: Path, picture: Path) -> None:
    import matplotlib.pyplot as plt

    rows = json.loads(file.read_text())["curves"]
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True)
    for axis, batch in zip(axes, (1, 197), strict=True):
        for marker, shape in zip("os^", dict.fromkeys(row["shape"] for row in rows), strict=True):
            points = [(r["relative_cost"], r["ratio"]) for r in rows if r["shape"] == shape and r["batch"] == batch]
            axis.plot(*zip(*points, strict=True), marker=marker, label=shape)
        axis.plot((0, 1), (0, 1), color="grey", linestyle=":", label="time = cost")
        axis.set(xlabel="relative cost", title=f"batch {batch}", xlim=(0, 1), ylim=(0, 1.2))
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("time over dense")
    axes[0].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(picture, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="under two minutes: fewer repeats, no curves")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--plot", type=Path, nargs=2, metavar=("JSON", "PNG"), help="draw stored curves and stop")
    args = parser.parse_args()
    if args.plot:
        plot(*args.plot)
        return 0
    torch.set_num_threads(1)
    print(f"kernels: {cpu_kernels()}; ratios are time over dense, or over what Amdahl's law allows")
    with torch.inference_mode():
        machine = Machine()
        rows = layer_rows(machine, args.quick)
        models = model_rows(args.quick)
        curves = [] if args.quick else curve_rows(machine)
    models.append(mask_row())
    for row in missed(rows + models):
        print("MISSED:", row.get("case", row.get("model")), row.get("batch", ""), row.get("judged", row["ratio"]))
    if args.out:
        record = {
            "command": "python benchmarks/bench_cpu.py --out docs/results/cpu.json",
            "what": "time of packed layers over dense torch, one thread, medians taken in turns",
            "torch": torch.__version__, "cpu": f"{cpu_model()}, {cpu_kernels()} kernels",
            "gmacs_per_second": round(machine.mults_per_second / 1e9, 1),
            "rows": rows, "models": models, "curves": curves,
        }  # fmt: skip
        args.out.write_text(json.dumps(record, indent=1) + "\n")
    return 1 if missed(rows + models, TOLERANCE) else 0


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    sys.exit(main())

"""Exported models in onnxruntime against their dense export: size of the file and time. One thread, ratios.

    python benchmarks/bench_onnx.py --out docs/results/onnx.json      # --quick: small model, fewer repeats, a minute

Blocks lie at random places; their widths are spread over a third to five thirds of the mean. Files are run in turns;
ratios are medians over turns. `load` is the time that onnxruntime takes to open the file, in seconds.
"""

import argparse
import copy
import itertools
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from torch import Tensor, nn

import gblr
from gblr.conversion.export_onnx import OnnxExport
from gblr.layers.conv import ConvGeometry
from gblr.models.vit import ViT

COST = 0.3
SHAPES = ((3072, 768), (768, 3072), (768, 768))
POSITIONS = (1, 16, 197)
OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    "compose=False": {"compose": False},
    "compose=False, max_padding=1.6": {"compose": False, "max_padding": 1.6},
}
TURN = 0.01  # seconds of dense runs in a turn


def random_blocks(shape: tuple[int, int], block_rank: int, relative_cost: float) -> gblr.PackedGBLR:
    """As many blocks as make the smaller side's full rank, at random places."""
    ranks = min(shape) // block_rank * block_rank
    mean = min(1.0, relative_cost * shape[0] * shape[1] / (ranks * sum(shape)))
    fields = []
    for length in shape:
        spread = 1 / 3 + 4 / 3 * torch.rand(ranks // block_rank)
        fields += [(length * mean * spread).round().long().clamp(1, length)]
        fields += [torch.randint(0, length, (ranks // block_rank,))]
    structure = gblr.Structure(*fields)
    sizes = (block_rank * int(width.sum()) for width in (structure.row_width, structure.col_width))
    u, v = (torch.randn(size) / mean**0.5 / 50 for size in sizes)
    return gblr.PackedGBLR(structure, u, v, block_rank, shape)


def linear_case(shape: tuple[int, int], block_rank: int) -> nn.Module:
    return nn.Sequential(gblr.StructuredLinear(random_blocks(shape, block_rank, COST), torch.zeros(shape[0])))


def conv_case(channels: int, block_rank: int) -> nn.Module:
    blocks = random_blocks((channels, channels * 9), block_rank, COST)
    return nn.Sequential(gblr.StructuredConv2d(blocks, ConvGeometry(channels, (3, 3), padding=(1, 1))))


def vit_case(block_rank: int, quick: bool) -> nn.Module:
    """ViT-Base with all linear layers but the head over blocks; two of its twelve blocks if `quick`."""
    model = ViT(224, 16, width=768, depth=2 if quick else 12, num_heads=12, num_classes=1000)
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear) and name != "head":
            blocks = random_blocks((layer.out_features, layer.in_features), block_rank, COST)
            model.set_submodule(name, gblr.StructuredLinear(blocks, layer.bias))
    return model


def cases(quick: bool) -> Iterator[tuple[str, int, Callable[[], nn.Module], list[tuple[str, Tensor]]]]:
    """Name, block_rank, model, and inputs with their names."""
    ranks = (1, 16)
    for (out, size), rank in itertools.product(SHAPES[:1] if quick else SHAPES, ranks):
        inputs = [(f"{n} positions", torch.randn(n, size)) for n in POSITIONS]
        yield f"{out} x {size}", rank, lambda s=(out, size), r=rank: linear_case(s, r), inputs
    for rank in ranks:
        yield "256 x 256 x 3 x 3", rank, lambda r=rank: conv_case(256, r), [("14 x 14", torch.randn(1, 256, 14, 14))]
    for rank in ranks:
        images = [(f"{n} images", torch.randn(n, 3, 224, 224)) for n in (1, 4)]
        yield f"ViT-Base{', 2 blocks' * quick}", rank, lambda r=rank: vit_case(r, quick), images


def session(file: Path) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])


def time_ratios(sessions: dict[str, Any], x: Tensor, repeats: int) -> dict[str, float]:
    """Median of the time over that of "dense" in the same turn, so that a busy machine slows both alike."""
    feed = {sessions["dense"].get_inputs()[0].name: x.numpy()}
    ratios: dict[str, list[float]] = {name: [] for name in sessions}
    runs = 1
    for _ in range(repeats):
        seconds = {name: timed(run_often, run, feed, runs)[1] / runs for name, run in sessions.items()}
        runs = max(1, round(TURN / seconds["dense"]))
        for name in sessions:
            ratios[name].append(seconds[name] / seconds["dense"])
    return {name: statistics.median(found[len(found) // 5 :]) for name, found in ratios.items()}


def run_often(run: Any, feed: dict[str, Any], runs: int) -> None:
    for _ in range(runs):
        run.run(None, feed)


def timed(function: Callable[..., Any], *args: Any) -> tuple[Any, float]:
    start = time.perf_counter()
    return function(*args), time.perf_counter() - start


def export_all(model: nn.Module, example: tuple[Tensor], folder: Path) -> dict[str, OnnxExport]:
    """By the options they were made with; those that change nothing are left out."""
    dense = copy.deepcopy(model)
    gblr.densify_(dense)
    exports = {"dense": gblr.export_onnx(dense, example, folder / "dense.onnx")}
    for i, (key, options) in enumerate(OPTIONS.items()):
        made = gblr.export_onnx(model, example, folder / f"{i}.onnx", **options)
        if made.num_bytes not in {export.num_bytes for export in exports.values()}:
            exports[key] = made
    return exports


def measure(name: str, rank: int, model: nn.Module, inputs: list[tuple[str, Tensor]], quick: bool) -> list[dict]:
    head = {"model": name, "block_rank": rank, "cost": round(gblr.cost(model).relative_cost, 3)}
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        exports = export_all(model, (inputs[0][1],), Path(folder))
        loaded = {key: timed(session, export.path) for key, export in exports.items()}
        sessions = {key: found for key, (found, _) in loaded.items()}
        for what, x in inputs:
            long = x.dim() == 4 and x.shape[2] == 224
            ratios = time_ratios(sessions, x, repeats=(5 if long else 15) if quick else (9 if long else 41))
            for key in (key for key in exports if key != "dense"):
                row = head | {"input": what, "options": key, "operators": exports[key].num_operators}
                row |= {"file_ratio": round(exports[key].num_bytes / exports["dense"].num_bytes, 3)}
                row |= {"time_ratio": round(ratios[key], 3)}
                row |= {"load": round(loaded[key][1], 2), "dense_load": round(loaded["dense"][1], 2)}
                rows.append(row)
                print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="store the result as JSON")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict] = []
    for name, rank, make, inputs in cases(args.quick):
        torch.manual_seed(0)
        rows += measure(name, rank, make().eval(), inputs, args.quick)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        record = {
            "command": "python benchmarks/bench_onnx.py --out docs/results/onnx.json",
            "what": f"ONNX files at cost {COST} against dense ones: bytes, and time in onnxruntime "
            f"{onnxruntime.__version__}, float32, one thread, interleaved medians",
            "torch": torch.__version__,
            "cpu": torch.backends.cpu.get_cpu_capability() + ", " + platform.machine(),
            "rows": rows,
        }
        args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()

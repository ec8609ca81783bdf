"""Finds the best way to cut the GPU products (ops/block_matmul/shapes.py), each by itself, for layers and token counts.

    python benchmarks/tune_gpu.py                            # on a GPU, about four minutes: writes the package's table
    python benchmarks/tune_gpu.py --log runs/tuning.json     # and everything that was timed

All kernels are compiled first, in several processes. Every shape is checked against the first, and that one against
torch in float32; times are those of CUDA graphs. Other GPUs in the table stay.
"""

import argparse
import itertools
import json
import os
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from cpu_cases import Case
from gpu_cases import Layer, captured, device, in_turns
from torch import Tensor

from gblr.ops.block_matmul import shapes
from gblr.ops.block_matmul import triton as kernels
from gblr.ops.block_matmul.shapes import FEW_TOKENS, FewShape, Shape

CASES = (
    Case(4096, 4096, 0.25, block_rank=64, align=64),
    Case(11008, 4096, 0.25, block_rank=64, align=64),
    Case(4096, 4096, 0.25),
    Case(11008, 4096, 0.25),
    Case(3072, 768, 0.17, block_rank=64, align=64),
    Case(3072, 768, 0.17),
    Case(768, 768, 0.3, block_rank=16, align=16),
)
TOKENS = (1, 16, 64, 256, 1024, 4096, 25216)
GROUP, TILES = 4, (1, 4)
OTHER_GROUPS, OTHER_TILES = (1, 2, 8, 16), (1, 2, 8, 16)
MOST_TOKENS = 256  # of a tile


def many_shapes(tokens: int = 25216) -> list[Shape]:
    """One tile of outputs to a program."""
    found = []
    for size in (16, 32, 64, 128, MOST_TOKENS):
        if size > max(16, 2 * tokens) or size < min(64, tokens // 8):
            continue
        stages = {16: (4, 6, 8), 32: (4, 6, 8), 64: (3, 4, 6), 128: (2, 3, 4), 256: (3, 4)}[size]
        warps = (8,) if size == MOST_TOKENS else (4, 8) if size == 128 else (4,)
        swapped = (True,) if size < 64 else (False,) if size == 64 else (False, True)
        found += list(itertools.product((size,), (1,), (GROUP,), stages, warps, swapped, (True,), (True, False)))
    return [Shape(*shape) for shape in found]


def few_shapes(tokens: int) -> list[FewShape]:
    if tokens > FEW_TOKENS:
        return []
    rows, entries = ((8, 16, 32), (4, 8)) if tokens == 1 else ((16, 32), (2, 4, 8))
    return [FewShape(*shape) for shape in itertools.product(rows, entries, (2, 4))]


def all_shapes(tokens: int) -> list[Shape | FewShape]:
    tiles = TILES if tokens > 1024 else TILES[:1]
    many = many_shapes(tokens) if tokens > 1 else []
    return [*few_shapes(tokens), *(shape._replace(tiles=count) for shape in many for count in tiles)]


class Products:
    """The two products of a layer, to be launched one by one."""

    def __init__(self, layer: Layer, x: Tensor):
        self.layer, self.tokens = layer, x.shape[0]
        self.parts = kernels.parts(layer.sizes, self.tokens)
        self.values = layer.values.split(layer.sizes.value_parts)
        z = kernels.new_slots(x, layer.sizes, 1 if self.tokens == 1 else MOST_TOKENS)
        y = x.new_empty(self.tokens, layer.case.out_features)
        self.inputs, self.outputs = (x, z), (z, y)

    def launch(self, which: int, shape: Shape | FewShape, alone: bool = True) -> None:
        kernels.launch(
            self.inputs[which], self.values[which], self.layer.index, None, self.outputs[which], self.parts[which],
            shape, self.tokens, overlap="" if alone else ("first", "second")[which],
        )  # fmt: skip

    def output(self, which: int) -> Tensor:
        return self.outputs[which][: self.tokens].float()


def compile_one(block_rank: int, tokens: int, shape: Shape | FewShape) -> None:
    """Both products of a small layer: kernels are the same for large ones, and are kept on disk."""
    torch.set_num_threads(1)
    layer = Layer(Case(256, 256, 0.5, block_rank, block_rank))
    products = Products(layer, torch.randn(tokens, 256, device=device(), dtype=torch.bfloat16))
    for which in (0, 1):
        try:
            products.launch(which, shape)
        except Exception:  # too much shared memory, mostly; told where it is timed
            return


def compile_all() -> None:
    jobs: list[tuple[int, int, Shape | FewShape]] = []
    for rank in (1, 64):
        for shape in sorted({shape for tokens in TOKENS if tokens > 1 for shape in many_shapes(tokens)}):
            jobs += [(rank, shape.tokens * 2, shape), (rank, shape.tokens * 3 // 2, shape)]
        for tokens in (1, FEW_TOKENS):
            jobs += [(rank, tokens, shape) for shape in few_shapes(tokens)]
    workers = min(16, os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_one, *zip(*jobs, strict=True)))


def tune(case: Case, tokens: int) -> list[dict[str, Any]]:
    """What was timed, best first, for each of the two products."""
    # few tokens: weights must not be in the cache; short runs: starting a graph must not count
    cold = tokens <= 256
    layers = [Layer(case, seed) for seed in range(8)] if cold else [Layer(case)] * (2 if tokens >= 4096 else 8)
    x = torch.randn(tokens, case.in_features, device=device(), dtype=torch.bfloat16)
    dense, low_rank = (
        seconds / len(layers) * 1e6
        for seconds in in_turns(
            [captured([partial(getattr(m, kind), x) for m in layers]) for kind in ("dense", "low_rank")], 5
        )
    )
    every = [Products(layer, x) for layer in layers]
    rows = []
    for which in (0, 1):
        reference = every[0]
        first = few_shapes(tokens)[0] if tokens <= FEW_TOKENS else Shape(64, 1, GROUP, 3, 4, False, False, False)
        reference.launch(which, first)
        expected = reference.output(which)
        timed = partial(_timed, every, which, expected)
        found = _sorted([timed(shape) for shape in all_shapes(tokens)])
        if tokens >= 4096:
            for name, others in (("tiles", OTHER_TILES), ("group", OTHER_GROUPS)):
                best = [row["shape"] for row in found[:2]]
                more = {shape._replace(**{name: other}) for shape in best for other in others}
                found = _sorted(found + [timed(shape) for shape in more - {row["shape"] for row in found}])
        part = reference.parts[which]
        for row in found:
            row |= {"case": str(case), "kind": part.kind, "tokens": tokens, "tiles": part.num_tiles}
        rows += found
        wrong = [tuple(row["shape"]) for row in found if "wrong" in row.get("failed", "")]
        if wrong:
            print(f"    WRONG, and not taken: {wrong}", flush=True)
        told = ", ".join(f"{row['us']:.1f} {tuple(row['shape'])}" for row in found[:3] if "us" in row)
        print(
            f"{case}, {tokens} tokens, {part.kind}: {told} (dense {dense:.1f}, low rank {low_rank:.1f} us)", flush=True
        )
    want = x.float() @ layers[0].weight.float().T
    error = float((every[0].output(1) - want).norm() / want.norm())
    if not error < 0.02:
        print(f"    WRONG by {error:.3g}", flush=True)
    return rows


def _sorted(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: row.get("us", float("inf")))


def _timed(every: list[Products], which: int, expected: Tensor, shape: Shape | FewShape) -> dict[str, Any]:
    try:
        every[0].launch(which, shape)
        error = float((every[0].output(which) - expected).norm() / expected.norm())
        (seconds,) = in_turns([captured([partial(each.launch, which, shape) for each in every])], 5)
    except Exception as reason:
        return {"shape": shape, "failed": str(reason)[:100]}
    if not error < 0.02:
        return {"shape": shape, "failed": f"wrong by {error:.3g}"}
    return {"shape": shape, "us": round(seconds / len(every) * 1e6, 2)}


def write_table(rows: list[dict[str, Any]], path: Path) -> None:
    """The best of each product; those of one kind, tokens and tiles are one."""
    gpus = json.loads(path.read_text())["gpus"] if path.exists() else {}
    best: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        key = row["kind"], row["tokens"], row["tiles"]
        if "us" in row and (key not in best or row["us"] < best[key]["us"]):
            best[key] = {name: row[name] for name in ("kind", "tokens", "tiles", "shape", "us")}
    gpus[torch.cuda.get_device_name()] = list(best.values())
    lines = [
        f"  {json.dumps(name)}: [\n" + ",\n".join(f"   {json.dumps(row)}" for row in found) + "\n  ]"
        for name, found in gpus.items()
    ]
    path.write_text('{"made by": "benchmarks/tune_gpu.py",\n "gpus": {\n' + ",\n".join(lines) + "\n}}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, default=shapes.TABLE)
    parser.add_argument("--log", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("tune_gpu.py times a CUDA device, and torch finds none.")
    compile_all()
    print("compiled", flush=True)
    rows = []
    for case, tokens in itertools.product(CASES, TOKENS):
        rows += tune(case, tokens)
        if args.log:  # after each, so that a run cut short leaves what it found
            args.log.write_text(json.dumps({"device": torch.cuda.get_device_name(), "rows": rows}) + "\n")
    write_table(rows, args.table)


if __name__ == "__main__":
    main()

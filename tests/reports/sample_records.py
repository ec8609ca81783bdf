"""Run records that look like real ones: a small ViT on digits with baselines and a history, and a ViT-Base.

python -m tests.reports.sample_records runs/report-sample      # pages to look at
"""

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np

from gblr.reports.page import write_page
from gblr.reports.record import encode_blocks, load_record, save_record

ENVIRONMENT = {
    "gblr": "0.1.0", "torch": "2.13.0", "python": "3.11.7", "platform": "Linux x86_64", "cpu": "a made-up processor",
    "device": "cpu", "kernels": "avx512", "threads": 2,
}  # fmt: skip
VIT_TYPES = {"q": (1, 1), "k": (1, 1), "v": (1, 1), "o": (1, 1), "fc1": (4, 1), "fc2": (1, 4)}
VIT_NAMES = {
    "q": "attention.query", "k": "attention.key", "v": "attention.value", "o": "attention.output", "fc1": "mlp.fc1",
    "fc2": "mlp.fc2",
}  # fmt: skip
VIT_COSTS = {"q": 0.05, "k": 0.07, "v": 0.16, "o": 0.22, "fc1": 0.25, "fc2": 0.32}


def digits_run(seed: int = 0, cost: float = 0.2) -> dict[str, Any]:
    """A small ViT on digits, its structure learned; low rank and Monarch beside it."""
    rng = np.random.default_rng(seed)
    layers = [_layer(rng, depth, kind, 64, cost) for depth in range(4) for kind in VIT_TYPES]
    loss = 6.0 * (0.2 / cost) ** 0.4
    return _record(f"Digits ViT at {cost:.0%}", layers, cost) | {
        "command": f"gblr compress runs/digits/dense --data digits --cost {cost} --train 60 --out runs/digits-{cost}",
        "model": {"source": "runs/digits/dense", "architecture": "ViT, 4 blocks of width 64"},
        "data": {"source": "digits", "what": "scikit-learn digits, 1437 training images"},
        "results": [
            _result("GBLR, learned", 98.33 - 0.1 * loss, cost, 0.0009, main=True),
            _result("low rank", 97.9 - 0.6 * loss, cost * 0.98, 0.0008),
            _result("Monarch", 97.5 - 0.42 * loss, 0.94 * cost, 0.0011),
            _result("dense", 97.78, 1.0, 0.0014),
        ],
        "history": _history(rng, 1500, cost, num_blocks=len(layers) * 64),
    }


def vit_base_run(seed: int = 0) -> dict[str, Any]:
    """ViT-Base: 72 layers of 768 blocks, as large as a page gets; fitted, so it has no history."""
    rng = np.random.default_rng(seed)
    layers = [_layer(rng, depth, kind, 768, 0.2, samples=128, live=1.0) for depth in range(12) for kind in VIT_TYPES]
    return _record("ViT-Base, ImageNet-1k", layers, 0.2) | {
        "command": "gblr compress google/vit-base-patch16-224 --data imagenet --cost 0.2 --no-train --out runs/vit",
        "model": {"source": "google/vit-base-patch16-224", "architecture": "ViT-Base/16"},
        "data": {"source": "imagenet", "what": "ImageNet-1k validation, 224 \u00d7 224"},
    }


def _record(title: str, layers: list[dict[str, Any]], cost: float) -> dict[str, Any]:
    return {
        "format": 1, "title": title, "created": "2025-11-15T15:05:12+00:00", "seconds": 134.2,
        "environment": ENVIRONMENT, "method": "gaudi", "cost": cost, "layers": layers, "by_type": _by_type(layers),
        "metric": {"name": "accuracy", "unit": "%", "higher_is_better": True},
    }  # fmt: skip


def _result(name: str, value: float, cost: float, seconds: float, main: bool = False) -> dict[str, Any]:
    params = round(202_000 * cost + 6_000)
    return {
        "name": name, "main": main, "value": round(value, 2), "relative_cost": cost,
        "model_relative_cost": 0.06 + 0.94 * cost, "num_params": params, "dense_params": 208_000,
        "file_bytes": 4 * params + 9_000,
        "seconds_per_batch": {"1": seconds, "64": seconds * (4 + 20 * cost)},
    }  # fmt: skip


def _layer(
    rng: np.random.Generator, depth: int, kind: str, width: int, cost: float, samples: int = 64, live: float = 0.8
) -> dict[str, Any]:
    tall, wide = VIT_TYPES[kind]
    shape = (tall * width, wide * width)
    share = VIT_COSTS[kind] * cost / 0.2 * rng.uniform(0.5, 1.5) * (0.8 + 0.4 * depth / 12)
    count = int(width * live * rng.uniform(0.6, 1.0)) if live < 1 else width
    blocks = _blocks(rng, shape, count, share)
    mults = int(blocks[:, 1].astype(int).sum() + blocks[:, 3].astype(int).sum())
    dense, ours = _spectra(rng, min(shape), samples, rank=min(count, min(shape)))
    base = shape[0] * shape[1] / 4e9 * 64
    times = {"packed": base * (mults / (shape[0] * shape[1])) * 1.1 + 4e-6, "factors": base * 1.3 + 3e-6}
    times["dense"] = base + 3e-6
    return {
        "name": f"blocks.{depth}.{VIT_NAMES[kind]}", "type": kind, "shape": list(shape), "num_blocks": width,
        "live_blocks": count, "block_rank": 1, "dense_mults": shape[0] * shape[1], "num_mults": mults,
        "relative_cost": mults / (shape[0] * shape[1]), "error": float(rng.uniform(0.2, 0.6)),
        "form": min(times, key=times.__getitem__), "form_seconds": times, "blocks": encode_blocks(blocks),
        "rank": min(count, min(shape)), "singular_dense": dense, "singular": ours,
    }  # fmt: skip


def _blocks(rng: np.random.Generator, shape: tuple[int, int], count: int, share: float) -> np.ndarray:
    """Blocks gather in few regions, as learned ones do, and some wrap around."""
    mean_width = share * shape[0] * shape[1] / count / 2
    sides = []
    for length in shape:
        centres, weights = rng.uniform(0, length, 5), rng.dirichlet(np.ones(5) * 0.6)
        centre = centres[rng.choice(5, count, p=weights)] + rng.normal(0, length * 0.03, count)
        width = np.clip(mean_width * length / np.mean(shape) * rng.gamma(1.2, 1 / 1.2, count), 1, length).astype(int)
        sides += [(centre - width / 2).astype(int) % length, width]
    return np.stack(sides, axis=1)


def _spectra(rng: np.random.Generator, size: int, samples: int, rank: int) -> tuple[list[float], list[float]]:
    at = np.linspace(0, size - 1, min(samples, size)).round()
    dense = 8 * np.exp(-3.2 * at / size) / (1 + 20 * at / size) ** 0.5 * np.exp(rng.normal(0, 0.01, at.size))
    ours = np.where(at < rank, dense * (0.97 - 0.75 * (at / rank) ** 2), 0.0)
    return dense.tolist(), ours.tolist()


def _by_type(layers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    rows = []
    for kind in VIT_TYPES:
        group = [layer for layer in layers if layer["type"] == kind]
        costs = [layer["relative_cost"] for layer in group]
        total = sum(layer["num_mults"] for layer in group) / sum(layer["dense_mults"] for layer in group)
        row = {"type": kind, "layers": len(group), "min": min(costs), "mean": float(np.mean(costs)), "max": max(costs)}
        rows.append(row | {"relative_cost": total})
    return rows


def _history(rng: np.random.Generator, steps: int, cost: float, num_blocks: int) -> dict[str, Any]:
    step = np.arange(0, steps, 2)
    share = step / steps
    budget = np.maximum(cost, 1 - (1 - cost) * np.minimum(1, share / 0.6))
    sigma = [float(1 * 100**s) if s < 0.9 else math.inf for s in share]
    loss = 2.2 * np.exp(-6 * share) + 0.12 + 0.25 * np.exp(-(((share - 0.5) / 0.2) ** 2)) * (0.2 / cost) ** 0.5
    value = [
        [int(s), float(98.2 - 60 * math.exp(-7 * s / steps) - (0.2 / cost) * s / steps)] for s in range(0, steps, 100)
    ]
    return {
        "step": step.tolist(),
        "loss": (loss * np.exp(rng.normal(0, 0.22, step.size))).tolist(),
        "relative_cost": (budget * (0.985 + 0.015 * rng.random(step.size))).tolist(),
        "budget": budget.tolist(),
        "sigma": sigma,
        "live_blocks": np.round(num_blocks * (1 - 0.45 * np.clip((share - 0.1) / 0.6, 0, 1) ** 1.6)).tolist(),
        "value": value,
    }


def write_samples(folder: Path) -> dict[str, Path]:
    """Records and pages of one digits run, of three, and of ViT-Base; the pages by name."""
    costs = (0.1, 0.2, 0.35)
    files = {
        f"digits-{cost}": save_record(digits_run(i, cost), folder / f"digits-{cost}") for i, cost in enumerate(costs)
    }
    files["vit-base"] = save_record(vit_base_run(), folder / "vit-base")
    records = {name: load_record(file) for name, file in files.items()}
    pages = {
        "one": [records["digits-0.2"]],
        "three": [records[f"digits-{cost}"] for cost in costs],
        "vit-base": [records["vit-base"]],
    }
    return {name: write_page(found, folder / f"{name}.html") for name, found in pages.items()}


if __name__ == "__main__":
    for page in write_samples(Path(sys.argv[1])).values():
        print(page, f"{page.stat().st_size / 1e6:.2f} MB")

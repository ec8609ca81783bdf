"""Whole models for bench_gpu.py: a training step and inference of ViT-Base, greedy decoding of SmolLM2-135M.

Weights are random: time does not depend on them.
"""

import copy
import gc
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from bench_masks import fft_form
from cpu_cases import Case, random_packed
from cpu_models import linears, smollm2
from gpu_cases import captured, device, in_turns, on_gpu
from language_models import writing
from torch import Tensor, nn

import gblr
from gblr.experiments.step import GraphAdamW, Step, made_fast_
from gblr.layers import gaudi
from gblr.layers.structured import StructuredLinear
from gblr.models.vit import ViT

CONVERTED = ("query", "key", "value", "fc1", "fc2")
VIT_BASE = {"image_size": 224, "patch_size": 16, "num_classes": 1000, "width": 768, "depth": 12, "num_heads": 12}
VIT_SMOKE = {"image_size": 32, "patch_size": 16, "num_classes": 10, "width": 64, "depth": 1, "num_heads": 2}


def vit(smoke: bool) -> nn.Module:
    return ViT(**(VIT_SMOKE if smoke else VIT_BASE))


@contextmanager
def masks_by_fft() -> Any:
    """As the authors' code has them: a mask is an inverse FFT of its spectrum, and autograd goes through it."""

    def masked(
        table: Tensor, content: Tensor, width: Tensor, location: Tensor, dtype: torch.dtype | None = None
    ) -> Tensor:
        made = fft_form(content.flatten(0, 1), width, location, 20.0).view_as(content)  # block_rank 1
        return made.to(dtype or content.dtype)

    before, gaudi.masked_content_from = gaudi.masked_content_from, masked
    try:
        yield
    finally:
        gaudi.masked_content_from = before


def training_step(model: nn.Module, batch: int, size: int, classes: int) -> Callable[[], Any]:
    """One step as the recipes make it: compiled blocks, bfloat16, AdamW, one captured graph; with a learner where there
    is structure to learn.
    """
    x = torch.randn(batch, 3, size, size, device=device())
    y = torch.randint(classes, (batch,), device=device())
    optimizer = GraphAdamW(gblr.param_groups(model, lr=1e-5), device())
    if any(isinstance(module, gaudi.GaudiModule) for module in model.modules()):
        gblr.StructureLearner(model, optimizer, gblr.Budget(relative_cost=0.25), total_steps=1000)
    if on_gpu():
        made_fast_(model)
    return partial(Step(model, optimizer, on_gpu()), x, y)


def training_rows(smoke: bool) -> list[dict[str, Any]]:
    """Dense, GBLR, and GBLR with masks by FFT, each in a model of its own."""
    batch, times, memory = 2 if smoke else 128, {}, {}
    for kind in ("dense", "gblr", "fft"):
        torch.manual_seed(0)
        gc.collect()
        if on_gpu():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        torch._dynamo.reset()
        model = vit(smoke).to(device())
        if kind != "dense":
            where = gblr.linear_layers(include=CONVERTED)
            gblr.convert_(model, gblr.GaudiConfig(1.0, init="scratch"), where=where)
        sizes = VIT_SMOKE if smoke else VIT_BASE
        step = training_step(model, batch, sizes["image_size"], sizes["num_classes"])
        with masks_by_fft() if kind == "fft" else nullcontext():
            for _ in range(0 if smoke else 5):  # eager ones, then the capture
                step()
            (times[kind],) = in_turns([step], 3 if smoke else 15)
        memory[kind] = torch.cuda.max_memory_allocated() if on_gpu() else 1
        del model, step
    extra, extra_fft = times["gblr"] - times["dense"], times["fft"] - times["dense"]
    return [
        {
            "model": f"ViT-Base training step, batch {batch}, bfloat16, block_rank 1",
            "dense_ms": round(times["dense"] * 1e3, 2), "gblr_ms": round(times["gblr"] * 1e3, 2),
            "fft_ms": round(times["fft"] * 1e3, 2), "over_dense_step": round(times["gblr"] / times["dense"], 3),
            "fft_over_masks": round(extra_fft / max(extra, 1e-9), 2),
            "memory_over_dense": round(memory["gblr"] / memory["dense"], 3),
        }
    ]  # fmt: skip


def hardened(model: nn.Module, names: list[str], cost: float, block_rank: int, example: Any) -> tuple[nn.Module, Any]:
    """A copy with random blocks in those layers, planned on the example; and the report."""
    model = copy.deepcopy(model)
    for seed, name in enumerate(names):
        layer = model.get_submodule(name)
        case = Case(layer.out_features, layer.in_features, cost, block_rank, block_rank)
        matrix = random_packed(case, seed).to(layer.weight.dtype).to(device())
        model.set_submodule(name, StructuredLinear(matrix, layer.bias))
    return model, gblr.harden_(model, example, captured=on_gpu())


def forms_of(report: Any) -> dict[str, int]:
    found: dict[str, int] = {}
    for row in report.rows:
        found[row.form] = found.get(row.form, 0) + 1
    return found


@torch.no_grad()
def inference_row(smoke: bool) -> dict[str, Any]:
    batch, size = (2, 32) if smoke else (128, 224)
    dense = vit(smoke).to(device(), torch.bfloat16).eval()
    x = torch.randn(batch, 3, size, size, device=device(), dtype=torch.bfloat16)
    names = [n for n, m in dense.named_modules() if type(m) is nn.Linear and n.rpartition(".")[2] in CONVERTED]
    model, report = hardened(dense, names, 0.3, 64, x)
    dense_time, time = in_turns([captured([lambda: dense(x)]), captured([lambda: model(x)])], 3 if smoke else 15)
    return {
        "model": f"ViT-Base inference, batch {batch}, bfloat16, cost 0.3, block_rank 64",
        "dense_ms": round(dense_time * 1e3, 3), "hardened_ms": round(time * 1e3, 3),
        "over_dense": round(dense_time / time, 3), "forms": forms_of(report),
    }  # fmt: skip


@torch.no_grad()
def decoding_row(smoke: bool) -> dict[str, Any]:
    """One step with a static cache, as a CUDA graph; forms are planned for one token."""
    length = 16 if smoke else 256
    dense = smollm2().to(device(), torch.bfloat16)
    token = torch.zeros(1, 1, dtype=torch.long, device=device())
    model, report = hardened(dense, list(linears(dense)), 0.4, 16, token)
    runs = [captured([writing(net, token, length)]) for net in (dense, model)]
    dense_time, time = in_turns(runs, 3 if smoke else 30)
    return {
        "model": "SmolLM2-135M decoding, batch 1, bfloat16, cost 0.4, CUDA graph",
        "dense_ms": round(dense_time * 1e3, 4), "hardened_ms": round(time * 1e3, 4),
        "over_dense": round(dense_time / time, 3), "forms": forms_of(report),
    }  # fmt: skip

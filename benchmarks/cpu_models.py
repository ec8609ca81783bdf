"""Whole models for bench_cpu.py: dense against hardened, and against what Amdahl's law gives for the converted layers.

If the converted layers take the share s of a dense run and their cost is c, the law gives 1 - s + c s of its time.
Weights are random: time does not depend on them.
"""

import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from cpu_cases import Case, in_turns, random_packed
from torch import nn

import gblr
from gblr.layers.structured import StructuredLinear


def vit_base() -> nn.Module:
    from transformers import ViTConfig, ViTModel

    return ViTModel(ViTConfig(), add_pooling_layer=False).eval()


def smollm2(**changes: int) -> nn.Module:
    """The shape of SmolLM2-135M, or one that differs from it in these sizes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "vocab_size": 49152}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3}
    config = LlamaConfig(**(sizes | heads | changes), tie_word_embeddings=True, eos_token_id=None)
    return LlamaForCausalLM(config).eval()


def linears(model: nn.Module) -> dict[str, nn.Linear]:
    found = {n: m for n, m in model.named_modules() if type(m) is nn.Linear}
    return {n: m for n, m in found.items() if not n.startswith("lm_head")}


def hardened(model: nn.Module, cost: float, example: Any) -> tuple[nn.Module, float]:
    """A copy with random blocks of that cost in its linear layers, planned; and the share of dense cost kept packed."""
    model = copy.deepcopy(model)
    for seed, (name, layer) in enumerate(linears(model).items()):
        case = Case(layer.out_features, layer.in_features, cost)
        model.set_submodule(name, StructuredLinear(random_packed(case, seed), layer.bias))
    report = gblr.harden_(model, example)
    total = sum(row.dense_mults for row in report.rows)
    return model, sum(row.dense_mults for row in report.rows if row.form == "packed") / total


def share_of_layers(model: nn.Module, run: Callable[[], Any], rounds: int = 3) -> float:
    """Time inside the linear layers over that of the same run."""
    spent, begun = [0.0], [0.0]

    def enter(*_: Any) -> None:
        begun[0] = time.perf_counter()

    def leave(*_: Any) -> None:
        spent[0] += time.perf_counter() - begun[0]

    layers = linears(model).values()
    hooks = [h for m in layers for h in (m.register_forward_pre_hook(enter), m.register_forward_hook(leave))]
    shares = []
    for _ in range(rounds):
        spent[0] = 0.0
        begin = time.perf_counter()
        run()
        shares.append(spent[0] / (time.perf_counter() - begin))
    for hook in hooks:
        hook.remove()
    return statistics.median(shares)


def compare(
    name: str, dense: nn.Module, model: nn.Module, cost: float, call: Callable[[nn.Module], Any], seconds: float
) -> dict[str, Any]:
    call(dense), call(model)
    dense_time, time_now = in_turns([lambda: call(dense), lambda: call(model)], seconds, least=3)
    share = share_of_layers(dense, lambda: call(dense))
    amdahl = 1 - share + cost * share
    return {
        "model": name, "cost": cost, "dense_ms": round(dense_time * 1e3, 2), "hardened_ms": round(time_now * 1e3, 2),
        "share_of_layers": round(share, 3), "ratio": round(time_now / dense_time, 4),
        "amdahl_ratio": round(amdahl, 4), "over_amdahl": round(time_now / dense_time / amdahl, 3),
    }  # fmt: skip


def compare_vit(seconds: float) -> list[dict[str, Any]]:
    dense, cost = vit_base(), 0.3
    model, packed = hardened(dense, cost, torch.randn(1, 3, 224, 224))
    rows = []
    for batch in (1, 8):
        images = torch.randn(batch, 3, 224, 224)
        row = compare(f"ViT-Base, batch {batch}", dense, model, cost, lambda m: m(images), seconds)  # noqa: B023
        rows.append(row | {"packed_share": round(packed, 3)})
    return rows


def compare_decoding(seconds: float, tokens: int) -> dict[str, Any]:
    dense, cost = smollm2(), 0.4
    prompt = torch.randint(0, 49152, (1, 8), generator=torch.Generator().manual_seed(0))
    model, packed = hardened(dense, cost, prompt[:, :1])
    options = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}

    def decode(m: Any) -> Any:
        return m.generate(prompt, attention_mask=torch.ones_like(prompt), **options)

    row = compare("SmolLM2-135M, greedy decoding", dense, model, cost, decode, seconds)
    speeds = {"dense_tokens_per_second": "dense_ms", "tokens_per_second": "hardened_ms"}
    return (
        row
        | {name: round(1e3 * tokens / row[key], 2) for name, key in speeds.items()}
        | {"packed_share": round(packed, 3)}
    )

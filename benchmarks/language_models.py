"""Models for bench_language.py: SmolLM2-135M with random structured layers of a given cost, and what is timed of them.

Weights are random, since time does not depend on them; so are widths and places of blocks.
"""

import copy
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from cpu_cases import Case, random_packed
from cpu_models import linears
from torch import Tensor, nn

import gblr
from gblr.conversion.planner import fastest, measure_forms, record_inputs
from gblr.experiments.structures import Shape, monarch_costs
from gblr.fitting.config import Config
from gblr.layers.structured import StructuredLinear
from gblr.matrices.base import StructuredMatrix

BLOCK_RANKS = {"gblr-1": 1, "gblr-16": 16}
_MULTIPLE = 8  # ranks that matrix units like: others make GPUs take slower kernels
CONFIGS: dict[str, Callable[[float], Config]] = {  # without steps: the sizes are what counts
    "low-rank": gblr.LowRankConfig,
    "low-rank-8": partial(gblr.LowRankConfig, rank_multiple=_MULTIPLE),
    "monarch": partial(gblr.MonarchConfig, steps=0),
    "blast": partial(gblr.BlastConfig, steps=0),
    "blast-8": partial(gblr.BlastConfig, steps=0),
}
METHODS = (*CONFIGS, *BLOCK_RANKS)


@dataclass(frozen=True)
class Variant:
    method: str
    cost: float  # asked
    relative_cost: float  # reached
    model: Any


def variant(dense: nn.Module, method: str, cost: float) -> Variant:
    """A copy with structured layers in the places of all attention and MLP matrices; everything else is shared."""
    layers = linears(dense)
    model = copy.deepcopy(dense, {id(parameter): parameter for parameter in dense.parameters()})
    found = matrices(method, cost, {name: shape_of(layer) for name, layer in layers.items()})
    for name, layer in layers.items():
        matrix = found[name].to(layer.weight.dtype).to(layer.weight.device)
        model.set_submodule(name, StructuredLinear(matrix, layer.bias))
    spent = sum(matrix.num_mults for matrix in found.values())
    return Variant(method, cost, spent / sum(layer.weight.numel() for layer in layers.values()), model)


def shape_of(layer: nn.Linear) -> Shape:
    return layer.out_features, layer.in_features


def matrices(method: str, cost: float, shapes: dict[str, Shape]) -> dict[str, StructuredMatrix]:
    """By the names of their layers."""
    if method in BLOCK_RANKS:
        cases = {name: Case(*shape, cost, BLOCK_RANKS[method]) for name, shape in shapes.items()}
        return {name: random_packed(case, seed) for seed, (name, case) in enumerate(cases.items())}
    fitted = fits(method, cost, Counter(shapes.values()))
    return {name: fitted[shape] for name, shape in shapes.items()}


def fits(method: str, cost: float, shapes: Counter[Shape]) -> dict[Shape, StructuredMatrix]:
    """One for each shape: the largest of its kind within the cost, as `gblr reproduce smollm2-wikitext` has them."""
    costs = dict.fromkeys(shapes, cost)
    if method == "monarch":
        costs = monarch_costs({shape: count * math.prod(shape) for shape, count in shapes.items()}, cost)
    generator = torch.Generator().manual_seed(0)
    found = {
        shape: gblr.fit(torch.randn(shape, generator=generator), CONFIGS[method](share))
        for shape, share in costs.items()
    }
    return {shape: trimmed(matrix) for shape, matrix in found.items()} if method == "blast-8" else found


def trimmed(matrix: Any) -> gblr.BlastMatrix:
    rank = matrix.rank // _MULTIPLE * _MULTIPLE or matrix.rank
    return gblr.BlastMatrix(*(side[..., :rank] for side in (matrix.u, matrix.v, matrix.s)))


def size_bytes(model: nn.Module) -> int:
    """In bfloat16. Widths and locations take two bytes each, too, as checkpoints store them."""
    stored = {tensor.data_ptr(): tensor.numel() for tensor in model.state_dict().values()}
    return 2 * sum(stored.values())


def plan_like_first_block(model: Any, example: dict[str, Any], graphs: bool) -> dict[str, int]:
    """The fastest form of each layer of the first block, for that layer of all blocks; how many layers take which."""
    blocks = model.model.layers
    layers = {name: module for name, module in blocks[0].named_modules() if isinstance(module, StructuredLinear)}
    times = measure_forms(layers, record_inputs(model, layers, example), graphs)
    for block in blocks:
        for name in layers:
            layer = block.get_submodule(name)
            layer.planned = fastest(times[name])
            layer.prepare()
    return dict(Counter(block.get_submodule(name).form for block in blocks for name in layers))


# -- what is timed -----------------------------------------------------------------------------------------------------


def reading(model: Any, tokens: Tensor) -> Callable[[], Tensor]:
    """One window, all of its logits."""
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    # A name that transformers makes no mask for: while a graph is captured it would make one, and torch's fast causal
    # attention takes none.
    AttentionInterface.register("causal", sdpa_attention_forward)
    model.set_attn_implementation("causal")
    return lambda: model(tokens, use_cache=False).logits


def writing(model: Any, token: Tensor, length: int) -> Callable[[], Tensor]:
    """One token in the middle of a cache of that length, again and again at the same place."""
    model.set_attn_implementation("sdpa")
    cache, places = cache_with_places(model.config, length, token.device)

    def step() -> Tensor:
        places.fill_(length // 2)  # each layer moves its own on
        return model(token, past_key_values=cache, use_cache=True).logits

    return step


def cache_with_places(config: Any, length: int, device: torch.device) -> tuple[Any, Tensor]:
    """A static cache, and the places where its layers write next as one tensor: one call sets them all."""
    from transformers import StaticCache

    cache = StaticCache(config=config, max_cache_len=length)
    places = torch.zeros(len(cache.layers), dtype=torch.long, device=device)
    for index, layer in enumerate(cache.layers):
        layer.cumulative_length = places[index]
    return cache, places

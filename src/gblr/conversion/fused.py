"""Fused projections: which rows of one weight are q, k and v."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

_FUSED = frozenset({"qkv", "c_attn", "in_proj", "Wqkv", "query_key_value", "qkv_proj", "attn_qkv", "to_qkv"})
# classes whose rows are q, k and v of the first head (or group of heads that share keys), then of the second, and so on
_BY_HEAD = frozenset(
    {
        "BloomAttention", "DisentangledSelfAttention", "FalconAttention", "GPTBigCodeAttention",
        "GPTNeoXAttention", "GPTNeoXJapaneseAttention", "MiniMaxLightningAttention", "PersimmonAttention",
    }
)  # fmt: skip
_OWN_ORDER = frozenset({"CodeGenAttention"})  # q, v, k of each quarter of the heads
_HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "kv_heads")
_HEAD_SIZE = ("head_dim", "head_size", "attention_head_size")


def fused_sizes(model: nn.Module, name: str, out_features: int, in_features: int) -> tuple[int, ...]:
    """How many rows are those of q, k and v (of k and v in a cross attention); one size where it is not known."""
    own = name.rpartition(".")[2]
    if own not in _FUSED or not _is_of_attention(model, name):
        return (out_features,)
    heads, kv_heads, size = _heads(model, name)
    if heads and kv_heads and kv_heads != heads:
        found = size or out_features // (heads + 2 * kv_heads)
        if found * (heads + 2 * kv_heads) == out_features:
            return heads * found, kv_heads * found, kv_heads * found
    if out_features == 3 * in_features or out_features == 3 * heads * size > 0:
        return (out_features // 3,) * 3
    is_cross = own == "c_attn" and out_features == 2 * in_features
    return (in_features, in_features) if is_cross else (out_features,)


def fused_runs(model: nn.Module, name: str, sizes: Sequence[int]) -> int:
    """How often rows of q, k and v take turns: 1, or in classes that are known for it once for each head of keys."""
    if len(sizes) != 3 or _class_around(model, name) not in _BY_HEAD:
        return 1
    return sizes[1] * _heads(model, name)[0] // sizes[0]


def _is_of_attention(model: nn.Module, name: str) -> bool:
    """State space and convolution layers have an `in_proj` too, of other parts."""
    around = _class_around(model, name)
    in_attention = "att" in f"{name} {around}".lower()
    return around not in _OWN_ORDER and (in_attention or not name.endswith("in_proj"))


def _class_around(model: nn.Module, name: str) -> str:
    return type(next(_around(model, name))).__name__


def _heads(model: nn.Module, name: str) -> tuple[int, int, int]:
    """Heads of queries, heads of keys, and their size, as the nearest module around tells or its config; 0: unknown.

    Models of several towers have a config for each, and an attention may differ from what the config says of others.
    """
    for module in _around(model, name):
        places = module, getattr(module, "config", None)
        if heads := _first(places, _HEADS):
            return heads, _first(places, _KV_HEADS), _first(places, _HEAD_SIZE)
    return 0, 0, 0


def _first(places: Sequence[Any], names: Sequence[str]) -> int:
    values = (getattr(place, name, None) for place in places for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), 0)


def _around(model: nn.Module, name: str) -> Iterator[nn.Module]:
    """The modules that a layer is in, from the innermost to the model."""
    while name:
        name = name.rpartition(".")[0]
        try:
            yield model.get_submodule(name)
        except AttributeError:
            continue

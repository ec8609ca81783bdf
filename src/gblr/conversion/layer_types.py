"""What a layer is for, read off its name: q, k, v, o, fc1, fc2, gate, conv, head, or other."""

import re

from torch import nn

from gblr.layers.conv import GaudiConv2d, StructuredConv2d

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, GaudiConv2d, StructuredConv2d)

# How a name ends, first match wins: BERT, ViT, GPT-2, Llama, T5, DistilBERT, Falcon, timm, torch's own Transformer.
_ENDINGS = [
    ("qkv", r"c_attn|qkv|qkv_proj|query_key_value|Wqkv|\w*att\w*\.(self\.)?in_proj"),
    ("q", r"query|q_proj|q_lin|q_attn|to_q|q"),
    ("k", r"key|k_proj|k_lin|to_k|k"),
    ("v", r"value|v_proj|v_lin|to_v|v"),
    ("o", r"o_proj|out_proj|out_lin|to_out(\.0)?|attention\.output\.dense|\w*att\w*\.(c_proj|proj|dense|o)"),
    ("gate_up", r"gate_up_proj"),
    ("gate", r"gate_proj|wi_0"),
    ("fc1", r"fc1|c_fc|up_proj|intermediate\.dense|linear1|lin1|wi|wi_1|dense_h_to_4h|pwconv1"),
    ("fc2", r"fc2|mlp\.c_proj|down_proj|output\.dense|linear2|lin2|wo|dense_4h_to_h|pwconv2"),
    ("head", r"lm_head|head|score|fc|embed_out|classifier(\.\d+)?|predictions\.decoder"),
]
_PATTERNS = [(label, re.compile(rf"(^|.*\.)({ending})$", re.IGNORECASE)) for label, ending in _ENDINGS]
_PARTS: dict[str, dict[int, tuple[str, ...]]] = {
    "qkv": {3: ("q", "k", "v"), 2: ("k", "v")},
    "gate_up": {2: ("gate", "fc1")},
}


def layer_type(name: str, module: nn.Module, num_parts: int = 1) -> str:
    """The type of the layer `name`; of a part of a split layer ("c_attn.parts.1"), that of the part.

    >>> layer_type("encoder.layer.0.attention.output.dense", nn.Linear(2, 2))
    'o'
    >>> layer_type("h.0.attn.c_attn.parts.2", nn.Linear(2, 2), num_parts=3)
    'v'
    """
    if isinstance(module, CONVOLUTIONS):
        return "conv"
    whole, _, part = name.partition(".parts.")
    label = next((label for label, pattern in _PATTERNS if pattern.match(whole)), "other")
    of_parts = _PARTS.get(label, {}).get(num_parts)
    return of_parts[int(part)] if part and of_parts else label

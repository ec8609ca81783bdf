"""What a model returned: the tensor in it that matters."""

from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor

Kind = Literal["logits", "hidden"]


def output_kind(output: Any) -> Kind:
    """Logits where the output has them by name; a plain tensor may be anything."""
    return "logits" if getattr(output, "logits", None) is not None else "hidden"


def output_tensor(output: Any, kind: str) -> Tensor:
    """The tensor of that kind in what a model returned."""
    if isinstance(output, Tensor):
        return output
    names = ("logits",) if kind == "logits" else ("last_hidden_state", "hidden_states", "logits")
    for name in names:
        value = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
        value = value[-1] if isinstance(value, (tuple, list)) and value else value
        if isinstance(value, Tensor):
            return value
    if isinstance(output, (tuple, list)) and output and isinstance(output[0], Tensor):
        return output[0]
    raise ValueError(f"the model's output, a {type(output).__name__}, has no {' or '.join(names)} to match.")

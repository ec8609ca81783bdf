"""What a model returned: the tensor in it that matters."""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

Kind = Literal["logits", "hidden"]


def output_kind(output: Any) -> Kind:
    """Logits where the output has scores of several classes by name; a plain tensor may be anything, and the only
    score of a regression or of a reranker is no class to choose.
    """
    scores = _named_scores(output)
    return "hidden" if scores is None or scores.shape[-1] == 1 else "logits"


def output_tensor(output: Any, kind: str) -> Tensor:
    """The tensor of that kind in what a model returned."""
    if isinstance(output, Tensor):
        return output
    if kind == "logits" and (scores := _named_scores(output)) is not None:
        return scores
    names = ("logits",) if kind == "logits" else ("last_hidden_state", "hidden_states", "logits")
    for name in names:
        value = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
        value = value[-1] if isinstance(value, (tuple, list)) and value else value
        if isinstance(value, Tensor):
            return value
    values = output.values() if isinstance(output, Mapping) else output if isinstance(output, (tuple, list)) else ()
    for value in values:  # by another name, such as CLIP's `logits_per_image`
        if isinstance(value, Tensor) and value.is_floating_point() and value.dim():  # none of them is a loss
            return value
    raise ValueError(f"the model's output, a {type(output).__name__}, has no {' or '.join(names)} to match.")


def _named_scores(output: Any) -> Tensor | None:
    """Those of classes; or of the places where an answer may start, and where it may end."""
    if isinstance(scores := getattr(output, "logits", None), Tensor):
        return scores
    ends = [getattr(output, f"{name}_logits", None) for name in ("start", "end")]
    return torch.stack(ends, dim=-2) if all(isinstance(end, Tensor) for end in ends) else None  # type: ignore[arg-type]

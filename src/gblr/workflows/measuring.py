"""In what precision a model runs while its fit is prepared: calibration, sensitivity, and the runs of a refit."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

PRECISIONS = ("float32", "bfloat16")


def measuring(precision: str, device: torch.device | str) -> AbstractContextManager[Any]:
    """Around `convert_` and `heal_`: the model's products in that precision, sums and fits in float32 as ever."""
    if precision == "float32":
        return nullcontext()
    return torch.autocast(torch.device(device).type, torch.bfloat16)


def note_on(precision: str, device: torch.device | str) -> str:
    """A line for the user where bfloat16 gains nothing on this machine."""
    if precision == "float32" or torch.device(device).type != "cpu":
        return ""
    known: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    if not known or known.get("avx512_bf16") or known.get("amx_bf16") or known.get("bf16"):
        return ""
    return "note: this CPU has no instructions for bfloat16, so --precision bfloat16 will not be faster on it"

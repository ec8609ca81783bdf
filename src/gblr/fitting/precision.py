"""Fits and sums compute as precisely as their tensors are, and where these are: neither autocast, TF32 nor a default
device reaches them.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from gblr.ops.host import on_host

_DEVICES = ("cpu", "cuda", "xpu", "mps")


@contextmanager
def full_precision() -> Iterator[None]:
    """Products of float32 in float32, wherever the caller allows less of a model: in an autocast region, or after
    `torch.set_float32_matmul_precision("high")`. Tensors that name no device are made on the CPU.

    >>> x = torch.ones(2, 2)
    >>> with torch.autocast("cpu", torch.bfloat16), full_precision():
    ...     (x @ x).dtype
    torch.float32
    """
    with ExitStack() as stack:
        stack.enter_context(on_host())
        for device in _DEVICES:
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        for backend, name, exact in _settings():
            before = getattr(backend, name)
            if before not in ("none", exact):  # "none": nobody has asked for less
                setattr(backend, name, exact)
                stack.callback(setattr, backend, name, before)
        yield


def _settings() -> list[tuple[Any, str, Any]]:
    """How torch names the precision of float32 products. Its older and newer names must not be mixed."""
    cuda, mkldnn = torch.backends.cuda.matmul, torch.backends.mkldnn
    if hasattr(mkldnn, "matmul"):
        return [(cuda, "fp32_precision", "ieee"), (mkldnn.matmul, "fp32_precision", "ieee")]
    return [(cuda, "allow_tf32", False)]

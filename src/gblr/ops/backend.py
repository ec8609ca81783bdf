"""Which implementation of an op can run here."""

import functools
import importlib
import importlib.metadata
import warnings
from types import ModuleType

import torch


@functools.cache
def triton_module(name: str) -> ModuleType | None:
    """The module of Triton kernels of that name, imported at first use; None where it cannot be, which is said once."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        warnings.warn(f"{name} cannot be used ({error}); plain torch does its work, more slowly.", stacklevel=2)
        return None


def triton_state() -> str:
    """Which kernels a GPU would run, or why none."""
    if not torch.cuda.is_available():
        return "none: torch finds no CUDA device"
    try:
        return f"Triton {importlib.metadata.version('triton')}"
    except importlib.metadata.PackageNotFoundError:
        return "none: triton is not installed"

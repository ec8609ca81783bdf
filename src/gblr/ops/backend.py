"""Which implementation of an op can run here, and why not."""

import functools
import importlib
from types import ModuleType


@functools.cache
def _imported(name: str) -> ModuleType | str:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        return str(error)


def triton_module(name: str) -> ModuleType | None:
    """The module of Triton kernels of that name, imported at first use; None where Triton is not installed."""
    module = _imported(name)
    return module if isinstance(module, ModuleType) else None


def reason_against_triton(name: str) -> str | None:
    """None if its kernels can be used; else why not."""
    module = _imported(name)
    return module if isinstance(module, str) else None

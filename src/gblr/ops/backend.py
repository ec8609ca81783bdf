"""Which implementation of an op can run here."""

import functools
import importlib
import warnings
from types import ModuleType


@functools.cache
def triton_module(name: str) -> ModuleType | None:
    """The module of Triton kernels of that name, imported at first use; None where it cannot be, which is said once."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        warnings.warn(f"{name} cannot be used ({error}); plain torch does its work, more slowly.", stacklevel=2)
        return None

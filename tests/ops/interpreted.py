"""Triton kernels as the interpreter runs them."""

import importlib.util
from pathlib import Path
from types import ModuleType

import gblr


def interpreted_kernels(op: str) -> ModuleType:
    """`ops/<op>/triton.py` without the shape checks that tests put around everything in gblr: Triton reads source."""
    file = Path(gblr.__file__).parent / "ops" / op / "triton.py"
    spec = importlib.util.spec_from_file_location(f"interpreted_{op}", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

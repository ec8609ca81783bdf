"""Finds the compiled CPU kernels: one library per instruction set, the best that this processor runs.

The variable GBLR_CPU_KERNELS (avx512, avx2 or none) overrides the choice.
"""

import ctypes
import functools
import os
import platform
import warnings
from pathlib import Path

import torch

ABI = 2  # raised with every change to a C function; a library built before it is not used
_CHOICES = {"AVX512": ("avx512", "avx2"), "AVX2": ("avx2",)}


def cpu_library() -> ctypes.CDLL | None:
    """The library, or None; the first time that it is None, a warning says why."""
    library, reason = _load()
    if library is None:
        _warn_once(reason)
    return library


def cpu_kernels() -> str:
    """The name of the kernels at work ("avx512", "avx2"), or why there are none."""
    library, text = _load()
    return text if library is not None else f"none: {text}"


@functools.cache
def _load() -> tuple[ctypes.CDLL | None, str]:
    wanted = os.environ.get("GBLR_CPU_KERNELS", "")
    if wanted == "none":
        return None, "switched off by GBLR_CPU_KERNELS=none"
    if wanted not in ("", "avx2", "avx512"):
        raise ValueError(f"GBLR_CPU_KERNELS must be avx512, avx2 or none; got {wanted!r}.")
    able = _CHOICES.get(torch.backends.cpu.get_cpu_capability(), ())
    if not able:
        return None, f"this processor ({platform.machine()}) has neither AVX2 nor AVX-512"
    names = [name for name in able if wanted in ("", name)]
    if not names:
        return None, f"GBLR_CPU_KERNELS={wanted}, but this processor has no {wanted}"
    reason = ""
    for name in names:
        library, reason = _open(name)
        if library is not None:
            return library, name
    return None, reason


def _open(name: str) -> tuple[ctypes.CDLL | None, str]:
    files = sorted(Path(__file__).parent.glob(f"cpu_{name}.*"))
    files = [file for file in files if file.suffix in (".so", ".pyd", ".dylib")]
    if not files:
        return None, (
            "they were not built when gblr was installed; install it again where a C++ compiler with OpenMP is at hand "
            "(`pip install -v` shows what the compiler says)"
        )
    try:
        library = ctypes.CDLL(str(files[0]))
    except OSError as error:
        return None, f"{files[0].name} cannot be loaded ({error})"
    abi = library.gblr_abi()
    if abi != ABI:
        return None, f"{files[0].name} is of another version of gblr (ABI {abi}, not {ABI}); install gblr again"
    return library, name


@functools.cache
def _warn_once(reason: str) -> None:
    warnings.warn(
        f"gblr runs without its compiled CPU kernels: {reason}. Plain torch does their work, more slowly.", stacklevel=4
    )

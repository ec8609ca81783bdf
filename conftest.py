"""Settings for the tests and for the doctests of src/: shapes are enforced, and examples need not import."""

import os
import sys

# Kernels for GPUs run in Triton's interpreter here, unless tests for GPUs are asked for; it must know before the first
# import of triton.
os.environ.setdefault("TRITON_INTERPRET", "0" if "gpu" in sys.argv else "1")

import pytest
import torch
from tests import shape_hook

# Here and not by --jaxtyping-packages, because plain beartype refuses some of our hints (see tests/shape_hook.py).
# It has to stand before the first import of gblr.
shape_hook.install("gblr")

import gblr  # noqa: E402


def pytest_report_header() -> str:
    return "shapes of arguments are " + ("checked" if shape_hook.CHECKED else "NOT checked: beartype is not installed")


@pytest.fixture(autouse=True)
def examples_know_torch_and_gblr(doctest_namespace):
    doctest_namespace.update(torch=torch, gblr=gblr)

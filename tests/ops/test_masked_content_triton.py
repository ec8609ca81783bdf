"""The GPU kernels of masked_content without a GPU: run by Triton's interpreter, and compiled for Hopper."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gblr.ops.masked_content import reference
from gblr.ops.step import step_table
from tests.ops.interpreted import interpreted_kernels

pytest.importorskip("triton")


@pytest.fixture(scope="module")
def interpreted():
    return interpreted_kernels("masked_content")


def inputs(blocks, block_rank, length, sigma, dtype, generator):
    content, grad = (torch.randn(blocks, block_rank, length, generator=generator).to(dtype) for _ in range(2))
    width = torch.randint(0, length + 1, (blocks,), generator=generator).float()
    location = torch.randint(-2 * length, 3 * length, (blocks,), generator=generator).float()
    width[:3] = torch.tensor([0.0, length, 1.0])[: len(width)]  # dead, full, a single element
    return grad, content, width, location, step_table(length, sigma, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("sigma", [1.0, 20.0, math.inf])
@pytest.mark.parametrize(
    ("blocks", "block_rank", "length"), [(1, 1, 1), (5, 1, 63), (4, 3, 100), (3, 2, 1500), (0, 2, 8)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernels_agree_with_the_definition(
    interpreted, unwritten_is_nan, blocks, block_rank, length, sigma, dtype, generator
):
    grad, *rest = inputs(blocks, block_rank, length, sigma, dtype, generator)
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    torch.testing.assert_close(interpreted.forward(*rest), reference.forward(*rest), **close)
    for needs in ((True, True), (True, False), (False, True)):
        found, expected = (module.backward(grad, *rest, *needs) for module in (interpreted, reference))
        for got, want in zip(found, expected, strict=True):
            scale = max(1.0, float(want.abs().max())) if want.numel() else 1.0
            torch.testing.assert_close(got / scale, want / scale, **close)


def test_the_result_may_have_the_dtype_of_the_product_that_follows(interpreted, unwritten_is_nan, generator):
    grad, *rest = inputs(5, 2, 100, 4.0, torch.float32, generator)
    found = interpreted.forward(*rest, torch.float16)
    assert found.dtype == torch.float16 and torch.equal(found, reference.forward(*rest).half())
    exact = interpreted.backward(grad.half().float(), *rest, True, True)
    for got, want in zip(interpreted.backward(grad.half(), *rest, True, True), exact, strict=True):
        assert got.dtype == torch.float32 and torch.equal(got, want)


FAR = [2.0**24 - 1, 1 - 2.0**24, 63 * 2.0**20, -63 * 2.0**20, 2.0**30, -(2.0**31), -0.0]


@pytest.mark.parametrize("location", FAR)
def test_locations_far_from_the_axis_lead_to_the_same_masks(interpreted, location):
    rest = [torch.tensor([20.0]), torch.tensor([location]), step_table(63, 3.0, torch.float32, torch.device("cpu"))]
    content = torch.ones(1, 1, 63)
    found = interpreted.forward(content, *rest)
    rest[1] = torch.tensor([location % 63])
    assert torch.equal(found, reference.forward(content, *rest))


@pytest.mark.parametrize("location", [math.nan, math.inf, -math.inf, 1e30])
def test_locations_that_mean_nothing_do_not_lead_out_of_the_table(interpreted, location):
    length, table = 63, step_table(63, 3.0, torch.float32, torch.device("cpu"))
    found = interpreted.forward(torch.ones(1, 1, length), torch.tensor([20.0]), torch.tensor([location]), table)
    locations = torch.arange(length).float()
    masks = reference.forward(torch.ones(length, 1, length), torch.full((length,), 20.0), locations, table)
    assert any(torch.equal(found[0], mask) for mask in masks)


def test_strided_contents_and_gradients_are_read_correctly(interpreted, generator):
    grad, content, *rest = inputs(4, 2, 33, 3.0, torch.float32, generator)
    strided = [t.transpose(0, 2).contiguous().transpose(0, 2) for t in (grad, content)]
    torch.testing.assert_close(interpreted.forward(strided[1], *rest), reference.forward(content, *rest))
    for got, want in zip(
        interpreted.backward(*strided, *rest, True, True),
        reference.backward(grad, content, *rest, True, True),
        strict=True,
    ):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_the_kernels_compile_for_hopper():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compile_for_hopper.py")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("compiled") == 17

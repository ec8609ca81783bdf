"""What the CPU tests cannot see: the same numbers on a CUDA device. Run with `pytest -m gpu`."""

import math

import pytest
import torch

import gblr
from gblr.ops.elements import elements

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("sigma", [1.0, 10.0, math.inf])
@pytest.mark.parametrize("whole", [True, False])
def test_masks_and_their_gradients_agree_with_the_cpu(sigma, whole):
    torch.manual_seed(0)
    n, k = 96, 20
    width, location = torch.rand(k, dtype=torch.float64) * n, torch.rand(k, dtype=torch.float64) * n
    if whole:
        width, location = width.round(), location.round()
    upstream = torch.randn(k, n, dtype=torch.float64)
    found = []
    for device in ("cpu", "cuda"):
        w, l = (t.to(device).clone().requires_grad_() for t in (width, location))
        mask = gblr.gaudi_mask(w, l, sigma, n)
        grads = torch.autograd.grad(mask, (w, l), upstream.to(device))
        found.append([t.cpu() for t in (mask, *grads)])
    for on_cpu, on_gpu in zip(*found, strict=True):
        torch.testing.assert_close(on_gpu, on_cpu, rtol=0, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gaudi_layer_trains_on_the_gpu_as_on_the_cpu(dtype):
    torch.manual_seed(0)
    layer = gblr.GaudiLinear(64, 48, block_rank=2, dtype=dtype)
    layer.set_sigma(5.0)
    x = torch.randn(10, 64, dtype=dtype)
    layer(x).float().square().sum().backward()
    on_cpu = {name: p.grad.float() for name, p in layer.named_parameters()}
    layer.zero_grad()
    layer.cuda()
    layer(x.cuda()).float().square().sum().backward()
    tolerance = 1e-4 if dtype == torch.float32 else 5e-2
    for name, p in layer.named_parameters():
        scale = on_cpu[name].abs().max()
        assert (p.grad.float().cpu() - on_cpu[name]).abs().max() <= tolerance * scale, name


@pytest.mark.parametrize(
    ("axes", "align"), [((8, 8), 1), ((1, 1), 1), ((100, 63), 8), ((96, 1536), 16), ((7, 100), 12)]
)
@pytest.mark.parametrize("num", [1, 300, 1000])
def test_structure_is_rounded_as_on_the_cpu(axes, align, num):
    torch.manual_seed(0)
    width, location = (1.2 * torch.rand(2, num) - 0.1 for _ in range(2))
    width[:, :40] = torch.arange(40)[:num] / 32  # halves between two elements, too
    upstream = torch.randn(4, num)
    found = []
    for device in ("cpu", "cuda"):
        sides = [side.to(device).clone().requires_grad_() for side in (width, location)]
        out = elements(*sides, axes, align)
        found.append((*out, *torch.autograd.grad(out, sides, tuple(upstream.to(device)))))
    for on_cpu, on_gpu in zip(*found, strict=True):
        assert torch.equal(on_gpu.cpu(), on_cpu)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("block_rank", [1, 4])
def test_a_fit_on_the_gpu_keeps_its_guarantee(weighted, block_rank):
    torch.manual_seed(0)
    weight, x = torch.randn(48, 64).cuda(), torch.randn(200, 64).cuda() @ torch.randn(64, 64).cuda()
    gram = x.T @ x if weighted else None
    config = gblr.GaudiConfig(0.4, block_rank=block_rank, steps=4)
    matrix = gblr.fit(weight, config, gram)
    low_rank = gblr.fit(weight, gblr.LowRankConfig(matrix.relative_cost), gram)
    inputs = x if weighted else torch.eye(64, device="cuda")
    errors = [((weight - m.to_dense()) @ inputs.T).norm() for m in (matrix, low_rank)]
    assert matrix.u.is_cuda
    assert matrix.relative_cost <= 0.4
    assert errors[0] <= errors[1] * 1.01

"""Random packed matrices for the tests of kernels, and how far from the exact product a kernel may be."""

import math

import torch
from torch import Tensor

from gblr.matrices.packed import PackedGBLR
from gblr.matrices.structure import Structure
from gblr.ops.block_matmul import pack_blocks, plan_blocks

STYLES = ("random", "narrow", "full", "identical", "dead", "far")
TOKENS = (0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 47, 48, 49, 64, 65, 97, 200)


def random_packed(
    out_features: int,
    in_features: int,
    num_blocks: int,
    block_rank: int = 1,
    *,
    style: str = "random",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> PackedGBLR:
    """Blocks of any widths anywhere, also wrapped around; random ones have a dead, a full and a tiny one first."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> Tensor:
        return torch.randint(low, high, (num_blocks,), generator=generator)

    def side(length: int) -> tuple[Tensor, Tensor]:
        width, location = draw(0, length + 1), draw(0, length)
        if style == "random":
            width[:3] = torch.tensor([0, length, 1])[:num_blocks]
        if style == "narrow":
            width = draw(0, min(length, 3) + 1)
        if style in ("full", "dead"):
            width = torch.full_like(width, length if style == "full" else 0)
        if style == "identical":
            width, location = width[:1].expand(num_blocks), location[:1].expand(num_blocks)
        if style == "far":
            location = location + length * draw(-(2**40), 2**40)
        return width, location

    structure = Structure(*side(out_features), *side(in_features))
    widths = (structure.row_width, structure.col_width)
    u, v = (torch.randn(block_rank * int(w.sum()), generator=generator).to(dtype) for w in widths)
    return PackedGBLR(structure, u, v, block_rank, (out_features, in_features))


def plan_of(matrix: PackedGBLR) -> Tensor:
    s = matrix.structure
    sides = (s.row_width, s.row_location, s.col_width, s.col_location)
    return plan_blocks(*sides, matrix.block_rank, matrix.shape)


def values_of(matrix: PackedGBLR, plan: Tensor) -> Tensor:
    return pack_blocks(matrix.u, matrix.v, plan)


def assert_is_product(y: Tensor, matrix: PackedGBLR, x: Tensor, bias: Tensor | None = None) -> None:
    """W x + bias, judged by dense float64.

    Sums may round in float32, relative to the sizes of their terms; bfloat16 rounds once more, at the end, and nowhere
    else.
    """
    exact, x = matrix.to(torch.float64), x.double()
    expected = torch.nn.functional.linear(x, exact.to_dense(), None if bias is None else bias.double())
    u, v = (factor.abs() for factor in exact.factors())
    allowed = 2e-6 * (x.abs() @ v.T @ u + (0 if bias is None else bias.double().abs()))
    if y.dtype == torch.bfloat16:
        allowed = allowed + 2.0**-8 * expected.abs()
    assert y.shape == expected.shape and y.dtype == matrix.u.dtype
    wrong = ~((y.double() - expected).abs() <= allowed)  # NaN is wrong too
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()} outputs, first at {wrong.nonzero()[0].tolist()}"


ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def assert_is_tiled_product(y: Tensor, matrix: PackedGBLR, x: Tensor, bias: Tensor | None) -> None:
    """As above for GPU kernels, whose half-precision types round z = V x too."""
    exact = matrix.to(torch.float64)
    expected = torch.nn.functional.linear(x.double(), exact.to_dense(), None if bias is None else bias.double())
    u, v = (factor.abs() for factor in exact.factors())
    size = x.double().abs() @ v.T @ u + (0 if bias is None else bias.double().abs())
    wrong = ~((y.double() - expected).abs() <= 2 * ROUNDING[y.dtype] * size)  # NaN is wrong too
    assert y.shape == expected.shape and not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()} outputs"


def poison_new_empty(monkeypatch) -> None:
    """An output that a kernel forgets shows as NaN."""
    new_empty = torch.Tensor.new_empty

    def poisoned(*args, **kwargs):
        made = new_empty(*args, **kwargs)
        return made.fill_(math.nan) if made.is_floating_point() else made

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)

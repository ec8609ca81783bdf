"""y = W x + bias from packed blocks (paper Section 3.1, "Efficiency"): time falls with the number of multiplications.

`plan_blocks` lays blocks out for the kernels, once per structure; `pack_blocks` puts contents into that layout;
`block_matmul` multiplies. CPU only so far, float32 and bfloat16.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from gblr.ops.block_matmul import cpu, library  # noqa: F401 (library registers the operators)
from gblr.ops.checks import is_plain_eager

available = cpu.available
DTYPES = tuple(cpu.BYTES)


def plan_blocks(
    row_width: Tensor, row_location: Tensor, col_width: Tensor, col_location: Tensor, block_rank: int,
    shape: tuple[int, int],
) -> Int[Tensor, " plan"]:  # fmt: skip
    """How the kernels keep these blocks: groups of columns, tiles of rows; one int32 tensor, without contents."""
    rows, cols = (max(1, length) for length in shape)
    sides = row_width.long(), row_location.long() % rows, col_width.long(), col_location.long() % cols
    return cpu.make_plan(torch.stack(sides, 1), block_rank, shape)


def pack_blocks(u: Float[Tensor, " row_total"], v: Float[Tensor, " col_total"], plan: Tensor) -> Float[Tensor, " n"]:
    """Cropped contents, as `PackedGBLR` has them, in the order of the plan; differentiable."""
    return torch.ops.gblr.pack_blocks(u, v, plan, cpu.num_values(plan))


def block_matmul(
    x: Float[Tensor, "*b in"],
    values: Float[Tensor, " values"],
    plan: Int[Tensor, " plan"],
    bias: Float[Tensor, " out"] | None,
    out_features: int,
    num_lines: int,
) -> Float[Tensor, "*b out"]:
    """W x + bias; `num_lines` is num_blocks * block_rank. Differentiable in x, values and bias."""
    if _nobody_watches(x, values, bias):
        return cpu.block_matmul(x, values, plan, bias, out_features, num_lines)
    return torch.ops.gblr.block_matmul(x, values, plan, bias, out_features, num_lines)


def _nobody_watches(x: Tensor, values: Tensor, bias: Tensor | None) -> bool:
    """Plain inference: the dispatch of the operator would take 4 to 11 us (docs/dev/kernels.md), as long as the product
    of a small layer.
    """
    if type(x) is not Tensor or x.device.type != "cpu" or not is_plain_eager():
        return False
    if not torch.is_grad_enabled():
        return True
    return not (x.requires_grad or values.requires_grad or (bias is not None and bias.requires_grad))

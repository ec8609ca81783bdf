"""The paper's refinement (Eq. 13): AdamW on contents, widths and locations under Gaudi masks, widths projected on the
budget.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from gblr.fitting.blocks import Blocks
from gblr.fitting.descent import refit
from gblr.fitting.metric import Metric
from gblr.fitting.spend import element_worth, trim, widen
from gblr.fitting.threads import Tick
from gblr.ops.masked_content import masked_content
from gblr.ops.masks import round_ste
from gblr.ops.prox import soft_shrink

_STRUCTURE_LR = (2.5e-2, 2.5e-4)  # of the axis, first and last: ten times the paper's, as in the authors' code
_CONTENT_LR = 0.05  # of the contents' own size
_SHARP = 0.9  # from this share of the steps on there is no smoothing, so that rounding changes nothing


def refine_by_gradient(
    weight: Float[Tensor, "b out in"],
    metric: Metric,
    blocks: Blocks,
    budget: Float[Tensor, " b"],
    steps: int,
    align: int,
    tick: Tick,
) -> Blocks:
    """Of each matrix the better: what the steps end with, or the start, trimmed to the budget and refitted alike."""
    axes = weight.shape[1:]
    scale = (metric.times(weight) * weight).sum((1, 2))
    scale = torch.where(scale > 0, scale, 1.0)
    width = torch.stack([blocks.row_size / axes[0], blocks.col_size / axes[1]], 1).to(weight.dtype).requires_grad_()
    location = (
        torch.stack([blocks.row_start / axes[0], blocks.col_start / axes[1]], 1).to(weight.dtype).requires_grad_()
    )
    u, v = (_wake_dead(content).requires_grad_() for content in (blocks.u, blocks.v))
    content_lr = _CONTENT_LR * float(u.detach().square().mean().sqrt())
    optimizer = torch.optim.AdamW(
        [
            {"params": [u, v], "lr": content_lr, "weight_decay": 0.0},
            {"params": [width, location], "lr": _STRUCTURE_LR[0], "betas": (0.0, 0.999), "weight_decay": 0.0},
        ]
    )
    price = blocks.block_rank * torch.tensor(axes, dtype=weight.dtype, device=weight.device).view(1, 2, 1)  # per width
    for step in range(steps):
        part = step / max(1, steps - 1)
        cosine = (1 + math.cos(math.pi * part)) / 2
        optimizer.param_groups[0]["lr"] = content_lr * max(cosine, 1e-3)
        optimizer.param_groups[1]["lr"] = _STRUCTURE_LR[1] + (_STRUCTURE_LR[0] - _STRUCTURE_LR[1]) * cosine
        last_sigma = max(axes) / 4
        sigma = math.inf if part >= _SHARP else last_sigma ** (part / _SHARP)  # 1 to length / 4, geometrically
        error = weight - _product(u, v, width, location, sigma, align)
        optimizer.zero_grad()
        ((metric.times(error) * error).sum((1, 2)) / scale).sum().backward()
        optimizer.step()
        with torch.no_grad():
            width.copy_(project(width, price, budget))
            location.remainder_(1.0)
        tick()
    with torch.no_grad():
        sizes = [round_ste(width[:, i] * axes[i], align, axes[i]).long() for i in range(2)]
        starts = [round_ste(location[:, i] * axes[i], align, axes[i]).long() % axes[i] for i in range(2)]
        result = Blocks(u.detach(), v.detach(), starts[0], sizes[0], starts[1], sizes[1]).masked()
        cut = [refit(weight, metric, trim(b, element_worth(b, metric), budget, align), 1) for b in (result, blocks)]
        ends = [refit(weight, metric, widen(weight, metric, b, budget, align), 2) for b in cut]
        error, start_error = ((metric.times(e) * e).sum((1, 2)) for e in (weight - b.product() for b in ends))
        return ends[0].where(error <= start_error, ends[1])


def project(
    width: Float[Tensor, "b 2 k"], price: Float[Tensor, "1 2 1"], budget: Float[Tensor, " b"]
) -> Float[Tensor, "b 2 k"]:
    """Soft-shrinks all widths of a matrix by the one threshold at which they cost `budget`; widths end in [0, 1]."""
    width = width.clamp(0, 1)
    low, high = torch.zeros_like(budget), torch.ones_like(budget)
    for _ in range(24):
        middle = (low + high) / 2
        over = (soft_shrink(width, middle[:, None, None].to(width)) * price).sum((1, 2)) > budget
        low, high = torch.where(over, middle, low), torch.where(over, high, middle)
    fits = (width * price).sum((1, 2)) <= budget
    return soft_shrink(width, torch.where(fits, 0.0, high)[:, None, None].to(width))


def _product(u: Tensor, v: Tensor, width: Tensor, location: Tensor, sigma: float, align: int) -> Tensor:
    factors = []
    for i, content in enumerate((u, v)):
        length = content.shape[-1]
        w, l = (round_ste(value[:, i] * length, align, length) for value in (width, location))
        factors.append(masked_content(content, w, l, sigma, whole=True).flatten(1, 2))
    return factors[0].mT @ factors[1]


def _wake_dead(content: Float[Tensor, "b k r n"]) -> Tensor:
    """Small numbers where a content is zero, so that a width has something to grow into."""
    size = content[content != 0].abs().mean() if bool((content != 0).any()) else torch.ones((), device=content.device)
    noise = torch.randn(content.shape, generator=torch.Generator().manual_seed(0)).to(content)
    return torch.where(content == 0, 0.1 * size * noise, content).detach().clone()

"""The Kullback-Leibler divergence of scores, in the memory that the scores themselves take."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

_AT_ONCE = 1 << 26  # scores; of a vocabulary of 49,152 words, 1,365 positions


def divergence(
    found: Float[Tensor, "*b classes"],
    aimed: Float[Tensor, "*b classes"],
    temperature: float = 1.0,
    weight: Float[Tensor, "*b"] | None = None,
) -> Float[Tensor, ""]:
    """Kullback-Leibler divergence of scores softened by `temperature`, mean over samples, times temperature^2, so that
    its gradients keep their size (Hinton et al., 2015). Gradients reach `found` alone.

    Logits of a language model take gigabytes, and the plain formula holds eight copies of them in float32. Here a few
    rows at a time are brought to float32, and what is kept for the way back has the type of `found`.
    """
    found, aimed = (scores.reshape(-1, scores.shape[-1]) for scores in (found, aimed.detach()))
    weight = torch.ones(len(found), device=found.device) if weight is None else weight.detach().float().flatten()
    each: Tensor = _Divergence.apply(found, aimed, temperature)
    return temperature**2 * (each * weight).sum() / weight.sum()


class _Divergence(torch.autograd.Function):
    """Of each row."""

    @staticmethod
    def forward(
        ctx: Any,
        found: Float[Tensor, "rows classes"],
        aimed: Float[Tensor, "rows classes"],
        temperature: float,
    ) -> Float[Tensor, " rows"]:
        size = max(1, _AT_ONCE // found.shape[-1])
        slopes = torch.empty_like(found) if ctx.needs_input_grad[0] else None
        each = []
        for begin in range(0, len(found), size):
            rows = slice(begin, begin + size)
            ours, theirs = ((scores[rows].float() / temperature).log_softmax(-1) for scores in (found, aimed))
            shares = theirs.exp()
            missing = torch.where(shares > 0, theirs - ours, 0.0)  # a class that is ruled out, by -inf, counts nothing
            each.append((shares * missing).sum(-1))
            if slopes is not None:
                slopes[rows] = (ours.exp_() - shares).div_(temperature)
        ctx.save_for_backward(slopes)
        return torch.cat(each) if each else found.new_zeros(0, dtype=torch.float32)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Float[Tensor, " rows"]) -> tuple[Tensor, None, None]:
        (slopes,) = ctx.saved_tensors
        return torch.mul(slopes, upstream[:, None], out=torch.empty_like(slopes)), None, None

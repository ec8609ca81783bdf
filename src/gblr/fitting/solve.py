"""Small symmetric systems of a batch of blocks, one number each for blocks of rank 1."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from gblr.ops.backend import triton_module

_JITTER = 1e-6  # of the mean diagonal: keeps a block whose rows have become dependent solvable
_KERNELS = "gblr.ops.inverse_factor.triton"


@dataclass(frozen=True)
class Factor:
    """A Cholesky factor, lower triangular, or its inverse."""

    lower: Float[Tensor, "b r r"]
    is_inverse: bool = False

    def divide(self, x: Float[Tensor, "b r n"], transposed: bool = False) -> Float[Tensor, "b r n"]:
        """factor^-1 x, or factor^-T x; no LAPACK for rank 1, where a call costs most of it."""
        if self.is_inverse:
            return (self.lower.mT if transposed else self.lower) @ x
        if self.lower.shape[1] == 1:
            return x / self.lower
        return torch.linalg.solve_triangular(self.lower.mT if transposed else self.lower, x, upper=transposed)


def factor_of(a: Float[Tensor, "b r n"], b: Float[Tensor, "b r n"]) -> Factor:
    """Of a b^T, symmetric and positive up to rounding; in float64, as rows may be nearly dependent.

    Whether there is one is not asked, for which a GPU would have to wait: NaN in a fit makes another one the best.
    """
    if a.shape[1] == 1:
        return Factor((a * b).sum(2, keepdim=True).clamp(min=1e-30).sqrt())
    gram = a.double() @ b.double().mT
    if never_waits(a.shape[1], a.device):
        kernels = triton_module(_KERNELS)
        assert kernels is not None
        return Factor(kernels.inverse_factor(gram, _JITTER, a.dtype), is_inverse=True)
    gram = (gram + gram.mT) / 2
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    jitter = _JITTER * diagonal.mean(-1, keepdim=True).clamp(min=0) + 1e-30
    found, _ = torch.linalg.cholesky_ex(gram + torch.diag_embed(jitter.expand_as(diagonal)))
    return Factor(found.to(a.dtype))


def never_waits(block_rank: int, device: torch.device) -> bool:
    """Whether blocks of that rank are solved without waiting for the device, as a CUDA graph asks."""
    if device.type != "cuda":
        return False
    if block_rank == 1:
        return True
    kernels = triton_module(_KERNELS)
    return kernels is not None and block_rank <= kernels.MAX_SIZE

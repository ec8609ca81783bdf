"""Small symmetric systems of a batch of blocks, one number each for blocks of rank 1."""

import torch
from jaxtyping import Float
from torch import Tensor

_JITTER = 1e-6  # of the mean diagonal: keeps a block whose rows have become dependent solvable


def factor_of(a: Float[Tensor, "b r n"], b: Float[Tensor, "b r n"]) -> Float[Tensor, "b r r"]:
    """Cholesky factor of a b^T, symmetric and positive up to rounding; in float64, as rows may be nearly dependent.

    Whether there is one is not asked, for which a GPU would have to wait: NaN in a fit makes another one the best.
    """
    if a.shape[1] == 1:
        return (a * b).sum(2, keepdim=True).clamp(min=1e-30).sqrt()
    gram = a.double() @ b.double().mT
    gram = (gram + gram.mT) / 2
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    jitter = _JITTER * diagonal.mean(-1, keepdim=True).clamp(min=0) + 1e-30
    found, _ = torch.linalg.cholesky_ex(gram + torch.diag_embed(jitter.expand_as(diagonal)))
    return found.to(a.dtype)


def divide(by: Float[Tensor, "b r r"], x: Float[Tensor, "b r n"], transposed: bool = False) -> Float[Tensor, "b r n"]:
    """by^-1 x, or by^-T x, for a lower triangular factor; no LAPACK for rank 1, where a call costs most of it."""
    if by.shape[1] == 1:
        return x / by
    return torch.linalg.solve_triangular(by.mT if transposed else by, x, upper=transposed)

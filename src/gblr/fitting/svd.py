"""Truncated SVD, plain or weighted by inputs, of a batch of matrices."""

import torch
from jaxtyping import Float
from torch import Tensor


def weighted_svd(
    weight: Float[Tensor, "b out in"], gram: Float[Tensor, "b in in"] | None
) -> tuple[Float[Tensor, "b q out"], Float[Tensor, "b q"], Float[Tensor, "b q in"]]:
    """u, s, v with s descending: the first r rows of u and v are the best rank-r factors, their error^2 sum_{k>=r}
    s_k^2.

    The error is tr(E G E^T), with G = `gram` or the identity. Eigenvectors of the smaller Gram matrix in float64 are
    much faster than an SVD, on a GPU above all. With U those of W G W^T the best factors are U_r and U_r^T W: no
    inverse of G is needed. For tall matrices G = C C^T and the eigenvectors Z of C^T W^T W C give W C Z_r and Z_r^T
    C^-1.
    """
    w = weight.double()
    out_features, in_features = w.shape[-2:]
    if out_features <= in_features:
        weighted = w if gram is None else times_gram(w, gram)
        energy, u = _eigenvectors(weighted @ w.mT)
        v = u @ w
    else:
        factor = None if gram is None else torch.linalg.cholesky(gram.double())
        scaled = w if factor is None else w @ factor
        energy, z = _eigenvectors(scaled.mT @ scaled)
        u = (scaled @ z.mT).mT
        v = z if factor is None else torch.linalg.solve_triangular(factor, z, upper=False, left=False)
    return u.to(weight.dtype), energy.clamp(min=0).sqrt().to(weight.dtype), v.to(weight.dtype)


def _eigenvectors(symmetric: Float[Tensor, "b q q"]) -> tuple[Float[Tensor, "b q"], Float[Tensor, "b q q"]]:
    """Eigenvalues, largest first, and eigenvectors as rows."""
    values, vectors = torch.linalg.eigh(symmetric)
    return values.flip(-1), vectors.flip(-1).mT


def balance(u: Float[Tensor, "*k out"], v: Float[Tensor, "*k in"]) -> tuple[Tensor, Tensor]:
    """Scales each pair of rows to equal norms, keeping its product: what gradient descent likes."""
    norm_u, norm_v = u.norm(dim=-1, keepdim=True), v.norm(dim=-1, keepdim=True)
    ratio = torch.where((norm_u > 0) & (norm_v > 0), (norm_v / norm_u.clamp(min=1e-30)).sqrt(), 1.0)
    return u * ratio, v / ratio


def squared_error(error: Float[Tensor, "b out in"], gram: Float[Tensor, "b in in"] | None) -> Float[Tensor, " b"]:
    """tr(E G E^T), in float64."""
    total = torch.zeros(len(error), dtype=torch.float64, device=error.device)
    for rows in error.split(max(1, _SLICE // error.shape[-1]), dim=1):
        part = rows.double()
        total += (part.square() if gram is None else times_gram(part, gram) * part).sum((-2, -1))
    return total


_SLICE = 1 << 22  # numbers of a matrix that are float64 at once: 32 MiB


def times_gram(x: Float[Tensor, "b n in"], gram: Float[Tensor, "b in in"]) -> Float[Tensor, "b n in"]:
    """x G in float64, without all of G in float64: for a wide layer that would be the largest matrix of all."""
    columns = max(1, _SLICE // gram.shape[-1])
    if columns >= gram.shape[-1]:
        return x @ gram.double()
    return torch.cat([x @ part.double() for part in gram.split(columns, dim=-1)], dim=-1)

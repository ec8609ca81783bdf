"""`fit`: one dense weight into the format that a config names. `fit_batch` has a method for each config type."""

import functools

import torch
from jaxtyping import Float
from torch import Tensor

from gblr.fitting.allocate import Choice
from gblr.fitting.config import Config
from gblr.fitting.precision import full_precision
from gblr.fitting.threads import Tick, few_threads
from gblr.matrices.base import StructuredMatrix


@functools.singledispatch
def fit_batch(
    config: Config,
    weight: Float[Tensor, "b out in"],
    gram: Float[Tensor, "b in in"] | None,
    budget: Float[Tensor, " b"],
    tick: Tick = lambda: None,
) -> list[StructuredMatrix]:
    """Fits a batch of equal shape; matrix i costs at most `budget[i]` multiplications. `gram` can be factored as it
    is.
    """
    raise TypeError(f"no fit is known for {type(config).__name__}; register one with `fit_batch.register`.")


@functools.singledispatch
def num_ticks(config: Config) -> int:
    """How often `fit_batch` calls its `tick` for this config."""
    return 0


@functools.singledispatch
def rank_choices(config: Config, shape: tuple[int, int]) -> list[Choice]:
    """Ranks that a matrix in this format may be given, and their costs, from rank 1 on: what global budgets reckon
    with. Formats that are more than low rank are taken for that.
    """
    return [Choice(rank, rank * sum(shape)) for rank in range(1, min(shape) + 1)]


@full_precision()
def fit(
    weight: Float[Tensor, "out in"], config: Config, gram: Float[Tensor, "in in"] | None = None
) -> StructuredMatrix:
    """The matrix of the config's format that comes near `weight` at no more than `config.relative_cost`.

    `gram` is X^T X of real inputs of the layer (rows of X are input vectors): the error is then that of the outputs.
    The error is never above that of the truncated SVD, weighted alike, for a `GaudiConfig`; with blocks of a higher
    rank, of the SVD whose rank is a multiple of `block_rank`.

    >>> weight = torch.outer(torch.arange(1.0, 7.0), torch.ones(5))
    >>> matrix = fit(weight, gblr.LowRankConfig(relative_cost=0.4))
    >>> bool(torch.allclose(matrix.to_dense(), weight, atol=1e-5))
    True
    """
    check_weight(weight, gram)
    budget = torch.tensor([config.relative_cost * weight.numel()], device=weight.device)
    batch = weight.detach().to(torch.promote_types(weight.dtype, torch.float32))[None]
    grams = None if gram is None else prepare_gram(gram.detach().to(batch)[None])
    size = unusual_size(batch)
    batch = batch if size is None else batch / size[:, None, None]
    with few_threads(batch):
        (matrix,) = fit_batch(config.for_dtype(weight.dtype), batch, grams, budget)
    matrix = matrix if size is None else matrix.scale_rows(size.expand(weight.shape[0]))
    return matrix.to(weight.dtype)


_USUAL = 2.0**-24, 2.0**24  # what squares and fourth powers in float32 bear; no float16 number but 0 lies below


def unusual_size(weight: Float[Tensor, "b out in"]) -> Float[Tensor, " b"] | None:
    """Powers of two to divide weights by before a fit, whose squares would over- or underflow; None where none is
    needed.

    Usual weights are left as they are, bit for bit.
    """
    largest = torch.maximum(weight.amax((1, 2)), -weight.amin((1, 2)))
    usual = (largest == 0) | ((largest >= _USUAL[0]) & (largest <= _USUAL[1]))
    return None if bool(usual.all()) else torch.where(usual, 1.0, torch.exp2(largest.log2().floor())).to(weight)


def check_weight(weight: Tensor, gram: Tensor | None) -> None:
    if weight.dim() != 2 or not weight.is_floating_point():
        raise ValueError(
            f"`weight` must be a 2-D floating-point tensor; got {weight.dtype} of shape {tuple(weight.shape)}."
        )
    if weight.is_meta:
        raise ValueError("`weight` is on the meta device, so there is nothing to fit; load it first.")
    if not bool(weight.isfinite().all()):
        raise ValueError("`weight` must be finite; it holds NaN or infinity.")
    expected = (weight.shape[1], weight.shape[1])
    if gram is not None and tuple(gram.shape) != expected:
        raise ValueError(f"`gram` must be in_features x in_features = {expected}; got {tuple(gram.shape)}.")
    if gram is not None and not bool(gram.isfinite().all()):
        raise ValueError("`gram` must be finite; it holds NaN or infinity.")


_DAMPING = 1e-2  # of the mean diagonal: the calibration sample is finite, and a Gram matrix must be invertible
_VANISHED = 1e-33  # float32 has few digits of squares below it


def prepare_gram(gram: Float[Tensor, "b in in"]) -> Float[Tensor, "b in in"]:
    """Scaled to a mean diagonal of 1 and damped, so that it can be factored; a zero Gram (unused layer) becomes
    plain, and one of inputs so small that their squares have lost their digits.
    """
    scale = gram.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
    prepared = gram / torch.where(scale > _VANISHED, scale, torch.inf)
    prepared.diagonal(dim1=-2, dim2=-1).add_(_DAMPING)
    return prepared

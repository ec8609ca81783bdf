"""Gaudi mask times content: what a training step computes for every factor of every Gaudi layer (paper Eq. 7)."""

import torch
from jaxtyping import Float
from torch import Tensor

from gblr.ops.checks import are_whole, check_sigma, is_transformed
from gblr.ops.masked_content import library as library
from gblr.ops.masked_content import transformable
from gblr.ops.step import step_spectrum, step_table


def masked_content(
    content: Float[Tensor, "..."],
    width: Float[Tensor, "*k"],
    location: Float[Tensor, "*k"],
    sigma: float,
    *,
    whole: bool | None = None,
) -> Float[Tensor, "..."]:
    """`gaudi_mask(width, location, sigma, length) * content`, with gradients for the first three, as one autograd node.

    `content` is `(*k, length)`, or `(*k, block_rank, length)` where the rows of a block share its mask. Backward
    recomputes what it needs: only the three tensors are kept, no mask and no spectrum. Values are trusted (`width` in
    [0, length]).

    `whole=True` promises whole widths and locations, as straight-through rounding makes them: the mask is then read
    off a table. `whole=False` evaluates real ones by FFT. By default the values decide, which waits for the device.

    >>> content = torch.tensor([[10.0, 20.0, 30.0, 40.0]])
    >>> masked_content(content, torch.tensor([2.0]), torch.tensor([3.0]), sigma=torch.inf)
    tensor([[10.,  0.,  0., 40.]])
    """
    length = content.shape[-1] if content.dim() else 0
    if length < 1:
        raise ValueError(f"`content` must end with an axis of at least 1 element; got shape {tuple(content.shape)}.")
    sigma = check_sigma(sigma)
    if whole is None:
        whole = are_whole(width, location)
    dtype = table_dtype(content, width)
    build = step_table if whole else step_spectrum
    return masked_content_from(build(length, sigma, dtype, content.device), content, width, location)


def masked_content_from(
    table: Tensor, content: Tensor, width: Tensor, location: Tensor, dtype: torch.dtype | None = None
) -> Tensor:
    """`masked_content` with a ready `step_table` (whole parameters) or `step_spectrum` (real ones), in `dtype`.

    For callers that hold the table: it may be rewritten in place between steps, so nothing here depends on sigma's
    value, and a compiled or captured step stays valid while sigma moves. The transforms of `torch.func`, which know no
    gradient of an operator, get plain operations, which take longer.
    """
    if content.shape[:-1] != width.shape and content.shape[:-2] != width.shape:
        raise ValueError(
            "`content` must be (*k, length) or (*k, block_rank, length) for a `width` of shape (*k); "
            f"got {tuple(content.shape)} and {tuple(width.shape)}."
        )
    if width.shape != location.shape:
        raise ValueError(
            f"`width` and `location` must have the same shape; got {tuple(width.shape)} and {tuple(location.shape)}."
        )
    if is_transformed(content, width, location, table):
        return transformable.forward(content, width, location, table).to(dtype or content.dtype)
    return torch.ops.gblr.masked_content(content, width, location, table, dtype)


def table_dtype(*tensors: Tensor) -> torch.dtype:
    """float64 as soon as one tensor is; else float32, for half-precision contents too."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32

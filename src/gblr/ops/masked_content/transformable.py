"""Mask * content in operations that `torch.func` can map and differentiate, to any order and by the table too.

By FFT for whole widths and locations too: reading the table has no derivative.
"""

from torch import Tensor

from gblr.ops.step import phase_factor, real_rows, table_spectrum


def forward(content: Tensor, width: Tensor, location: Tensor, table: Tensor) -> Tensor:
    """In the wider dtype of content and table; contents are (*k, length) or (*k, block_rank, length)."""
    length = content.shape[-1]
    w, l = width.to(table.dtype), location.to(table.dtype)
    spectrum = table_spectrum(table) if table.dim() == 2 else table[0]
    steps = phase_factor(l, length) * (1 - phase_factor(w, length))  # up at l, down at l + w
    mask = real_rows(spectrum, steps, length) + w[..., None] / length
    return content * (mask if content.dim() == width.dim() + 1 else mask.unsqueeze(-2))

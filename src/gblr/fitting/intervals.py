"""The best cyclic interval of an axis: maximum-sum run of (gain - price), found exactly for a whole batch at once."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def best_interval(
    gain: Float[Tensor, "*k length"], price: Float[Tensor, "*k"], align: int = 1
) -> tuple[Int[Tensor, "*k"], Int[Tensor, "*k"]]:
    """Start and size of the cyclic interval with the largest sum of gains minus `price` per element; size 0 if none
    pays.

    Starts and sizes are multiples of `align`; where `align` does not divide the axis, runs do not wrap and the full
    axis stays allowed.

    >>> best_interval(torch.tensor([3.0, 0.5, 0.0, 2.0]), torch.tensor(1.0))
    (tensor(3), tensor(2))
    """
    length = gain.shape[-1]
    if align == 1:
        return _best_run(gain - price[..., None], cyclic=True)
    num_cells = length // align
    cells = gain[..., : num_cells * align].unflatten(-1, (num_cells, align)).sum(-1) - align * price[..., None]
    divides = num_cells * align == length
    if num_cells == 0:
        start = size = torch.zeros(cells.shape[:-1], dtype=torch.long, device=gain.device)
        run_value = torch.zeros_like(price)
    else:
        start, size = _best_run(cells, cyclic=divides)
        run_value = _run_value(cells, start, size)
    start, size = start * align, size * align
    if divides:
        return start, size
    full_value = gain.sum(-1) - length * price
    full = full_value > run_value
    return start.masked_fill(full, 0), size.masked_fill(full, length)


def best_window(
    gain: Float[Tensor, "*k length"], num_cells: Int[Tensor, "*k"], align: int = 1
) -> tuple[Int[Tensor, "*k"], Int[Tensor, "*k"]]:
    """Start and size of the interval of that many cells of `align` elements with the largest sum of gains.

    >>> best_window(torch.tensor([3.0, 0.5, 0.0, 2.0]), torch.tensor(2))
    (tensor(3), tensor(2))
    """
    length, most = gain.shape[-1], gain.shape[-1] // align
    if most == 0:
        return torch.zeros_like(num_cells), torch.full_like(num_cells, length)
    num_cells = num_cells.clamp(1, most)
    cells = gain[..., : most * align].unflatten(-1, (most, align)).sum(-1)
    total = torch.nn.functional.pad(torch.cat([cells, cells], -1).cumsum(-1), (1, 0))  # (*k, 2 most + 1)
    end = torch.arange(most, device=gain.device) + num_cells[..., None]
    value = total.gather(-1, end) - total[..., :most]
    if most * align < length:
        value = value.masked_fill(end > most, -torch.inf)  # would not wrap on a multiple of align
    return value.argmax(-1) * align, num_cells * align


def _best_run(value: Tensor, cyclic: bool) -> tuple[Tensor, Tensor]:
    """Kadane's maximum subarray by running minima of the prefix sums; a wrapping run is the complement of a minimum
    one.
    """
    length = value.shape[-1]
    prefix = torch.nn.functional.pad(value.cumsum(-1), (1, 0))  # (*k, length + 1)
    lowest, lowest_at = torch.cummin(prefix, -1)
    best, end = (prefix - lowest).max(-1)
    start = lowest_at.gather(-1, end[..., None]).squeeze(-1)
    size = end - start
    if cyclic:
        highest, highest_at = torch.cummax(prefix, -1)
        worst, hole_end = (prefix - highest).min(-1)
        hole_start = highest_at.gather(-1, hole_end[..., None]).squeeze(-1)
        wraps = prefix[..., -1] - worst > best
        start = torch.where(wraps, hole_end, start)
        size = torch.where(wraps, length - (hole_end - hole_start), size)
    return start % length, size


def of_block(values: Tensor, k: int | Tensor) -> Tensor:
    """Those of block k, along the second axis. A tensor of one number, for graphs, says k on the device."""
    return values[:, k] if isinstance(k, int) else values.index_select(1, k)[:, 0]


def _run_value(value: Tensor, start: Tensor, size: Tensor) -> Tensor:
    return (value * interval_mask(start, size, value.shape[-1])).sum(-1)


def interval_mask(start: Int[Tensor, "*k"], size: Int[Tensor, "*k"], length: int) -> Tensor:
    """(*k, length) bool: inside the cyclic interval."""
    position = torch.arange(length, device=start.device)
    return (position - start[..., None]) % length < size[..., None]

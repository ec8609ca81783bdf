"""All widths of a model as one tensor, and what they cost once hardened."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int, Real
from torch import Tensor

from gblr.layers.gaudi import MASK_THRESHOLD, GaudiModule, covering_interval
from gblr.ops.host import on_host
from gblr.ops.step import sliding_rows, step_spectrum_at, step_table

_CHUNK = 1 << 24  # elements of masks at a time
_SLACK = 1e-6  # masks are float32 and rounded differently at every location: an element near the threshold may pass it
_FINE = 16  # samples of the smoothed step per element


@dataclass(frozen=True)
class Price:
    """What the rows and columns of each block cost per kept element, and what is paid in any case; in any unit."""

    per_element: Float[Tensor, "2 blocks"]
    base: float = 0.0


class Widths:
    """The width fractions of all layers side by side, (2, blocks): rows, then columns, as each layer keeps them.

    Counts what hardening at `sigma` will keep: whole elements, multiples of `align`, with soft edges if sigma is
    finite. Two counts: `sizes` is exact, `cost` may be a little above it, but never falls when a width grows, so that
    a threshold can be searched. For layers with `rounding=False` both are bounds.
    """

    def __init__(self, layers: Sequence[GaudiModule], sigma: float):
        self.layers = tuple(layers)
        self.device = self.layers[0].width_frac.device
        self.num_blocks = [layer.num_blocks for layer in self.layers]
        self.length = self.per_layer([layer._axes for layer in self.layers])
        self.align = self.per_layer([(layer.align, layer.align) for layer in self.layers])
        self._last = (self.length / self.align).floor() * self.align  # the largest multiple on the axis
        self._real = self.per_layer([(not layer.rounding,) * 2 for layer in self.layers]).bool()
        self._trains = [layer.width_frac.requires_grad for layer in self.layers]
        self.trainable = self.per_layer([(trains,) * 2 for trains in self._trains])
        kinds = sorted({(n, layer.rounding) for layer in self.layers for n in layer._axes})
        starts = dict(zip(kinds, itertools.accumulate((n + 1 for n, _ in kinds), initial=0), strict=False))
        self._offset = self.per_layer(
            [[starts[n, layer.rounding] for n in layer._axes] for layer in self.layers]
        ).long()
        exact = [(kept_elements if rounding else kept_at_most)(n, sigma) for n, rounding in kinds]
        above = [
            kept_elements(n, sigma, _SLACK).cummax(0).values if rounding else table
            for (n, rounding), table in zip(kinds, exact, strict=True)
        ]
        self._kept, self._kept_at_most = (torch.cat(tables).to(self.device) for tables in (exact, above))
        # the usual case needs few operations, and the search for a threshold runs them again and again
        self._is_plain = all(layer.rounding and layer.align == 1 for layer in self.layers)
        self._is_sharp = math.isinf(sigma) and all(layer.rounding for layer in self.layers)

    def move(self, device: torch.device) -> None:
        self.device = device
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, value.to(device))

    @on_host()
    def per_layer(self, values: Sequence[Sequence[float]], dtype: torch.dtype = torch.float32) -> Tensor:
        """(row, column) numbers of each layer, spread over its blocks: (2, blocks)."""
        counts = torch.tensor(self.num_blocks)
        spread = torch.tensor([list(pair) for pair in values], dtype=dtype).repeat_interleave(counts, 0)
        return spread.T.contiguous().to(self.device)

    def set_trainable(self, trains: Sequence[bool]) -> bool:
        """Which layers have widths that may be cut; whether that is news. In place, as captured steps read it."""
        if list(trains) == self._trains:
            return False
        self._trains = list(trains)
        self.trainable.copy_(self.per_layer([(one,) * 2 for one in trains]))
        return True

    def read(self) -> Float[Tensor, "2 blocks"]:
        """Their present values, gathered from all processes where parameters are sharded; 0 for what is no number.

        Widths and locations are indices into tables: a NaN, after a loss of NaN, would end a CUDA program with a failed
        assertion instead of showing that loss.
        """
        return whole(self._side_by_side()).nan_to_num(0.0)

    def write(self, width: Float[Tensor, "2 blocks"]) -> None:
        """Of sharded parameters each process takes its part."""
        whole = self._side_by_side()
        part = _part_of(whole, width) if _is_sharded(whole) else width
        torch._foreach_copy_(
            [local_part(layer.width_frac) for layer in self.layers], part.split(self.num_blocks, dim=1)
        )

    def _side_by_side(self) -> Any:
        return side_by_side([layer.width_frac for layer in self.layers], self.device)

    def wrap_locations(self) -> None:
        """Locations are cyclic: modulo 1; 0 for what is no number."""
        locations = [local_part(layer.location_frac) for layer in self.layers]
        value = torch.cat([location.to(self.device) for location in locations], dim=1)
        torch._foreach_copy_(locations, (value - value.floor()).nan_to_num(0.0).split(self.num_blocks, dim=1))

    def rounded(self, width: Float[Tensor, "*g 2 blocks"]) -> Float[Tensor, "*g 2 blocks"]:
        """In elements, as the layers' own masks round them; real-valued ones up, as hardening may."""
        value = width.clamp(0, 1) * self.length
        if self._is_plain:
            return value.round()
        nearest = torch.minimum((value / self.align).round() * self.align, self._last)
        whole = torch.where(value > (self._last + self.length) / 2, self.length, nearest)
        return torch.where(self._real, value.ceil(), whole)

    def sizes(self, width: Float[Tensor, "*g 2 blocks"]) -> Real[Tensor, "*g 2 blocks"]:
        """Elements that hardening keeps; 0 on both sides for dead blocks."""
        return self._look_up(self._kept, width)

    def hardened_cost(self, width: Float[Tensor, "*g 2 blocks"], price: Price) -> Float[Tensor, "*g"]:
        return (self.sizes(width) * price.per_element).sum((-2, -1)) + price.base

    def cost(self, width: Float[Tensor, "*g 2 blocks"], price: Price) -> Float[Tensor, "*g"]:
        """At least the hardened cost; never falls when a width grows."""
        return (self._look_up(self._kept_at_most, width) * price.per_element).sum((-2, -1)) + price.base

    def _look_up(self, table: Tensor, width: Float[Tensor, "*g 2 blocks"]) -> Real[Tensor, "*g 2 blocks"]:
        elements = self.rounded(width)
        kept = elements if self._is_sharp else table[self._offset + elements.long()]
        return kept * (kept.prod(-2, keepdim=True) > 0)

    def keep_alive(self, width: Float[Tensor, "2 blocks"], before: Float[Tensor, "2 blocks"]) -> Tensor:
        """One element on one side of the blocks that would have none on both: their gradients would all be 0.

        A block with one width of 0 adds nothing and costs nothing, but that width feels a gradient and can grow again.
        """
        gone = (self.rounded(width) == 0).all(0) & (self.trainable > 0).all(0)
        longer = torch.stack([before[0] > before[1], before[0] <= before[1]])
        return torch.where(gone & longer, self.align.minimum(self.length) / self.length, width)


@on_host()
def kept_elements(length: int, sigma: float, slack: float = 0.0) -> Int[Tensor, " length_and_one"]:
    """For each whole width 0 .. length the number of elements whose mask is above the hardening threshold - slack.

    Ripples of a mask cancel at some widths and not at others: the number may fall while the width grows.
    """
    if math.isinf(sigma):
        return torch.arange(length + 1)
    rows = sliding_rows(step_table(length, sigma, torch.float32, torch.device("cpu"))[0])
    sizes = [torch.zeros(1, dtype=torch.long)]
    for widths in torch.arange(1, length + 1).split(max(1, _CHUNK // length)):
        masks = rows[2 * length] - rows[2 * length - widths]  # at location 0
        sizes.append(covering_interval(masks.abs() > MASK_THRESHOLD - slack)[1])
    return torch.cat(sizes)


@on_host()
def kept_at_most(length: int, sigma: float) -> Int[Tensor, " length_and_one"]:
    """A bound of the same for real widths, rounded up, at any real location: the width and a soft edge on each side.

    Between whole numbers the ripples of S do not cancel. Outside a block its mask is a difference of two deviations of
    S from the plain step, each at most half the threshold from the end of the edge on.
    """
    spectrum = torch.view_as_complex(step_spectrum_at(length, torch.tensor(sigma, dtype=torch.float64)))[0]
    spectrum = spectrum * torch.exp(-1j * math.pi * torch.arange(len(spectrum)).double() / length)  # from x + 1/2 to x
    if length % 2 == 0:
        spectrum[-1] /= 2  # irfft at a finer grid counts the middle frequency twice
    x = torch.arange(_FINE * length) / (_FINE * length)
    deviation = (torch.fft.irfft(spectrum, n=_FINE * length) * _FINE + x - 0.5).abs()
    near = (deviation[: _FINE * length // 2 + 1] > MASK_THRESHOLD / 2 - _SLACK).nonzero()
    edge = float(near.max() + 1) / _FINE if len(near) else 0.0
    kept = (torch.arange(length + 1) + 2 * edge).ceil().clamp(max=length).long()
    return kept.masked_fill(torch.arange(length + 1) == 0, 0)


def _is_sharded(parameter: Any) -> bool:
    return hasattr(parameter, "full_tensor")  # a DTensor, without importing torch.distributed.tensor


def whole(parameter: Any) -> Tensor:
    """The full value of a parameter or of its optimizer state, gathered from all processes if it is sharded."""
    value = parameter.detach()
    return value.full_tensor() if _is_sharded(value) else value


def local_part(parameter: Any) -> Tensor:
    """What this process has of a parameter, sharing its memory; all of it unless the parameter is sharded."""
    value = parameter.detach()
    return value.to_local() if _is_sharded(value) else value


def side_by_side(tensors: Sequence[Any], device: torch.device) -> Any:
    """(2, blocks) of each layer as one tensor, sharded if they are: gathered in one exchange instead of one per layer.

    Shards lie along the first axis; joined along the second they are the shards of what is joined.
    """
    local = torch.cat([local_part(tensor).to(device) for tensor in tensors], dim=1)
    first = tensors[0]
    if not _is_sharded(first):
        return local
    from torch.distributed.tensor import DTensor  # half a second to import, for sharded models only

    shape, stride = torch.Size((2, local.shape[1])), (local.shape[1], 1)
    return DTensor.from_local(local, first.device_mesh, first.placements, run_check=False, shape=shape, stride=stride)


def _part_of(parameter: Any, value: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor, Replicate  # half a second to import, for sharded models only

    mesh = parameter.device_mesh
    whole = DTensor.from_local(value.contiguous(), mesh, [Replicate()] * mesh.ndim, run_check=False)
    return whole.redistribute(placements=parameter.placements).to_local()

"""How an error is measured, and the best content on an interval of columns in that measure.

The error of a fit is tr(E G E^T): plain (G = I), or weighted by the Gram matrix G = X^T X of real inputs, so that it
is the error of the layer's outputs. On the row (output) side both are separable; on the column (input) side G couples
the columns, and what some of them leave out the others can make up for.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gblr.fitting.intervals import best_interval, interval_mask, of_block
from gblr.fitting.room import room
from gblr.fitting.triangles import Triangles

_MAX_STARTS = 16  # 8 cost 2 % of the margin over SVD on MiniLM, 32 gain 3 % of it for twice the time
_LONG_AXIS = 1024  # above it half as many: the factors take starts * length^2 numbers


class Projection(NamedTuple):
    """The best content on an interval; `worth` is what each column adds to it, after those before it in the
    interval.
    """

    content: Float[Tensor, "b r in"]
    start: Int[Tensor, " b"]
    size: Int[Tensor, " b"]
    worth: Float[Tensor, "b in"]


class PlainMetric:
    """G = I."""

    importance: float | Tensor = 1.0

    def times(self, x: Float[Tensor, "b r in"]) -> Float[Tensor, "b r in"]:
        return x

    def project(self, target: Float[Tensor, "b r in"], price: Float[Tensor, " b"], align: int) -> Projection:
        """Of all intervals the best at `price` per element, with the content on it that is nearest to `target`."""
        worth = target.square().sum(1)
        start, size = best_interval(worth, price, align)
        return Projection(self.restrict(target, start, size, target.shape[-1]), start, size, worth)

    def restrict(self, target: Tensor, start: Tensor, size: Tensor, longest: int) -> Tensor:
        """The content on the given interval, of at most `longest` columns, that is nearest to `target`."""
        return target * interval_mask(start, size, target.shape[-1])[:, None]

    def prepare(self, start: Int[Tensor, "b k"], size: Int[Tensor, "b k"]) -> "Prepared":
        """For contents of several blocks on intervals that stay as they are."""
        return Prepared(self, start, size)


class GramMetric:
    """G given. Searched intervals start on a grid of places and may have any length.

    For the start s let L be the Cholesky factor of G rotated by s. With b = G target, rotated alike, the best content
    on the first w columns leaves tr(target G target^T) - sum_{i < w} (L^-1 b)_i^2: one product gives every width at
    once.
    """

    def __init__(self, gram: Float[Tensor, "b in in"], align: int = 1):
        length = gram.shape[-1]
        num_starts = _MAX_STARTS if length <= _LONG_AXIS else _MAX_STARTS // 2
        spacing = max(align, -(-length // num_starts) // align * align)
        self.gram = gram
        self.importance = gram.diagonal(dim1=1, dim2=2)[:, None]  # (b, 1, in); 1 / diag(G^-1) was worse
        self.starts = torch.arange(0, length, spacing, device=gram.device)
        position = torch.arange(length, device=gram.device)
        self.rotation = (position + self.starts[:, None]) % length  # (starts, in)
        self.inverse = Triangles.empty(len(gram), len(self.starts), length, gram)
        for i, order in enumerate(self.rotation):  # one at a time: for wide layers each takes gigabytes
            self.inverse.put(i, _inverse_factor(gram, order))
        self.may_wrap = length % align == 0

    def times(self, x: Float[Tensor, "b r in"]) -> Float[Tensor, "b r in"]:
        return x @ self.gram

    def project(self, target: Float[Tensor, "b r in"], price: Float[Tensor, " b"], align: int) -> Projection:
        length = target.shape[-1]
        rotated = self.times(target)[:, :, self.rotation].transpose(1, 2)  # (b, starts, r, in)
        explained = self.inverse.times(rotated)
        size = torch.arange(1, length + 1, device=target.device)
        value = explained.square().sum(2).cumsum(-1) - price[:, None, None] * size  # (b, starts, in)
        value = value.masked_fill(~self._allowed(size, align, length), -torch.inf).flatten(1)
        best, index = value.max(1)
        which, width = index // length, (index % length + 1).masked_fill(best <= 0, 0)
        gain = explained[torch.arange(len(which), device=which.device), which].square().sum(1)  # (b, in), rotated
        worth = torch.zeros_like(gain).scatter(1, self.rotation[which], gain)
        return Projection(self._solve(explained, which, width), self.starts[which], width, worth)

    def _allowed(self, size: Tensor, align: int, length: int) -> Tensor:
        """(starts, in) bool: which widths may be used from which start."""
        whole = (size % align == 0) | (size == length)
        if self.may_wrap:
            return whole.expand(len(self.starts), -1)
        ends = self.starts[:, None] + size <= length  # a wrapping run would not end on a multiple of align
        return whole & ends & ((size % align == 0) | (self.starts[:, None] == 0))

    def _solve(self, explained: Tensor, which: Tensor, width: Tensor) -> Tensor:
        batch, length = torch.arange(len(which), device=which.device), explained.shape[-1]
        inside = torch.arange(length, device=which.device) < width[:, None]  # (b, in), rotated
        part = explained[batch, which] * inside[:, None]  # (b, r, in)
        content = self.inverse.transposed_times(part, which, width) * inside[:, None]
        return torch.zeros_like(content).scatter(2, self.rotation[which][:, None].expand_as(content), content)

    def restrict(self, target: Tensor, start: Tensor, size: Tensor, longest: int) -> Tensor:
        right = self.times(target)
        if not target.is_cuda:
            return self._one_by_one(right, start.tolist(), size.tolist())
        part = self.part(start, size, max(1, longest))
        return part.put(torch.cholesky_solve(part.take(right).mT, part.factor).mT, target.shape[-1])

    def _one_by_one(self, right: Float[Tensor, "b r in"], starts: list[int], sizes: list[int]) -> Tensor:
        """Each matrix on an interval of its own length: filled up to the longest, most of the work would be wasted."""
        found, length = torch.zeros_like(right), right.shape[-1]
        for i, (start, size) in enumerate(zip(starts, sizes, strict=True)):
            end = start + size
            inside = slice(start, end) if end <= length else torch.arange(start, end) % length
            system = self.gram[i, inside][:, inside]
            factor = torch.linalg.cholesky_ex(system)[0]
            found[i, :, inside] = torch.cholesky_solve(right[i][:, inside].mT, factor).mT
        return found

    def part(self, start: Int[Tensor, "*b"], size: Int[Tensor, "*b"], longest: int) -> "Part":
        """What belongs to the given intervals, of at most `longest` columns."""
        step = torch.arange(longest, device=start.device)
        index, inside = (start[..., None] + step) % self.gram.shape[-1], step < size[..., None]  # (*b, longest)
        batch = torch.arange(len(start), device=start.device).view(-1, *[1] * index.dim())
        system = self.gram[batch, index[..., :, None], index[..., None, :]]
        identity = torch.eye(longest, dtype=system.dtype, device=system.device)
        system = torch.where(inside[..., :, None] & inside[..., None, :], system, identity)
        return Part(index, inside, torch.linalg.cholesky_ex(system)[0])

    def prepare(self, start: Int[Tensor, "b k"], size: Int[Tensor, "b k"]) -> "Prepared":
        """On a GPU with the systems of all blocks solved at once: one after the other takes it many times as long."""
        longest = max(1, int(size.max()))
        possible = start.is_cuda and start.numel() * longest**2 <= room(start.device)
        return PreparedAtOnce(self, start, size, longest) if possible else Prepared(self, start, size)


@dataclass(frozen=True)
class Part:
    """Places of intervals, filled up to equal length, and the Cholesky factor of G there; 1 where they are filled."""

    index: Int[Tensor, "*b longest"]
    inside: Bool[Tensor, "*b longest"]
    factor: Float[Tensor, "*b longest longest"]

    def block(self, k: int | Tensor) -> "Part":
        return Part(*(of_block(values, k) for values in (self.index, self.inside, self.factor)))

    def take(self, x: Float[Tensor, "b r in"]) -> Float[Tensor, "b r longest"]:
        return x.gather(2, self.index[:, None].expand(-1, x.shape[1], -1)) * self.inside[:, None]

    def put(self, x: Float[Tensor, "b r longest"], length: int) -> Float[Tensor, "b r in"]:
        places = self.index[:, None].expand(-1, x.shape[1], -1)
        return x.new_zeros(*x.shape[:2], length).scatter_add(2, places, x * self.inside[:, None])


class Prepared:
    """Intervals of columns that stay: the best contents on those of block k, whenever asked."""

    knows_turns = False  # whether k may be a tensor, for graphs

    def __init__(self, metric: "Metric", start: Int[Tensor, "b k"], size: Int[Tensor, "b k"]):
        self.metric, self.start, self.size = metric, start, size
        self.longest = size.amax(0).tolist()  # once: a look at each visit would make a GPU wait every time

    def restrict(self, target: Float[Tensor, "b r in"], k: int | Tensor) -> Float[Tensor, "b r in"]:
        assert isinstance(k, int)
        return self.metric.restrict(target, self.start[:, k], self.size[:, k], self.longest[k])


class PreparedAtOnce(Prepared):
    """With the inverse factors of all blocks in memory."""

    knows_turns = True

    def __init__(self, metric: GramMetric, start: Int[Tensor, "b k"], size: Int[Tensor, "b k"], longest: int):
        super().__init__(metric, start, size)
        self.part = metric.part(start, size, longest)
        identity = torch.eye(longest, dtype=self.part.factor.dtype, device=start.device)
        self.inverse = torch.linalg.solve_triangular(self.part.factor, identity, upper=False)

    def restrict(self, target: Float[Tensor, "b r in"], k: int | Tensor) -> Float[Tensor, "b r in"]:
        part, inverse = self.part.block(k), of_block(self.inverse, k)
        return part.put((part.take(self.metric.times(target)) @ inverse.mT) @ inverse, target.shape[-1])


Metric = PlainMetric | GramMetric


def make_metric(gram: Float[Tensor, "b in in"] | None, align: int) -> Metric:
    return PlainMetric() if gram is None else GramMetric(gram, align)


def _inverse_factor(gram: Float[Tensor, "b in in"], order: Int[Tensor, " in"]) -> Float[Tensor, "b in in"]:
    """The inverse of the Cholesky factor of G with its rows and columns in that order: lower triangular."""
    factor = torch.linalg.cholesky(gram[:, order][:, :, order].double())
    identity = torch.eye(len(order), dtype=torch.float64, device=gram.device)
    return torch.linalg.solve_triangular(factor, identity, upper=False).to(gram.dtype)

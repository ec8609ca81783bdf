"""How an axis is cut for export: intervals of any place and width become a few batches of dense products.

A tile is a run of `tile` elements of the axis, a chunk some blocks with similar intervals. A chunk takes a slot in each
tile that it reaches into, and is stored there in full, with zeros where its blocks do not cover the tile: small tiles
store few of them, large ones leave less to be gathered.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from gblr.matrices.packed import PackedGBLR


@dataclass(frozen=True)
class Prices:
    """What onnxruntime takes for an operator, for a product within a batch, for an index of a gather and for a number
    that one copies, in the time of a stored number. By regressions over tilings of 3072 x 768 and 768 x 768.
    """

    operator: int
    product: int
    index: int
    copied: int

    @property
    def batch(self) -> int:
        return 4 * self.operator


MANY = Prices(operator=500, product=50, index=5, copied=18)  # positions at a time, as in a convolution: at 197
MIXED = Prices(operator=12000, product=1000, index=90, copied=9)  # the mean of those and of one position
_NUM_TILES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
_CHUNKS = (1, 2, 4, 8)
_MAX_ROWS = 16  # of a chunk: longer runs are copied no faster
_UNIT_ROWS = (16, 32, 64)


@dataclass(frozen=True, eq=False)
class Tiling:
    """One axis of a packed matrix. Blocks stand in `order`, `chunk` of them at a time."""

    length: int
    tile: int
    rank: int  # of a block
    chunk: int
    order: Int[Tensor, " k"]
    touch: Bool[Tensor, "chunks tiles"]  # whether a block of the chunk reaches into the tile
    prices: Prices

    @property
    def num_tiles(self) -> int:
        return self.touch.shape[1]

    @property
    def padded_length(self) -> int:
        return self.num_tiles * self.tile

    @property
    def rows(self) -> int:
        """Rows of a chunk."""
        return self.chunk * self.rank

    @property
    def num_slots(self) -> int:
        """Empty ones included."""
        raise NotImplementedError

    @property
    def num_params(self) -> int:
        """Numbers stored, zeros included."""
        return self.num_slots * self.rows * self.tile

    @property
    def num_stored(self) -> int:
        """The same with the indices, of 64 bits: two numbers each."""
        return self.num_params + 2 * self.num_slots * (self.num_tiles > 1)


@dataclass(frozen=True, eq=False)
class RowTiling(Tiling):
    """y, tile by tile: the chunks of a tile are gathered from z. Tiles of about equally many chunks are one batch;
    `thrift` makes more batches, with fewer empty slots, than are best for speed.
    """

    thrift: int = 1

    @cached_property
    def batches(self) -> list[Int[Tensor, " m"]]:
        """Tiles that are computed together."""
        return similar(self._counts, self._slot_cost + self.rows * self.tile, self.prices.batch // self.thrift)

    @cached_property
    def num_slots(self) -> int:
        return sum(len(tiles) * int(self._counts[tiles].max()) for tiles in self.batches)

    @cached_property
    def score(self) -> int:
        """Estimate of the time, in stored numbers."""
        copies = self.num_slots * self._slot_cost * (self.num_tiles > 1)
        return self.num_params + copies + self.prices.product * self.num_tiles + self.prices.batch * len(self.batches)

    @property
    def _counts(self) -> Int[Tensor, " tiles"]:
        return self.touch.sum(0).clamp(min=1)  # there is no product of nothing: a tile without chunks has an empty slot

    @property
    def _slot_cost(self) -> int:
        return self.prices.index + self.prices.copied * self.rows


@dataclass(frozen=True, eq=False)
class ColTiling(Tiling):
    """z from x: products of tiles with `unit` chunks each ("pieces"), all in one batch; then the pieces of each chunk
    are gathered and added up, those of about equally many pieces in one batch.
    """

    unit: int = 1

    @cached_property
    def num_units(self) -> int:
        return int(-(-self.touch.sum(0) // self.unit).sum())

    @property
    def num_slots(self) -> int:
        return self.num_units * self.unit

    @cached_property
    def sum_batches(self) -> list[Int[Tensor, " m"]]:
        """Chunks whose pieces are added up together."""
        return similar(self.touch.sum(1), self._slot_cost, self.prices.batch)

    @cached_property
    def score(self) -> int:
        sums = self.num_slots * self._slot_cost + self.prices.batch * len(self.sum_batches)
        copies = (
            self.prices.copied * self.tile // (2 if self.num_units == self.num_tiles else 1)
        )  # once more for a gather
        products = self.num_units * (self.prices.product + copies) + self.prices.batch
        return self.num_params + products + sums * (self.num_tiles > 1)

    @property
    def _slot_cost(self) -> int:
        return self.prices.index + 2 * self.prices.copied * self.rows  # pieces are written, copied and read


def dense_score(shape: tuple[int, int], prices: Prices) -> int:
    """The estimate for one product with the dense weight."""
    return shape[0] * shape[1] + prices.operator


def tile_matrix(
    packed: PackedGBLR, max_padding: float, prices: Prices = MIXED, col_unit: int = 1
) -> tuple[RowTiling, ColTiling]:
    """The fastest tilings of rows and columns that store at most `max_padding` times the numbers of the matrix;
    about the smallest, where none is that small. Tiles of columns are multiples of `col_unit`.
    """
    s, rank = packed.structure, packed.block_rank
    rows = row_tilings(s.row_width, s.row_location, packed.shape[0], rank, prices)
    cols = col_tilings(s.col_width, s.col_location, packed.shape[1], rank, prices, col_unit)
    pairs = sorted(itertools.product(rows, cols), key=lambda pair: pair[0].score + pair[1].score)
    stored = [row.num_params + col.num_params for row, col in pairs]
    bound = max(max_padding * packed.num_params, 1.05 * min(stored))
    return next(pair for pair, size in zip(pairs, stored, strict=True) if size <= bound)


def row_tilings(width: Tensor, location: Tensor, length: int, rank: int, prices: Prices) -> list[RowTiling]:
    cuts = _cuts(width.long(), location.long(), length, rank, 1)
    return [RowTiling(length, *cut, prices, thrift) for cut, thrift in itertools.product(cuts, (1, 16))]


def col_tilings(
    width: Tensor, location: Tensor, length: int, rank: int, prices: Prices, multiple: int = 1
) -> list[ColTiling]:
    found = []
    for cut in _cuts(width.long(), location.long(), length, rank, multiple):
        _, rank, chunk, _, touch = cut
        most = int(touch.sum(0).max())
        units = {most}
        if touch.shape[1] > 1:
            units |= {-(-most // parts) for parts in (2, 3, 4)} | {rows // (chunk * rank) for rows in _UNIT_ROWS}
        found += [ColTiling(length, *cut, prices, unit) for unit in sorted(units) if 1 <= unit <= most]
    return found


def _cuts(
    width: Int[Tensor, " k"], location: Int[Tensor, " k"], length: int, rank: int, multiple: int
) -> Iterator[tuple[int, int, int, Tensor, Tensor]]:
    """Tile, rank, chunk, order and touch of each way to cut an axis."""
    for tile in sorted({-(-length // (count * multiple)) * multiple for count in _NUM_TILES}):
        touch = touched_tiles(width, location, length, tile)
        for chunk in _CHUNKS if touch.shape[1] > 1 else (1,):
            if chunk == 1 or chunk * rank <= _MAX_ROWS:
                order = torch.arange(len(touch)) if chunk == 1 else _order(touch, location // tile)
                yield tile, rank, chunk, order, _in_chunks(touch[order], chunk)


def touched_tiles(
    width: Int[Tensor, " k"], location: Int[Tensor, " k"], length: int, tile: int
) -> Bool[Tensor, "k tiles"]:
    """Which tiles each cyclic interval reaches into.

    >>> touched_tiles(torch.tensor([2, 4]), torch.tensor([1, 5]), length=8, tile=2).int()
    tensor([[1, 1, 0, 0],
            [1, 0, 1, 1]], dtype=torch.int32)
    """
    index = torch.arange(-(-length // tile))
    last = (location + width - 1) % length // tile
    after, before = index >= (location // tile)[:, None], index <= last[:, None]
    wraps = (location + width > length)[:, None]
    return torch.where(wraps, after | before, after & before)


def _order(touch: Bool[Tensor, "k tiles"], first: Int[Tensor, " k"]) -> Int[Tensor, " k"]:
    """Neighbours begin in the same tile and end in similar ones."""
    first = first.masked_fill(touch.all(1), 0)
    return (first * (touch.shape[1] + 1) + touch.sum(1)).argsort(stable=True)


def _in_chunks(touch: Bool[Tensor, "k tiles"], chunk: int) -> Bool[Tensor, "chunks tiles"]:
    missing = touch.new_zeros(-len(touch) % chunk, touch.shape[1])
    return torch.cat([touch, missing]).unflatten(0, (-1, chunk)).any(1)


def similar(counts: Int[Tensor, " n"], slot: int, batch: int) -> list[Int[Tensor, " m"]]:
    """Items in batches of similar count, at the least cost: each item costs `slot` times the largest count of its
    batch, each batch `batch`.

    >>> similar(torch.tensor([9, 2, 8, 1]), slot=10, batch=15)
    [tensor([0, 2]), tensor([1, 3])]
    """
    values = sorted(set(counts.tolist()), reverse=True)
    size = [int((counts == value).sum()) for value in values]
    best: list[tuple[int, int]] = [(0, 0)]  # cost of the first values, and where their last batch begins
    for end in range(1, len(values) + 1):
        costs = (best[i][0] + values[i] * sum(size[i:end]) * slot + batch for i in range(end))
        best.append(min((cost, i) for i, cost in enumerate(costs)))
    batches, end = [], len(values)
    while end:
        begin = best[end][1]
        batches.append(((counts <= values[begin]) & (counts >= values[end - 1])).nonzero()[:, 0])
        end = begin
    return batches[::-1]

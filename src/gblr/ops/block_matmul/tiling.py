"""How a GPU keeps blocks: y = U (V x) as two products of dense 64 x 64 tiles, planned once per structure.

The rows of V ("lines", block_rank of them to a block) are given slots, 64 to a tile, lines of like intervals together;
V x then needs, for each tile of slots, the tiles of x that its intervals touch. For U the outputs keep their order,
and the inputs are either tiles of 64 slots (`block_rank` a multiple of 64: a tile is one block's) or lists of single
slots, gathered. Tiles of outputs are worked on in pairs, which share the inputs that both need.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

TILE = 64
_SHORTEST = 2  # a run of inputs that only one tile of a pair needs; below it the pair takes them both
_FIELDS = 7  # of a pair: two tiles of outputs, first row of values, first entry, entries of both, of one, of the other

Array = Any  # of numpy; its types do not follow reductions


@dataclass(frozen=True)
class Product:
    """One of the two products: its pairs of tiles, and the inputs of each entry of their lists."""

    pairs: Int[Tensor, "pairs 7"]
    inputs: Int[Tensor, " entries"]  # tiles of inputs; or single inputs, 64 to an entry, -1 for none
    num_entries: int
    num_rows: int  # of values, 64 numbers each

    @property
    def is_gathered(self) -> bool:
        return self.inputs.numel() != self.num_entries


@dataclass(frozen=True)
class Tiling:
    """The layout of a matrix: int32 tensors on one device."""

    lines: Int[Tensor, " slots"]  # the line of each slot, -1 for none
    columns: Product  # z = V x
    rows: Product  # y = U z
    shape: tuple[int, int]
    num_lines: int

    @property
    def num_values(self) -> int:
        """Numbers that are stored, zeros that fill the tiles up included."""
        return TILE * (self.columns.num_rows + self.rows.num_rows)

    def to(self, device: torch.device) -> "Tiling":
        columns, rows = (
            Product(p.pairs.to(device), p.inputs.to(device), p.num_entries, p.num_rows)
            for p in (self.columns, self.rows)
        )
        return Tiling(self.lines.to(device), columns, rows, self.shape, self.num_lines)


def tile_blocks(
    row_width: Tensor, row_location: Tensor, col_width: Tensor, col_location: Tensor, block_rank: int,
    shape: tuple[int, int],
) -> Tiling:  # fmt: skip
    """The layout for blocks of these intervals, on the CPU."""
    widths, starts = [], []
    for width, location, length in ((row_width, row_location, shape[0]), (col_width, col_location, shape[1])):
        found = width.detach().cpu().long().numpy()
        if len(found) and not (0 <= found.min() and found.max() <= length):
            raise ValueError(f"widths must lie in 0 .. {length}; got {found.min()} .. {found.max()}.")
        widths.append(found.repeat(block_rank))
        starts.append((location.detach().cpu().long().numpy() % max(1, length)).repeat(block_rank))
    live = np.flatnonzero((widths[0] > 0) & (widths[1] > 0))
    whole = block_rank % TILE == 0  # a tile of slots is within one block
    order = live if whole else live[_like_intervals(starts[1][live], widths[1][live])]
    lines = np.full(-(-len(order) // TILE) * TILE, -1)
    lines[: len(order)] = order
    tiling = Tiling(
        _tensor(lines), _column_product(lines, starts[1], widths[1], shape[1]),
        _row_product(lines, starts[0], widths[0], shape[0], gathered=not whole), shape, len(widths[0]),
    )  # fmt: skip
    if tiling.num_values >= 2**31:
        raise ValueError(f"blocks of {shape[0]} x {shape[1]} have more numbers than the GPU kernels can index (2^31).")
    return tiling


def _tensor(array: Array | Sequence[int]) -> Int[Tensor, "..."]:
    return torch.from_numpy(np.ascontiguousarray(np.asarray(array, np.int32)))


def _like_intervals(start: Array, size: Array) -> Array:
    """An order in which each run of 64 intervals has much in common: halved again and again where that helps most."""
    groups, done = [np.arange(len(start))], []
    while groups:
        group = groups.pop()
        if len(group) <= TILE:
            done.append(group)
            continue
        half = -(-len(group) // (2 * TILE)) * TILE
        ways = []
        for key in (start, start + size):
            ordered = group[np.argsort(key[group], kind="stable")]
            halves = ordered[:half], ordered[half:]
            ways.append((sum(len(part) * _span(start[part], size[part]) for part in halves), halves))
        groups.extend(reversed(min(ways, key=lambda way: way[0])[1]))
    return np.concatenate(done) if done else np.arange(0)


def _span(start: Array, size: Array) -> int:
    return int((start + size).max() - start.min())


def _touched(start: Array, size: Array, length: int) -> Array:
    """(intervals, tiles) bool: the tiles of an axis that each cyclic interval has elements in."""
    tile = np.arange(-(-length // TILE))
    first, last = tile * TILE, np.minimum((tile + 1) * TILE, length)
    end = (start + size)[:, None]
    straight = (start[:, None] < last) & (end > first)
    return (straight | (end - length > first)) & (size > 0)[:, None]


def _column_product(lines: Array, start: Array, size: Array, length: int) -> Product:
    touched = np.zeros((len(lines), -(-length // TILE)), bool)
    used = lines >= 0
    touched[used] = _touched(start[lines[used]], size[lines[used]], length)
    needs = touched.reshape(len(touched) // TILE, TILE, touched.shape[1]).any(1)  # (tiles of slots, tiles of x)
    return _product(needs, _matched(needs), gathered=False)


def _matched(needs: Array) -> list[tuple[int, int]]:
    """Pairs of tiles with the most inputs in common, the best first; the second of the last is -1 if they are odd."""
    count = len(needs)
    common = np.triu(needs.astype(np.int32) @ needs.T.astype(np.int32), 1)
    free, pairs = np.ones(count, bool), []
    for place in np.argsort(-common, axis=None, kind="stable"):
        a, b = divmod(int(place), count)
        if a < b and free[a] and free[b]:
            pairs.append((a, b))
            free[[a, b]] = False
    return pairs + [(int(a), -1) for a in np.flatnonzero(free)]


def _shares(needs: Array, a: int, b: int) -> tuple[Array, Array, Array]:
    """What both tiles need, only the first, only the second; short runs of the latter count as needed by both."""
    if b < 0:
        return np.zeros_like(needs[a]), needs[a], np.zeros_like(needs[a])
    both, only_a, only_b = needs[a] & needs[b], needs[a] & ~needs[b], needs[b] & ~needs[a]
    for only in (only_a, only_b):
        if only.sum() < _SHORTEST:
            both, only[:] = both | only, False
    return both, only_a, only_b


def _row_product(lines: Array, start: Array, size: Array, length: int, gathered: bool) -> Product:
    used = np.flatnonzero(lines >= 0)
    touched: Array = np.zeros((len(lines), -(-length // TILE)), bool)
    touched[used] = _touched(start[lines[used]], size[lines[used]], length)
    if not gathered:
        touched = touched.reshape(len(touched) // TILE, TILE, touched.shape[1]).any(1)
    needs = touched.T  # (tiles of outputs, slots or tiles of slots)
    tiles = range(0, len(needs), 2)
    pairs = [(a, a + 1 if a + 1 < len(needs) else -1) for a in tiles]
    return _product(needs, pairs, gathered)


def _product(needs: Array, pairs: list[tuple[int, int]], gathered: bool) -> Product:
    """The lists of all pairs, one after the other."""
    table = np.zeros((len(pairs), _FIELDS), np.int64)
    inputs: list[Array] = []
    row = entry = 0
    for i, pair in enumerate(pairs):
        parts = [np.flatnonzero(part) for part in _shares(needs, *pair)]
        counts = [-(-len(part) // TILE) if gathered else len(part) for part in parts]
        table[i] = (*pair, row, entry, *counts)
        for part, count in zip(parts, counts, strict=True):
            fill = count * TILE - len(part) if gathered else 0
            inputs += [part, np.full(fill, -1)]
        entry += sum(counts)
        row += TILE * (2 * counts[0] + counts[1] + counts[2])
    return Product(_tensor(table), _tensor(np.concatenate(inputs) if inputs else []), entry, row)


def value_rows(product: Product) -> tuple[Int[Tensor, " rows"], Int[Tensor, " rows"]]:
    """For each row of 64 values the output (slots, or outputs of the layer) and the entry that it belongs to.

    Neither waits for the device.
    """
    pairs = product.pairs.long()
    row = torch.arange(product.num_rows, device=pairs.device)
    if not len(pairs):
        return row, row
    pair = torch.searchsorted(pairs[:, 2].contiguous(), row, right=True) - 1
    tile_a, tile_b, first, entry, both, only_a, _ = (field[pair] for field in pairs.unbind(1))
    at = row - first
    in_both = at < 2 * TILE * both
    past = at - 2 * TILE * both  # in the parts of one tile
    second = torch.where(in_both, at // TILE % 2 == 1, past >= TILE * only_a)
    entry = entry + torch.where(in_both, at // (2 * TILE), both + past // TILE)
    return torch.where(second, tile_b, tile_a) * TILE + at % TILE, entry


def entry_inputs(product: Product) -> Int[Tensor, "entries 64"]:
    """The 64 inputs of each entry, -1 for none; those of a tile at the end of its axis may lie beyond it."""
    if product.is_gathered:
        return product.inputs.long().view(-1, TILE)
    return product.inputs.long()[:, None] * TILE + torch.arange(TILE, device=product.inputs.device)


def pack(u: Float[Tensor, "lines out"], v: Float[Tensor, "lines in"], tiling: Tiling) -> Float[Tensor, " values"]:
    """The factors of W = u^T v in the order of the tiling; differentiable."""
    parts = [
        _at(factor, *places).flatten() for factor, places in zip((v, u.T), _places(tiling), strict=True)
    ]  # z = V x comes first
    return torch.cat(parts)


def spread(values: Float[Tensor, " values"], tiling: Tiling) -> tuple[Float[Tensor, "lines out"], Tensor]:
    """Back to the factors, with zeros outside of the blocks."""
    num_columns = TILE * tiling.columns.num_rows
    sizes = (tiling.num_lines, tiling.shape[1]), (tiling.shape[0], tiling.num_lines)
    found = []
    for part, size, (out, inside, valid) in zip(
        (values[:num_columns], values[num_columns:]), sizes, _places(tiling), strict=True
    ):
        flat = part.new_zeros(size[0] * size[1] + 1)  # the last takes what has no place
        place = torch.where(valid, out * size[1] + inside, size[0] * size[1])
        found.append(flat.index_add(0, place.flatten(), part)[:-1].view(size))
    return found[1].T, found[0]


def _at(factor: Tensor, out: Tensor, inside: Tensor, valid: Tensor) -> Tensor:
    if not factor.numel():
        return factor.new_zeros(valid.shape)
    return torch.where(valid, factor[out, inside], 0)  # not a product: what lies elsewhere may be infinite


def _places(tiling: Tiling) -> list[tuple[Tensor, Tensor, Tensor]]:
    """For every value of both products its row and column in V and in U, and whether it has one."""
    lines = tiling.lines.long()
    slot, entry = value_rows(tiling.columns)
    line = lines[slot][:, None] if len(lines) else slot[:, None]
    column = entry_inputs(tiling.columns)[entry]
    first = _checked(line, column, tiling.num_lines, tiling.shape[1])
    out, entry = value_rows(tiling.rows)
    slot = entry_inputs(tiling.rows)[entry]
    line = torch.where(slot >= 0, lines[slot.clamp(min=0)], -1) if len(lines) else slot
    return [first, _checked(out[:, None], line, tiling.shape[0], tiling.num_lines)]


def _checked(row: Tensor, column: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    row, column = torch.broadcast_tensors(row, column)
    valid = (row >= 0) & (row < rows) & (column >= 0) & (column < columns)
    return row.clamp(0, max(0, rows - 1)), column.clamp(0, max(0, columns - 1)), valid

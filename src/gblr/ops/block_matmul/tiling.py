"""How a GPU keeps blocks: y = U (V x) as two products of dense 64 x 64 tiles, planned once per structure.

The rows of V ("lines", block_rank of them to a block) are given slots, 64 to a tile, lines of like intervals together;
V x then needs, for each tile of slots, the tiles of x that its intervals touch. For U the outputs keep their order,
and the inputs are either tiles of 64 slots (`block_rank` a multiple of 64: a tile is one block's) or lists of single
slots, gathered. Tiles of outputs are worked on in pairs, which share the inputs that both need.
"""

import itertools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

TILE = 64
_FIELDS = 7  # of a pair: two tiles of outputs, first row of values, first entry, entries of both, of one, of the other
# Time of an entry of a pair, in those of an entry of one tile; and of having entries of one tile at all
_PAIR_TIME, _RUN_TIME = 1.6, 0.7


class Sizes(NamedTuple):
    """What a launch has to know of a layout, as plain whole numbers."""

    out_features: int
    in_features: int
    num_lines: int
    num_slots: int
    column_pairs: int  # of z = V x: pairs of tiles, entries of their lists, rows of 64 values
    column_entries: int
    column_rows: int
    row_pairs: int  # of y = U z
    row_entries: int
    row_rows: int
    gathered: int  # whether the entries of the second product are 64 single slots each

    @property
    def num_values(self) -> int:
        """Numbers that are stored, zeros that fill the tiles up included."""
        return TILE * (self.column_rows + self.row_rows)

    @property
    def parts(self) -> list[int]:
        """Lengths of what an index holds: lines of the slots (-1 for none); pairs and inputs of both products."""
        inputs = self.row_entries * (TILE if self.gathered else 1)
        return [self.num_slots, _FIELDS * self.column_pairs, self.column_entries, _FIELDS * self.row_pairs, inputs]


@dataclass(frozen=True)
class _Product:
    """One of the two products: its pairs of tiles, and the inputs of each entry of their lists."""

    pairs: Int[Tensor, "pairs 7"]
    inputs: Int[Tensor, " entries"]  # tiles of inputs; or single inputs, 64 to an entry, -1 for none
    num_entries: int
    num_rows: int  # of values, 64 numbers each


def tile_blocks(
    row_width: Tensor, row_location: Tensor, col_width: Tensor, col_location: Tensor, block_rank: int,
    shape: tuple[int, int],
) -> tuple[Int[Tensor, " index"], Sizes]:  # fmt: skip
    """The layout for blocks of these intervals; its index is on their device, one tensor of int32."""
    widths, starts = [], []
    for width, location, length in ((row_width, row_location, shape[0]), (col_width, col_location, shape[1])):
        found = width.detach().cpu().long()
        if found.numel() and not (0 <= int(found.min()) and int(found.max()) <= length):
            raise ValueError(f"widths must lie in 0 .. {length}; got {int(found.min())} .. {int(found.max())}.")
        widths.append(found.repeat_interleave(block_rank))
        starts.append((location.detach().cpu().long() % max(1, length)).repeat_interleave(block_rank))
    live = ((widths[0] > 0) & (widths[1] > 0)).nonzero().flatten()
    whole = block_rank % TILE == 0  # a tile of slots is within one block
    order = live if whole else live[_like_intervals(starts[1][live], widths[1][live])]
    lines = torch.full((-(-len(order) // TILE) * TILE,), -1)
    lines[: len(order)] = order
    columns = _column_product(lines, starts[1], widths[1], shape[1])
    rows = _row_product(lines, starts[0], widths[0], shape[0], gathered=not whole)
    sizes = Sizes(
        *shape, len(widths[0]), len(lines), len(columns.pairs), columns.num_entries, columns.num_rows,
        len(rows.pairs), rows.num_entries, rows.num_rows, int(not whole),
    )  # fmt: skip
    if sizes.num_values >= 2**31:
        raise ValueError(f"blocks of {shape[0]} x {shape[1]} have more numbers than the GPU kernels can index (2^31).")
    parts = lines, columns.pairs.flatten(), columns.inputs, rows.pairs.flatten(), rows.inputs
    return torch.cat(parts).to(row_width.device, torch.int32), sizes


def _like_intervals(start: Int[Tensor, " n"], size: Int[Tensor, " n"]) -> Int[Tensor, " n"]:
    """An order in which each run of 64 intervals has much in common: halved again and again where that helps most."""
    groups, done = [torch.arange(len(start))], [torch.arange(0)]
    while groups:
        group = groups.pop()
        if len(group) <= TILE:
            done.append(group)
            continue
        half = -(-len(group) // (2 * TILE)) * TILE
        ways = []
        for key in (start, start + size):
            ordered = group[key[group].argsort(stable=True)]
            halves = ordered[:half], ordered[half:]
            ways.append((sum(len(part) * _span(start[part], size[part]) for part in halves), halves))
        groups.extend(reversed(min(ways, key=lambda way: way[0])[1]))
    return torch.cat(done)


def _span(start: Tensor, size: Tensor) -> int:
    return int((start + size).max() - start.min())


def _touched(lines: Tensor, start: Tensor, size: Tensor, length: int) -> Bool[Tensor, "slots tiles"]:
    """The tiles of an axis that the cyclic interval of each slot's line has elements in; none without a line."""
    if not len(lines):
        return torch.zeros(0, -(-length // TILE), dtype=torch.bool)
    start, size = start[lines.clamp(min=0)][:, None], size[lines.clamp(min=0)][:, None]
    first = torch.arange(0, length, TILE)
    straight = (start < (first + TILE).clamp(max=length)) & (start + size > first)
    return (straight | (start + size - length > first)) & (lines >= 0)[:, None]


def _by_tile(touched: Bool[Tensor, "slots n"]) -> Bool[Tensor, "tiles n"]:
    return touched.view(len(touched) // TILE, TILE, touched.shape[1]).any(1)


def _column_product(lines: Tensor, start: Tensor, size: Tensor, length: int) -> _Product:
    needs = _by_tile(_touched(lines, start, size, length))  # (tiles of slots, tiles of x)
    return _product(needs, _matched(needs), gathered=False)


def _matched(needs: Bool[Tensor, "tiles inputs"]) -> list[tuple[int, int]]:
    """Pairs of tiles with the most inputs in common, the best first; one may be left over, with -1 for the other."""
    count = len(needs)
    common = needs.float() @ needs.float().T
    first, second = torch.triu_indices(count, count, 1)
    best = common[first, second].argsort(descending=True, stable=True)
    free, pairs = set(range(count)), []
    for pair in zip(first[best].tolist(), second[best].tolist(), strict=True):
        if free.issuperset(pair):
            pairs.append(pair)
            free.difference_update(pair)
    return pairs + [(tile, -1) for tile in sorted(free)]


def _row_product(lines: Tensor, start: Tensor, size: Tensor, length: int, gathered: bool) -> _Product:
    touched = _touched(lines, start, size, length)
    needs = (touched if gathered else _by_tile(touched)).T  # (tiles of outputs, slots or tiles of slots)
    pairs = [(a, a + 1 if a + 1 < len(needs) else -1) for a in range(0, len(needs), 2)]
    return _product(needs, pairs, gathered)


def _product(needs: Bool[Tensor, "tiles inputs"], pairs: list[tuple[int, int]], gathered: bool) -> _Product:
    """The lists of all pairs, one after the other."""
    table, inputs = [], [torch.arange(0)]
    row = entry = 0
    for a, b in pairs:
        parts = _shared(needs[a], needs[b] if b >= 0 else None, TILE if gathered else 1)
        counts = [-(-len(part) // (TILE if gathered else 1)) for part in parts]
        table.append([a, b, row, entry, *counts])
        for part, count in zip(parts, counts, strict=True):
            fill = count * TILE - len(part) if gathered else 0
            inputs += [part, torch.full((fill,), -1)]
        entry += sum(counts)
        row += TILE * (2 * counts[0] + counts[1] + counts[2])
    return _Product(torch.tensor(table).view(-1, _FIELDS).long(), torch.cat(inputs), entry, row)


def _shared(a: Bool[Tensor, " inputs"], b: Bool[Tensor, " inputs"] | None, per_entry: int) -> list[Tensor]:
    """What both tiles of a pair take, only the first, only the second; what one needs is given to both where that is
    faster.
    """
    if b is None:
        return [a.new_zeros(0).long(), a.nonzero().flatten(), a.new_zeros(0).long()]
    ways = []
    for give_a, give_b in itertools.product((False, True), repeat=2):
        both = (a & b) | (a & ~b & give_a) | (b & ~a & give_b)
        parts = [part.nonzero().flatten() for part in (both, a & ~both, b & ~both)]
        pair, *single = (-(-len(part) // per_entry) for part in parts)
        seconds = _PAIR_TIME * pair + sum(count + _RUN_TIME * (count > 0) for count in single)
        ways.append((seconds, parts))
    return min(ways, key=lambda way: way[0])[1]


def value_rows(product: _Product) -> tuple[Int[Tensor, " rows"], Int[Tensor, " rows"]]:
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


def entry_inputs(product: _Product) -> Int[Tensor, "entries 64"]:
    """The 64 inputs of each entry, -1 for none; those of a tile at the end of its axis may lie beyond it."""
    inputs = product.inputs.long()
    if inputs.numel() != product.num_entries:
        return inputs.view(-1, TILE)
    return inputs[:, None] * TILE + torch.arange(TILE, device=inputs.device)


def pack(
    u: Float[Tensor, "lines out"], v: Float[Tensor, "lines in"], index: Int[Tensor, " index"], sizes: Sizes
) -> Float[Tensor, " values"]:
    """The factors of W = u^T v in the order of the layout; differentiable."""
    column, row = _places(index, sizes)
    return torch.cat([_at(v, *column).flatten(), _at(u.T, *row).flatten()])


def spread(
    values: Float[Tensor, " values"], index: Int[Tensor, " index"], sizes: Sizes
) -> tuple[Float[Tensor, "lines out"], Float[Tensor, "lines in"]]:
    """Back to the factors, with zeros outside of the blocks."""
    column, row = _places(index, sizes)
    first, second = values.split([TILE * sizes.column_rows, TILE * sizes.row_rows])
    v = _scattered(first, sizes.num_lines, sizes.in_features, *column)
    return _scattered(second, sizes.out_features, sizes.num_lines, *row).T, v


def _at(factor: Tensor, row: Tensor, column: Tensor, valid: Tensor) -> Tensor:
    if not factor.numel():
        return factor.new_zeros(valid.shape)
    return torch.where(valid, factor[row, column], 0)  # not a product: what lies elsewhere may be infinite


def _scattered(values: Tensor, rows: int, columns: int, row: Tensor, column: Tensor, valid: Tensor) -> Tensor:
    flat = values.new_zeros(rows * columns + 1)  # the last takes what has no place
    place = torch.where(valid, row * columns + column, rows * columns)
    return flat.index_add(0, place.flatten(), values)[:-1].view(rows, columns)


def _places(index: Tensor, sizes: Sizes) -> list[tuple[Tensor, Tensor, Tensor]]:
    """For every value of both products its row and column in V and in U^T, and whether it has one."""
    lines, column_pairs, column_inputs, row_pairs, row_inputs = index.split(sizes.parts)
    columns = _Product(column_pairs.view(-1, _FIELDS), column_inputs, sizes.column_entries, sizes.column_rows)
    rows = _Product(row_pairs.view(-1, _FIELDS), row_inputs, sizes.row_entries, sizes.row_rows)
    lines = torch.nn.functional.pad(lines.long(), (0, 1), value=-1)  # the last is the line of no slot
    slot, entry = value_rows(columns)
    first = _checked(lines[slot][:, None], entry_inputs(columns)[entry], sizes.num_lines, sizes.in_features)
    out, entry = value_rows(rows)
    line = lines[entry_inputs(rows)[entry]]  # -1 is the last
    return [first, _checked(out[:, None], line, sizes.out_features, sizes.num_lines)]


def _checked(row: Tensor, column: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    row, column = torch.broadcast_tensors(row, column)
    valid = (row >= 0) & (row < rows) & (column >= 0) & (column < columns)
    return row.clamp(0, max(0, rows - 1)), column.clamp(0, max(0, columns - 1)), valid

"""How a GPU keeps blocks: y = U (V x) as two products of dense tiles, 128 outputs x 64 inputs, planned once.

The rows of V ("lines", block_rank of them to a block) are given slots, lines of like intervals together; V x then
needs, for each tile of 128 slots, the tiles of 64 columns of x that its intervals touch. For U the outputs keep their
order, and the inputs are either tiles of 64 slots (`block_rank` a multiple of 64: such a tile is one block's) or lists
of 64 single slots, gathered. An "entry" is one such tile of numbers with the place of its inputs.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gblr.ops.host import on_host

OUT_TILE, IN_TILE = 128, 64
_NUMBERS = OUT_TILE * IN_TILE  # of an entry
_MOST_ROUNDS = 10  # of exchanges between pairs


class Sizes(NamedTuple):
    """What a launch has to know of a layout, as plain whole numbers."""

    out_features: int
    in_features: int
    num_lines: int
    num_slots: int  # a multiple of 128
    column_entries: int  # of z = V x
    row_entries: int  # of y = U z
    gathered: int  # whether the inputs of the second product are 64 single slots each

    @property
    def num_values(self) -> int:
        """Numbers that are stored, zeros that fill the tiles up included."""
        return sum(self.value_parts)

    @property
    def value_parts(self) -> list[int]:
        """Of the two products."""
        return [_NUMBERS * self.column_entries, _NUMBERS * self.row_entries]

    @property
    def column_tiles(self) -> int:
        return self.num_slots // OUT_TILE

    @property
    def row_tiles(self) -> int:
        return -(-self.out_features // OUT_TILE)

    @property
    def parts(self) -> list[int]:
        """Lengths of what an index holds: lines of the slots (-1 for none); begins and inputs of both products.

        Begins are where the entries of each tile begin, then twice where the last one's end.
        """
        inputs = self.row_entries * (IN_TILE if self.gathered else 1)
        return [self.num_slots, self.column_tiles + 2, self.column_entries, self.row_tiles + 2, inputs]


@on_host()
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
    whole = block_rank % IN_TILE == 0  # 64 slots are within one block
    lines = _slots(live, starts[1], widths[1], shape[1], whole)
    columns, column_inputs = _entries(_by(OUT_TILE, _touched(lines, starts[1], widths[1], shape[1])), gathered=False)
    reached = _touched(lines, starts[0], widths[0], shape[0])  # tiles of 64 outputs
    needs = _by(2, (_by(IN_TILE, reached) if whole else reached).T)
    rows, row_inputs = _entries(needs, gathered=not whole)
    sizes = Sizes(*shape, len(widths[0]), len(lines), int(columns[-1]), int(rows[-1]), int(not whole))
    if sizes.num_values >= 2**31:
        raise ValueError(f"blocks of {shape[0]} x {shape[1]} have more numbers than the GPU kernels can index (2^31).")
    parts = lines, columns, column_inputs, rows, row_inputs
    return torch.cat(parts).to(row_width.device, torch.int32), sizes


def _slots(live: Tensor, start: Tensor, size: Tensor, length: int, whole: bool) -> Int[Tensor, " slots"]:
    """The line of each slot, -1 for none: groups of 64 lines, two of like intervals to a tile of 128 slots."""
    order = live if whole else live[_like_intervals(start[live], size[live])]
    lines = torch.full((-(-len(order) // OUT_TILE) * OUT_TILE,), -1)
    lines[: len(order)] = order
    needs = _by(IN_TILE, _touched(lines, start, size, length))
    order = _matched(needs)
    long = _by(2, needs[order]).sum(1).argsort(descending=True, stable=True)  # long ones last would be waited for
    return lines.view(-1, IN_TILE)[order.view(-1, 2)[long].flatten()].flatten()


def _like_intervals(start: Int[Tensor, " n"], size: Int[Tensor, " n"]) -> Int[Tensor, " n"]:
    """An order in which each run of 64 intervals has much in common: halved again and again where that helps most."""
    groups, done = [torch.arange(len(start))], [torch.arange(0)]
    while groups:
        group = groups.pop()
        if len(group) <= IN_TILE:
            done.append(group)
            continue
        half = -(-len(group) // (2 * IN_TILE)) * IN_TILE
        ways = []
        for key in (start, start + size):
            ordered = group[key[group].argsort(stable=True)]
            halves = ordered[:half], ordered[half:]
            ways.append((sum(len(part) * _span(start[part], size[part]) for part in halves), halves))
        groups.extend(reversed(min(ways, key=lambda way: way[0])[1]))
    return torch.cat(done)


def _span(start: Tensor, size: Tensor) -> int:
    return int((start + size).max() - start.min())


def _matched(needs: Bool[Tensor, "groups inputs"]) -> Int[Tensor, " groups"]:
    """An order in which groups of an even number 2 i and 2 i + 1 need few inputs together.

    Neighbours by their middle at first; then pairs exchange members as long as that helps.
    """
    count = len(needs)
    if count <= 2:
        return torch.arange(count)
    needed = needs.float()
    together = needed.sum(1)[:, None] + needed.sum(1) - needed @ needed.T  # inputs that a pair would need
    middle = needed @ torch.arange(needs.shape[1]).float() / needed.sum(1).clamp(min=1)
    pairs = middle.argsort(stable=True).view(-1, 2)
    for _ in range(_MOST_ROUNDS):
        before = pairs.clone()
        for i in range(len(pairs)):
            a, b = pairs[i]
            c, d = pairs.unbind(1)
            now = together[a, b] + together[c, d]
            ways = torch.stack([together[a, c] + together[b, d], together[a, d] + together[b, c]]) - now
            ways[:, i] = 0
            way, j = divmod(int(ways.argmin()), len(pairs))
            if ways[way, j] < 0:
                first, second = pairs[j].tolist()
                swapped = ([a, first], [b, second]) if way == 0 else ([a, second], [b, first])
                pairs[i], pairs[j] = torch.tensor(swapped[0]), torch.tensor(swapped[1])
        if torch.equal(before, pairs):
            break
    return pairs.flatten()


def _touched(lines: Tensor, start: Tensor, size: Tensor, length: int) -> Bool[Tensor, "slots tiles"]:
    """The tiles of 64 of an axis that the cyclic interval of each slot's line has elements in; none without a line."""
    if not len(lines):
        return torch.zeros(0, -(-length // IN_TILE), dtype=torch.bool)
    start, size = start[lines.clamp(min=0)][:, None], size[lines.clamp(min=0)][:, None]
    first = torch.arange(0, length, IN_TILE)
    straight = (start < (first + IN_TILE).clamp(max=length)) & (start + size > first)
    return (straight | (start + size - length > first)) & (lines >= 0)[:, None]


def _by(count: int, touched: Bool[Tensor, "rows n"]) -> Bool[Tensor, "groups n"]:
    """What so many rows touch together; rows that are missing at the end touch nothing."""
    padded = torch.nn.functional.pad(touched, (0, 0, 0, -len(touched) % count))
    return padded.view(len(padded) // count, count, touched.shape[1]).any(1)


def _entries(needs: Bool[Tensor, "tiles inputs"], gathered: bool) -> tuple[Int[Tensor, " begins"], Int[Tensor, " m"]]:
    """Where the entries of each tile begin, and their inputs; every tile has one at least, as it has to be written."""
    begins, inputs = [0], [torch.arange(0)]
    for tile in needs:
        found = tile.nonzero().flatten()
        if gathered:
            fill = max(IN_TILE, -(-len(found) // IN_TILE) * IN_TILE) - len(found)
            found = torch.nn.functional.pad(found, (0, fill), value=-1)
        elif not len(found):
            found = torch.zeros(1, dtype=torch.long)
        inputs.append(found)
        begins.append(begins[-1] + len(found) // (IN_TILE if gathered else 1))
    return torch.tensor([*begins, begins[-1]]), torch.cat(inputs)


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
    first, second = values.split(sizes.value_parts)
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
    lines, column_begins, column_inputs, row_begins, row_inputs = index.long().split(sizes.parts)
    lines = torch.nn.functional.pad(lines, (0, 1), value=-1)  # the last is the line of no slot
    slot = _outputs(column_begins, sizes.column_entries)
    first = _checked(lines[slot][:, :, None], _inputs(column_inputs, False), sizes.num_lines, sizes.in_features)
    slots = _inputs(row_inputs, bool(sizes.gathered))
    line = lines[torch.where(slots < sizes.num_slots, slots, -1)]  # -1 is the last
    out = _outputs(row_begins, sizes.row_entries)
    return [first, _checked(out[:, :, None], line, sizes.out_features, sizes.num_lines)]


def _outputs(begins: Int[Tensor, " begins"], num_entries: int) -> Int[Tensor, "entries 128"]:
    """The outputs of each entry, without waiting for the device."""
    entry = torch.arange(num_entries, device=begins.device)
    tile = torch.searchsorted(begins[:-1].contiguous(), entry, right=True) - 1
    return tile[:, None] * OUT_TILE + torch.arange(OUT_TILE, device=begins.device)


def _inputs(inputs: Int[Tensor, " m"], gathered: bool) -> Int[Tensor, "entries 1 64"]:
    """The 64 inputs of each entry, -1 for none; those of a tile at the end of its axis may lie beyond it."""
    if gathered:
        return inputs.view(-1, 1, IN_TILE)
    return inputs[:, None, None] * IN_TILE + torch.arange(IN_TILE, device=inputs.device)


def _checked(row: Tensor, column: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    row, column = torch.broadcast_tensors(row, column)
    valid = (row >= 0) & (row < rows) & (column >= 0) & (column < columns)
    return row.clamp(0, max(0, rows - 1)), column.clamp(0, max(0, columns - 1)), valid

"""From a structured layer to plain operators for export: contents cut into tiles, and the indices between them."""

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from gblr.conversion.onnx_layers import (
    ComposedLayer,
    ConvPieces,
    Gather,
    LinearPieces,
    Rows,
    Spread,
    Sums,
    TiledConv2d,
    TiledLinear,
)
from gblr.conversion.onnx_tiling import MANY, MIXED, ColTiling, RowTiling, Tiling, dense_score, tile_matrix
from gblr.layers.conv import ConvGeometry, StructuredConv2d
from gblr.layers.structured import MatrixModule, StructuredLinear
from gblr.matrices.base import StructuredMatrix
from gblr.matrices.gblr import GBLRMatrix
from gblr.matrices.low_rank import LowRankMatrix
from gblr.matrices.packed import PackedGBLR
from gblr.matrices.structure import Structure
from gblr.ops.host import on_host


@on_host()
def plain_layer(layer: MatrixModule, max_padding: float, compose: bool) -> nn.Module:
    """The same layer from plain operators: over tiles; or composed, where that is allowed and expected to be faster; or
    dense, where that is no larger.

    Layers over other formats stay as they are: their products are plain operators already.
    """
    matrix = layer.matrix
    if isinstance(layer, StructuredLinear) and isinstance(matrix, PackedGBLR | GBLRMatrix):
        return _plain(layer, None, max_padding, compose).to(layer.u.device)
    # of low rank too: its own product would unfold all patches
    if isinstance(layer, StructuredConv2d) and isinstance(matrix, PackedGBLR | GBLRMatrix | LowRankMatrix):
        return _plain(layer, layer.geometry, max_padding, compose).to(layer.u.device)
    return layer


def _plain(
    layer: StructuredLinear | StructuredConv2d, geometry: ConvGeometry | None, max_padding: float, compose: bool
) -> nn.Module:
    packed = _packed(layer.matrix)
    bias = None if layer.bias is None else layer.bias.cpu()
    prices, unit = (MIXED, 1) if geometry is None else (MANY, math.prod(geometry.kernel_size))
    rows, cols = tile_matrix(packed, max_padding, prices, unit)
    composed = compose and rows.score + cols.score > dense_score(packed.shape, prices)
    stored = packed.num_params + 2 * packed.structure.num_blocks if composed else rows.num_stored + cols.num_stored
    if stored >= packed.shape[0] * packed.shape[1]:
        return layer.to_dense_layer()
    if composed:
        return ComposedLayer(*_spreads(packed), bias, geometry)
    return _tiled(packed, rows, cols, bias, geometry)


def _spreads(packed: PackedGBLR) -> tuple[Spread, Spread]:
    s, rank, (out_features, in_features) = packed.structure, packed.block_rank, packed.shape
    return (
        Spread(packed.u, s.row_width, s.row_location, rank, out_features),
        Spread(packed.v, s.col_width, s.col_location, rank, in_features),
    )


def _tiled(
    packed: PackedGBLR, rows: RowTiling, cols: ColTiling, bias: Tensor | None, geometry: ConvGeometry | None
) -> nn.Module:
    u, v = packed.factors()
    tiles, slots = _units(cols)
    content = _content(cols, tiles, slots, v)
    index = None if torch.equal(tiles, torch.arange(cols.num_tiles)) else tiles
    rest = _sums(cols, tiles, slots), _rows(rows, cols, u), bias
    if geometry is None:
        return TiledLinear(LinearPieces(content, index, cols.length), *rest)
    return TiledConv2d(ConvPieces(content, index, geometry), *rest)


def _packed(matrix: StructuredMatrix) -> PackedGBLR:
    """As packed blocks on the CPU; without any, one block of zeros, so that there is something to multiply."""
    matrix = matrix.to("cpu").map_tensors(Tensor.detach)
    if isinstance(matrix, LowRankMatrix):
        matrix = GBLRMatrix.from_low_rank(matrix.u, matrix.v)
    packed = PackedGBLR.from_gblr(matrix) if isinstance(matrix, GBLRMatrix) else matrix
    assert isinstance(packed, PackedGBLR)
    if packed.structure.num_blocks:
        return packed
    one, zero = torch.ones(1, dtype=torch.long), torch.zeros(1, dtype=torch.long)
    return PackedGBLR(Structure(one, zero, one, zero), packed.u.new_zeros(1), packed.v.new_zeros(1), 1, packed.shape)


def _units(cols: ColTiling) -> tuple[Int[Tensor, " units"], Int[Tensor, "units unit"]]:
    """The tile of each unit, and its chunks, -1 in empty slots; there is one, for chunks of few pieces to add."""
    slots = members(cols.touch.T)
    slots = nn.functional.pad(slots, (0, -slots.shape[1] % cols.unit), value=-1).unflatten(1, (-1, cols.unit))
    tiles, place = (slots >= 0).any(2).nonzero(as_tuple=True)
    slots = slots[tiles, place]
    if cols.num_tiles > 1 and bool((slots >= 0).all()):
        tiles, slots = nn.functional.pad(tiles, (0, 1)), nn.functional.pad(slots, (0, 0, 0, 1), value=-1)
    return tiles, slots


def members(inside: Bool[Tensor, "rows columns"]) -> Int[Tensor, "rows most"]:
    """The True columns of each row, then -1; one column at least.

    >>> members(torch.tensor([[False, True, True], [True, False, False]]))
    tensor([[ 1,  2],
            [ 0, -1]])
    """
    count = inside.sum(1)
    index = inside.byte().argsort(dim=1, descending=True, stable=True)[:, : max(1, int(count.max()))]
    return index.masked_fill(torch.arange(index.shape[1]) >= count[:, None], -1)


def _content(
    tiling: Tiling, tiles: Int[Tensor, " m"], slots: Int[Tensor, "m n"], content: Float[Tensor, "ranks length"]
) -> Float[Tensor, "m slot_ranks tile"]:
    """What stands in the slots of these tiles, zeros in empty ones and where blocks do not reach."""
    chunks, num_tiles = tiling.touch.shape
    whole = content.new_zeros(chunks * tiling.chunk, tiling.rank, tiling.padded_length)
    whole[: len(tiling.order), :, : tiling.length] = content.unflatten(0, (-1, tiling.rank))[tiling.order]
    whole = whole.view(chunks, tiling.rows, num_tiles, tiling.tile)
    picked = whole[slots.clamp(min=0), :, tiles[:, None]]  # (m, n, rows, tile)
    return (picked * (slots >= 0)[..., None, None]).flatten(1, 2)


def _sums(cols: ColTiling, tiles: Int[Tensor, " units"], slots: Int[Tensor, "units unit"]) -> Sums:
    """For each batch of chunks, the pieces of a chunk in a column; chunks with fewer of them add an empty one."""
    if cols.num_tiles == 1:
        return Sums([], cols.rows)
    number, taken = torch.arange(slots.numel()).view(slots.shape), slots >= 0
    piece = torch.full(cols.touch.shape, -1)
    piece[slots[taken], tiles[:, None].expand_as(slots)[taken]] = number[taken]
    empty = int(number[~taken][0])
    indices = []
    for chunks in cols.sum_batches:
        found = members(cols.touch[chunks])
        indices.append(piece[chunks[:, None], found.clamp(min=0)].masked_fill(found < 0, empty).T)
    return Sums(indices, cols.rows)


def _rows(rows: RowTiling, cols: ColTiling, u: Float[Tensor, "ranks out"]) -> Rows:
    position = _positions(cols)
    slots = [members(rows.touch.T[tiles]) for tiles in rows.batches]
    contents = [_content(rows, *pair, u).mT for pair in zip(rows.batches, slots, strict=True)]
    taken = [slot.clamp(min=0) for slot in slots]  # what empty slots gather is multiplied by zeros
    before: nn.Module = nn.Identity()
    if rows.num_tiles == 1:
        contents = [_in_order_of_z(contents[0], position, len(cols.touch) * cols.chunk)]
        gathers: list[nn.Module] = [nn.Identity()]
    elif rows.chunk == 1:
        gathers = [Gather(position[slot].flatten(), rows.rank) for slot in taken]
    else:
        before, gathers = _reorder(rows, position), [Gather(slot.flatten(), rows.rows) for slot in taken]
    after = Gather(torch.cat(rows.batches).argsort(), rows.tile) if len(rows.batches) > 1 else nn.Identity()
    return Rows(contents, gathers, rows.length, before, after)


def _positions(cols: ColTiling) -> Int[Tensor, " k"]:
    """The place of each block in z, which has the chunks batch by batch."""
    chunk = torch.cat(cols.sum_batches).argsort()
    place = torch.arange(len(cols.order))
    position = torch.empty_like(place)
    position[cols.order] = chunk[place // cols.chunk] * cols.chunk + place % cols.chunk
    return position


def _in_order_of_z(
    content: Float[Tensor, "1 out ranks"], position: Int[Tensor, " k"], num_places: int
) -> Float[Tensor, "1 out z"]:
    blocks = content.unflatten(2, (len(position), -1))
    spread = content.new_zeros(*content.shape[:2], num_places, blocks.shape[3])
    spread[:, :, position] = blocks
    return spread.flatten(2)


def _reorder(rows: Tiling, position: Int[Tensor, " k"]) -> Gather:
    """z in the order of the rows' chunks, the last of which may lack blocks."""
    missing = len(rows.touch) * rows.chunk - len(position)
    return Gather(torch.cat([position[rows.order], position.new_zeros(missing)]), rows.rank)

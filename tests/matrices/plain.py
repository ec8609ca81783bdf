"""Random matrices of every format, and their products as plain Python loops over scalars that count multiplications.

A new format adds its two functions here and one line to MATRICES.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gblr.matrices.base import StructuredMatrix
from gblr.matrices.blast import BlastMatrix
from gblr.matrices.gblr import GBLRMatrix
from gblr.matrices.low_rank import LowRankMatrix
from gblr.matrices.monarch import MonarchMatrix, monarch_permutation
from gblr.matrices.packed import PackedGBLR
from gblr.matrices.pixelfly import PixelflyMatrix, butterfly_support
from gblr.matrices.structure import Structure


class Meter:
    """Counts multiplications and remembers which stored numbers took part in one."""

    def __init__(self) -> None:
        self.num_mults = 0
        self.weights_used: set[tuple[int, ...]] = set()

    def weights(self, tensor: Tensor) -> Any:
        """The tensor as nested lists of counting scalars."""
        which = tensor.data_ptr()

        def nest(values: Any, index: tuple[int, ...]) -> Any:
            if isinstance(values, list):
                return [nest(value, (*index, i)) for i, value in enumerate(values)]
            return Weight(values, (which, *index), self)

        return nest(tensor.tolist(), ())


@dataclass
class Weight:
    value: float
    place: tuple[int, ...]
    meter: Meter

    def __mul__(self, x: float) -> float:
        self.meter.num_mults += 1
        self.meter.weights_used.add(self.place)
        return self.value * x


def dot(weights: Iterable[Weight], x: Iterable[float]) -> float:
    return sum(w * value for w, value in zip(weights, x, strict=True))


def divisor(n: int, most: int) -> int:
    return max(d for d in range(1, most + 1) if n % d == 0)


def random_low_rank(out_features: int, in_features: int, generator: torch.Generator) -> LowRankMatrix:
    return LowRankMatrix(randn(2, out_features, generator=generator), randn(2, in_features, generator=generator))


def low_rank_loop(matrix: LowRankMatrix, x: list[float], meter: Meter) -> list[float]:
    z = [dot(row, x) for row in meter.weights(matrix.v)]
    u = meter.weights(matrix.u)
    return [dot((row[i] for row in u), z) for i in range(matrix.shape[0])]


def random_gblr(out_features: int, in_features: int, generator: torch.Generator) -> GBLRMatrix:
    """Seven blocks of rank 2; a dead one, a half-dead one, a full one, one that wraps around and two that are equal."""

    def draw(high: int) -> Tensor:
        return torch.randint(0, high, (7,), generator=generator)

    row_width, row_location = draw(out_features + 1), draw(out_features)
    col_width, col_location = draw(in_features + 1), draw(in_features)
    row_width[:3] = torch.tensor([0, 0, out_features])
    col_width[:3] = torch.tensor([0, in_features, in_features])
    row_location[3], col_location[3] = out_features - 1, in_features - 1
    for t in (row_width, row_location, col_width, col_location):
        t[5] = t[4]
    structure = Structure(row_width, row_location, col_width, col_location)
    return GBLRMatrix(
        structure, randn(7, 2, out_features, generator=generator), randn(7, 2, in_features, generator=generator)
    )


def gblr_loop(matrix: GBLRMatrix, x: list[float], meter: Meter) -> list[float]:
    """Section 3.1, "Efficiency": cropped v dot cropped x, then a scaled add of cropped u."""
    out_features, in_features = matrix.shape
    y = [0.0] * out_features
    u, v = meter.weights(matrix.u), meter.weights(matrix.v)
    places = zip(*(t.tolist() for t in vars(matrix.structure).values()), strict=True)
    for k, (row_width, row_location, col_width, col_location) in enumerate(places):
        if row_width == 0 or col_width == 0:
            continue
        rows = [(row_location + i) % out_features for i in range(row_width)]
        cols = [(col_location + j) % in_features for j in range(col_width)]
        for u_row, v_row in zip(u[k], v[k], strict=True):
            z = dot((v_row[j] for j in cols), (x[j] for j in cols))
            for i in rows:
                y[i] += u_row[i] * z
    return y


def random_packed(out_features: int, in_features: int, generator: torch.Generator) -> PackedGBLR:
    return PackedGBLR.from_gblr(random_gblr(out_features, in_features, generator))


def packed_loop(matrix: PackedGBLR, x: list[float], meter: Meter) -> list[float]:
    """As `gblr_loop`, but the cropped numbers are read off one after the other."""
    out_features, in_features = matrix.shape
    y = [0.0] * out_features
    u, v = iter(meter.weights(matrix.u)), iter(meter.weights(matrix.v))
    places = zip(*(t.tolist() for t in vars(matrix.structure).values()), strict=True)
    for row_width, row_location, col_width, col_location in places:
        cols = [(col_location + j) % in_features for j in range(col_width)]
        for _ in range(matrix.block_rank):
            z = dot([next(v) for _ in cols], [x[j] for j in cols])
            for i in range(row_width):
                y[(row_location + i) % out_features] += next(u) * z
    return y


def random_monarch(out_features: int, in_features: int, generator: torch.Generator) -> MonarchMatrix:
    num_blocks = max(d for d in (1, 2, 3) if out_features % d == 0 and in_features % d == 0)
    inner_block = min(out_features, in_features) // num_blocks
    return MonarchMatrix(
        randn(num_blocks, out_features // num_blocks, inner_block, generator=generator),
        randn(num_blocks, inner_block, in_features // num_blocks, generator=generator),
    )


def monarch_loop(matrix: MonarchMatrix, x: list[float], meter: Meter) -> list[float]:
    num_blocks, inner_block, in_block = matrix.right.shape
    right, left = meter.weights(matrix.right), meter.weights(matrix.left)
    z = [dot(row, x[b * in_block : (b + 1) * in_block]) for b in range(num_blocks) for row in right[b]]
    z = [z[i] for i in monarch_permutation(num_blocks, inner_block).tolist()]
    return [dot(row, z[b * inner_block : (b + 1) * inner_block]) for b in range(num_blocks) for row in left[b]]


def random_pixelfly(out_features: int, in_features: int, generator: torch.Generator) -> PixelflyMatrix:
    grid = divisor(out_features, 4), divisor(in_features, 4)
    rows, cols = butterfly_support(grid, max_stride=2)
    blocks = randn(len(rows), out_features // grid[0], in_features // grid[1], generator=generator)
    u, v = randn(2, out_features, generator=generator), randn(2, in_features, generator=generator)
    return PixelflyMatrix(blocks, rows, cols, u, v, grid)


def pixelfly_loop(matrix: PixelflyMatrix, x: list[float], meter: Meter) -> list[float]:
    y = low_rank_loop(LowRankMatrix(matrix.u, matrix.v), x, meter)
    _, height, width = matrix.blocks.shape
    places = zip(meter.weights(matrix.blocks), matrix.block_row.tolist(), matrix.block_col.tolist(), strict=True)
    for block, tile_row, tile_col in places:
        for i, row in enumerate(block):
            y[tile_row * height + i] += dot(row, x[tile_col * width : (tile_col + 1) * width])
    return y


def random_blast(out_features: int, in_features: int, generator: torch.Generator) -> BlastMatrix:
    rows, cols = divisor(out_features, 3), divisor(in_features, 4)
    return BlastMatrix(
        randn(rows, out_features // rows, 2, generator=generator),
        randn(cols, in_features // cols, 2, generator=generator),
        randn(rows, cols, 2, generator=generator),
    )


def blast_loop(matrix: BlastMatrix, x: list[float], meter: Meter) -> list[float]:
    (_, tile_out, rank), (tile_cols, tile_in, _) = matrix.u.shape, matrix.v.shape
    u, v, s = meter.weights(matrix.u), meter.weights(matrix.v), meter.weights(matrix.s)
    z = [
        [dot((v[j][n][r] for n in range(tile_in)), x[j * tile_in : (j + 1) * tile_in]) for r in range(rank)]
        for j in range(tile_cols)
    ]
    y = []
    for u_i, s_i in zip(u, s, strict=True):
        mixed = [sum(s_i[j][r] * z[j][r] for j in range(tile_cols)) for r in range(rank)]
        y += [dot(u_i[o], mixed) for o in range(tile_out)]
    return y


def randn(*shape: int, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=generator)


@dataclass(frozen=True)
class Format:
    make: Callable[[int, int, torch.Generator], StructuredMatrix]  # (out_features, in_features, generator), float64
    loop: Callable[[Any, list[float], Meter], list[float]]


MATRICES = {
    "low_rank": Format(random_low_rank, low_rank_loop),
    "gblr": Format(random_gblr, gblr_loop),
    "packed": Format(random_packed, packed_loop),
    "monarch": Format(random_monarch, monarch_loop),
    "pixelfly": Format(random_pixelfly, pixelfly_loop),
    "blast": Format(random_blast, blast_loop),
}

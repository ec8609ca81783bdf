"""Random Gaudi layers that the tests of layers share."""

import math
from typing import Any

import torch

from gblr.layers.gaudi import GaudiLinear, GaudiModule
from gblr.matrices.gblr import GBLRMatrix
from gblr.matrices.structure import Structure

STRUCTURE = ("width_frac", "location_frac", "sigma", "_row_table", "_col_table")


def scatter_blocks(layer: GaudiModule, seed: int = 0) -> None:
    """Random widths and locations; a full block, a dead one, one that wraps around."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        layer.width_frac.uniform_(0.2, 0.8, generator=generator)
        layer.location_frac.uniform_(0, 0.99, generator=generator)
        layer.width_frac[:, 0] = 1.0
        layer.width_frac[0, 1] = 0.0
        layer.location_frac[:, 2] = 0.9


def random_gaudi(
    in_features: int = 12, out_features: int = 16, sigma: float = math.inf, bias: bool = True, **options: Any
) -> GaudiLinear:
    torch.manual_seed(0)
    layer = GaudiLinear(in_features, out_features, bias=bias, **options)
    scatter_blocks(layer)
    layer.set_sigma(sigma)
    return layer


def three_blocks(out_features: int = 16, in_features: int = 12, block_rank: int = 1) -> GBLRMatrix:
    """A full block, one that wraps around both axes, and one in the middle."""
    generator = torch.Generator().manual_seed(1)
    structure = Structure(
        *(torch.tensor(v) for v in ([out_features, 5, 4], [0, 13, 6], [in_features, 3, 7], [0, 10, 2]))
    )
    u = torch.randn(3, block_rank, out_features, generator=generator)
    return GBLRMatrix(structure, u, torch.randn(3, block_rank, in_features, generator=generator))


def aligned_blocks(**changes: int) -> GBLRMatrix:
    """16 x 12, of rank 2: as `three_blocks`, at multiples of 4, but for the `changes` to the second block."""
    places = {"row_width": [16, 8, 4], "row_location": [0, 12, 8], "col_width": [12, 4, 8], "col_location": [0, 8, 0]}
    for name, value in changes.items():
        places[name][1] = value
    matrix = three_blocks(block_rank=2)
    return GBLRMatrix(Structure(**{name: torch.tensor(value) for name, value in places.items()}), matrix.u, matrix.v)

"""What a dense weight becomes. A config says what; `gblr.fit` and `gblr.convert_` do it."""

import numbers
from dataclasses import dataclass, replace
from typing import Literal

import torch

Allocation = Literal["uniform", "global"]


@dataclass(frozen=True)
class Config:
    """`relative_cost`: multiplications of the structured layers over those of their dense originals, at most.

    `allocation="uniform"` gives every layer that cost; `"global"` spends the same total where it lowers the error most
    (`gblr.convert_` only: it needs all layers).
    """

    relative_cost: float
    allocation: Allocation = "uniform"

    def for_dtype(self, dtype: torch.dtype) -> "Config":
        """The config for weights that will be stored in that dtype."""
        return self

    def __post_init__(self) -> None:
        check_number(relative_cost=self.relative_cost)
        if not 0 < self.relative_cost <= 1:
            raise ValueError(
                f"`relative_cost` must lie in (0, 1], a fraction of the dense multiplications; got "
                f"{self.relative_cost}."
            )
        check_choice("allocation", self.allocation, Allocation)


@dataclass(frozen=True)
class LowRankConfig(Config):
    """Truncated SVD. Ranks are multiples of `rank_multiple` where the budget allows at least one (8 suits most
    hardware).

    >>> gblr.fit(torch.randn(64, 64), LowRankConfig(relative_cost=0.5))
    LowRankMatrix(64 x 64, relative_cost=0.500)
    """

    rank_multiple: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(1, rank_multiple=self.rank_multiple)


@dataclass(frozen=True)
class MonarchConfig(Config):
    """Block-diagonal, permutation, block-diagonal. Takes the dearest number of blocks that is not above the cost.

    `steps` sweeps over the tiles where inputs are known; without them the projection is one SVD per tile.

    >>> gblr.fit(torch.randn(64, 64), MonarchConfig(relative_cost=0.6))  # 2 / 4; the next step, 2 / 3, has no blocks
    MonarchMatrix(64 x 64, relative_cost=0.500)
    """

    steps: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(0, steps=self.steps)


@dataclass(frozen=True)
class PixelflyConfig(Config):
    """Block-sparse butterfly plus low rank. `low_rank_share` of the cost goes to the low-rank part, and what the
    butterfly leaves over.

    Tiles have `tile` rows and columns, fewer where that does not divide an axis or would be too dear. `steps` times one
    part is fitted to what the other leaves.

    >>> gblr.fit(torch.randn(64, 64), PixelflyConfig(relative_cost=0.5))
    PixelflyMatrix(64 x 64, relative_cost=0.500)
    """

    tile: int = 32
    low_rank_share: float = 0.3
    steps: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(1, tile=self.tile, steps=self.steps)
        if not 0 <= self.low_rank_share < 1:
            raise ValueError(f"`low_rank_share` must lie in [0, 1); got {self.low_rank_share}.")


@dataclass(frozen=True)
class BlastConfig(Config):
    """Tiles that share factors along rows and columns, `num_tiles` x `num_tiles` of them, fewer where that does not
    divide both axes.

    There are `steps` sweeps of refinement. Factors may grow on the way and cancel, which half precision does not bear;
    so of all sweeps that one is kept whose factors, rounded to `dtype`, have the lowest error. For half-precision
    weights `gblr.convert_` sets `dtype` to theirs.

    >>> gblr.fit(torch.randn(64, 64), BlastConfig(relative_cost=0.5))
    BlastMatrix(64 x 64, relative_cost=0.492)
    """

    num_tiles: int = 4
    steps: int = 100
    dtype: torch.dtype | None = None

    def for_dtype(self, dtype: torch.dtype) -> "BlastConfig":
        return replace(self, dtype=dtype) if torch.finfo(dtype).bits < 32 else self

    def __post_init__(self) -> None:
        super().__post_init__()
        check_at_least(1, num_tiles=self.num_tiles)
        check_at_least(0, steps=self.steps)


TRAINABLE_GROWTH = 3.0
STIFF_GROWTH = 300.0  # what a model that is not trained any more may have
_ROUNDING_SHARE = 0.05  # relative error that rounding the factors may cause

GaudiInit = Literal["correlation", "low_rank", "full", "scratch"]
Refinement = Literal["descent", "gradient", "none"]


@dataclass(frozen=True)
class GaudiConfig(Config):
    """A generalized block-low-rank (GBLR) matrix whose structure can go on learning.

    Blocks have rank `block_rank` (1 as in the paper, 16 and more for matrix units and wide layers), or that of the
    smaller axis of a weight, where that is less. Their widths and locations are multiples of `align` elements; full
    widths are always allowed. `num_blocks` is how many there may be, min(out, in) // block_rank if None. With
    `rounding=False` widths and locations of the layer stay real while they learn.

    `init` says where the blocks start: `"correlation"` is Algorithm 2 of the paper with its `smoothing_std` (gamma) and
    `threshold_ratio` (tau over the maximum), `"low_rank"` the truncated SVD, `"full"` blocks of full width at random
    places; `"scratch"` takes nothing from the weight but its variance. `refine` says how they go on from there:
    `"descent"` updates one block at a time by its best interval, exactly; `"gradient"` is the paper's refinement, AdamW
    on Gaudi masks and a projection on the budget; `"none"` keeps the start. `steps` counts sweeps over all blocks, or
    gradient steps; None takes what suits the refinement.

    `max_growth` refuses factors that are together larger than that many times the weight and cancel: training does not
    bear them, as small changes of contents or intervals are then large ones of the weight. A model that will not be
    trained can have 300 in place of 3, which lowers the error at high costs; for half-precision weights it is lowered
    to what their rounding allows.

    >>> matrix = gblr.fit(torch.randn(64, 64), GaudiConfig(relative_cost=0.5, block_rank=8, align=8))
    >>> matrix.block_rank, matrix.relative_cost <= 0.5
    (8, True)
    """

    block_rank: int = 1
    align: int = 1
    init: GaudiInit = "correlation"
    refine: Refinement = "descent"
    steps: int | None = None
    num_blocks: int | None = None
    smoothing_std: float = 30.0
    threshold_ratio: float = 0.9
    rounding: bool = True
    max_growth: float = TRAINABLE_GROWTH

    def for_dtype(self, dtype: torch.dtype) -> "GaudiConfig":
        """With `max_growth` lowered to what numbers of that precision can hold."""
        return replace(self, max_growth=min(self.max_growth, _ROUNDING_SHARE / torch.finfo(dtype).eps))

    def for_shape(self, out_features: int, in_features: int) -> "GaudiConfig":
        """With a `block_rank` that a weight of that shape can have."""
        return replace(self, block_rank=min(self.block_rank, out_features, in_features))

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("init", self.init, GaudiInit)
        check_choice("refine", self.refine, Refinement)
        if not self.max_growth >= 1:
            raise ValueError(f"`max_growth` must be at least 1, which is no growth; got {self.max_growth}.")
        check_at_least(1, block_rank=self.block_rank, align=self.align)
        if self.steps is not None:
            check_at_least(0, steps=self.steps)
        if self.num_blocks is not None:
            check_at_least(1, num_blocks=self.num_blocks)
        if not 0 <= self.threshold_ratio <= 1:
            raise ValueError(
                f"`threshold_ratio` must lie in [0, 1], a share of the maximum; got {self.threshold_ratio}."
            )
        if not self.smoothing_std >= 0:
            raise ValueError(f"`smoothing_std` must be at least 0, in elements; got {self.smoothing_std}.")


def check_choice(name: str, value: object, choices: object) -> None:
    allowed = getattr(choices, "__args__", ())
    if value not in allowed:
        raise ValueError(f"`{name}` must be one of {', '.join(map(repr, allowed))}; got {value!r}.")


def check_number(**values: object) -> None:
    """Real ones; what a configuration file has as text must be turned into them."""
    for name, value in values.items():
        if not isinstance(value, numbers.Real):
            raise TypeError(f"`{name}` must be a number; got {value!r}.")


def check_at_least(least: int, **values: int) -> None:
    for name, value in values.items():
        if not isinstance(value, numbers.Integral):
            raise TypeError(f"`{name}` must be a whole number; got {value!r}.")
        if value < least:
            raise ValueError(f"`{name}` must be at least {least}; got {value}.")

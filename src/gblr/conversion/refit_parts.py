"""The fits of `refit.py`: structured matrices, those of one shape together, to goals on the inputs that were seen."""

from collections.abc import Iterator, Sequence
from dataclasses import InitVar, dataclass, field, replace
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from gblr.conversion.convert import build_layer
from gblr.conversion.goals import Halves, goal
from gblr.conversion.sensitivity import row_factors
from gblr.fitting.blocks import Blocks
from gblr.fitting.config import (
    TRAINABLE_GROWTH,
    BlastConfig,
    Config,
    GaudiConfig,
    LowRankConfig,
    MonarchConfig,
    PixelflyConfig,
)
from gblr.fitting.descent import refit as refit_contents
from gblr.fitting.fit import fit_batch, prepare_gram, unusual_size
from gblr.fitting.gblr import refit_batch
from gblr.fitting.metric import make_metric
from gblr.fitting.svd import squared_error
from gblr.fitting.threads import few_threads
from gblr.layers.gaudi import GaudiModule
from gblr.layers.structured import MatrixModule
from gblr.matrices.base import StructuredMatrix
from gblr.matrices.blast import BlastMatrix
from gblr.matrices.gblr import GBLRMatrix
from gblr.matrices.low_rank import LowRankMatrix
from gblr.matrices.monarch import MonarchMatrix
from gblr.matrices.packed import PackedGBLR
from gblr.matrices.pixelfly import PixelflyMatrix

Freedom = Literal["frozen", "free"]
_SWEEPS = 4  # over the blocks, where only their contents move


@dataclass
class Part:
    """One matrix of the model: its layer, the dense weight, and what was seen of its inputs and goals (`halves`, which
    are not kept: they take several times the memory of the weight).

    `refit_parts` puts a new layer in the place of `layer`. `errors` are the squared errors of the outputs before and
    after, and `size` that of the outputs, all around what the goal would give and weighted by the `sensitivity`
    of each output, where that is known.
    """

    layer: Any
    dense: Float[Tensor, "out in"]
    halves: InitVar[Halves]
    sensitivity: Float[Tensor, " out"] | None = None
    errors: list[float] = field(default_factory=list)

    def __post_init__(self, halves: Halves) -> None:
        whole, biased = halves.whole(), self.layer.bias is not None
        self.mean_input, self.mean_output = (sums / max(1, whole.count) for sums in (whole.inputs, whole.outputs))
        used = whole.centred() if biased else whole
        self.goal = goal(self.dense.double(), halves.centred() if biased else halves, used)
        self.gram = prepare_gram(used.gram[None])[0]
        self.matrix = _matrix(self.layer)
        rows = torch.ones_like(self.goal[:, 0]) if self.sensitivity is None else row_factors(self.sensitivity)
        self.rows = rows.to(self.goal)
        self.size = self._error(0 * self.goal)
        unusual = unusual_size((self.rows[:, None] * self.goal)[None])
        self.unusual = 1.0 if unusual is None else float(unusual)

    @property
    def factors(self) -> Float[Tensor, " out"] | None:
        """What rows are multiplied by before a fit, and divided by after it."""
        return None if self.sensitivity is None and self.unusual == 1 else self.rows / self.unusual

    @property
    def dtype(self) -> torch.dtype:
        """In which it is fitted: that of the layer, float32 at least."""
        return torch.promote_types(next(self.layer.parameters()).dtype, torch.float32)

    def _error(self, weight: Tensor) -> float:
        return float(squared_error((self.rows[:, None] * (weight - self.goal))[None], self.gram[None]))

    def take(self, fitted: StructuredMatrix) -> None:
        """The new matrix, unless it is worse than the present one; with the bias that belongs to it."""
        if self.factors is not None:
            fitted = fitted.scale_rows((1 / self.factors).to(self.dtype))
        self.errors = [self._error(m.to(torch.float64).to_dense()) for m in (self.matrix, fitted)]
        if not self.errors[1] < self.errors[0]:
            fitted, self.errors[1] = self.matrix, self.errors[0]
        bias = None
        if self.layer.bias is not None:
            missing = self.mean_output - fitted.to(torch.float64).to_dense() @ self.mean_input
            bias = missing.to(self.layer.bias.dtype)
        geometry = getattr(self.layer, "geometry", None)
        new = build_layer(_config(self.matrix, self.layer), _in_format(fitted, self.layer), bias, geometry)
        if isinstance(new, MatrixModule) and (planned := getattr(self.layer, "planned", None)):
            new.planned = planned  # the form that `harden_` chose
            new.prepare()
        self.layer = new


def refit_parts(parts: Sequence[Part], structure: Freedom, max_growth: float = TRAINABLE_GROWTH) -> None:
    """Fits every part to its goal. GBLR matrices of one shape go together, which on a GPU takes as long as one."""
    for alike in _groups(parts, structure):
        with few_threads(alike[0].goal):
            fitted = _fit(alike, structure, max_growth)
        for part, matrix in zip(alike, fitted, strict=True):
            part.take(matrix)


def _groups(parts: Sequence[Part], structure: Freedom) -> Iterator[list[Part]]:
    groups: dict[Any, list[Part]] = {}
    for i, part in enumerate(parts):
        together = _is_free(part, structure) and part.matrix.num_mults > 0
        key = (part.goal.shape, part.dtype, _fitted_by(part)) if together else i
        groups.setdefault(key, []).append(part)
    yield from groups.values()


def _is_free(part: Part, structure: Freedom) -> bool:
    """Whether the blocks of a GBLR matrix may move."""
    return isinstance(part.matrix, GBLRMatrix) and structure == "free" and isinstance(part.layer, GaudiModule)


def _fitted_by(part: Part, max_growth: float = TRAINABLE_GROWTH) -> Config:
    config = _config(part.matrix, part.layer)
    if isinstance(config, GaudiConfig):
        config = replace(config, max_growth=max_growth)
    return config.for_dtype(next(part.layer.parameters()).dtype)


def _fit(parts: Sequence[Part], structure: Freedom, max_growth: float) -> list[StructuredMatrix]:
    first = parts[0].matrix
    if not first.num_mults:
        return [part.matrix for part in parts]  # a layer that was given nothing stays so
    goals = torch.stack([(part.goal if part.factors is None else part.factors[:, None] * part.goal) for part in parts])
    goals = goals.to(parts[0].dtype)
    gram = torch.stack([part.gram.to(part.dtype) for part in parts])
    if isinstance(first, GBLRMatrix) and not _is_free(parts[0], structure):
        return [_with_new_contents(_scaled(parts[0]), goals, gram)]
    budget = torch.tensor([float(part.matrix.num_mults) for part in parts], device=goals.device)
    if isinstance(first, GBLRMatrix):
        start = Blocks.stack([_blocks(_scaled(part)).padded(part.layer.num_blocks) for part in parts])
        return list(refit_batch(_fitted_by(parts[0], max_growth), goals, gram, budget, start))  # type: ignore[arg-type]
    return fit_batch(_fitted_by(parts[0]), goals, gram, budget)


def _scaled(part: Part) -> Any:
    return part.matrix if part.factors is None else part.matrix.scale_rows(part.factors.to(part.matrix.u.dtype))  # type: ignore[attr-defined]


def _with_new_contents(matrix: GBLRMatrix, goal: Tensor, gram: Tensor) -> GBLRMatrix:
    (found,) = refit_contents(goal, make_metric(gram, 1), _blocks(matrix), _SWEEPS).to_matrices()
    return found


def _blocks(matrix: Any) -> Blocks:
    s = matrix.structure
    sides = [side.long()[None] for side in (s.row_location, s.row_width, s.col_location, s.col_width)]
    u, v = (t.to(torch.promote_types(t.dtype, torch.float32)) for t in (matrix.u, matrix.v))
    return Blocks(u[None], v[None], *sides)


def _matrix(layer: Any) -> StructuredMatrix:
    matrix = layer.to_matrix() if isinstance(layer, GaudiModule) else layer.matrix
    matrix = matrix.to_gblr() if isinstance(matrix, PackedGBLR) else matrix
    return matrix.map_tensors(lambda t: t.detach())


def _in_format(matrix: StructuredMatrix, layer: Any) -> StructuredMatrix:
    """As the layer had it: packed, and in its dtype."""
    is_packed = isinstance(layer, MatrixModule) and isinstance(layer.matrix, PackedGBLR)
    matrix = matrix.to(next(layer.parameters()).dtype if not isinstance(layer, GaudiModule) else layer.u.dtype)
    return PackedGBLR.from_gblr(matrix) if is_packed else matrix  # type: ignore[arg-type]


def _config(matrix: StructuredMatrix, layer: Any) -> Config:
    """What the layer would be fitted by; its budget is given apart."""
    if isinstance(matrix, GBLRMatrix) and isinstance(layer, GaudiModule):
        return GaudiConfig(
            1.0, block_rank=layer.block_rank, align=layer.align, rounding=layer.rounding, num_blocks=layer.num_blocks
        )
    if isinstance(matrix, BlastMatrix):
        return BlastConfig(1.0, num_tiles=matrix.s.shape[0])
    if isinstance(matrix, PixelflyMatrix):
        return PixelflyConfig(1.0, tile=matrix.blocks.shape[-1])
    return {LowRankMatrix: LowRankConfig, MonarchMatrix: MonarchConfig}.get(type(matrix), _NoConfig)(1.0)


class _NoConfig(Config):
    """For matrices whose layer is built as any other, and which are never fitted anew."""

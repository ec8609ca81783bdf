"""`convert_`: any model in, structured model out. All or nothing: an error leaves the model as it was."""

import functools
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gblr.conversion.calibration import Calibration, measure
from gblr.conversion.choosing import check_arguments, choose
from gblr.conversion.filters import Filter, NameFilter, linear_layers
from gblr.conversion.left_dense import notes_on_stacks, notes_on_uncalled
from gblr.conversion.replace import replace_layer
from gblr.conversion.report import Report, Row
from gblr.conversion.sensitivity import row_factors
from gblr.conversion.sources import Source, check_weights
from gblr.conversion.statistics import Statistics, notes_on_few
from gblr.fitting.allocate import Choice, allocate
from gblr.fitting.config import Config, GaudiConfig
from gblr.fitting.fit import fit_batch, num_ticks, prepare_gram, rank_choices, unusual_size
from gblr.fitting.precision import full_precision
from gblr.fitting.room import room
from gblr.fitting.svd import squared_error, weighted_svd
from gblr.fitting.threads import Tick, few_threads
from gblr.layers.conv import ConvGeometry, GaudiConv2d, StructuredConv2d
from gblr.layers.gaudi import GaudiLinear, GaudiModule
from gblr.layers.split import SplitLinear, rows_of_parts
from gblr.layers.structured import StructuredLinear
from gblr.matrices.base import StructuredMatrix
from gblr.matrices.gblr import GBLRMatrix
from gblr.matrices.packed import PackedGBLR
from gblr.progress import progress


@dataclass
class Job:
    """One matrix to fit: a layer, or one part of a fused one."""

    name: str
    source: Source
    weight: Tensor
    bias: Tensor | None
    gram: Tensor | None
    positions: int
    sensitivity: Tensor | None = None  # of its outputs
    budget: float = 0.0
    matrix: StructuredMatrix | None = None
    error: float | None = None
    seconds: float = 0.0

    @property
    def dense_mults(self) -> int:
        return self.weight.shape[0] * self.weight.shape[1]


def convert_(
    model: nn.Module,
    config: Config,
    where: Filter | None = None,
    calibration: Iterable[Any] | Calibration | None = None,
    split_fused: bool = True,
    sensitivity: bool = False,
) -> Report:
    """Replaces every layer for which `where(module, name)` holds by a structured one of `config`, in place.

    The default `where` is `linear_layers()`: every `nn.Linear` and `Conv1D` but output heads; convolutions by
    `conv_layers()`. Tied weights, layers that are shared or whose weight their parent reads, and layers with a
    `forward` of their own stay dense, with a reason in the report. Hooks on a layer, its training mode and what is
    frozen of it carry over.

    `calibration` yields batches to call the model with, each a tensor, a tuple of arguments or a dict of named ones;
    errors are then weighted by the inputs that each layer sees. `sensitivity` weighs each output, too, by how much the
    model's predictions depend on it, and with `allocation="global"` budgets follow it; it needs a backward pass of the
    calibration batches. What `calibrate` has measured may take the place of the batches. `split_fused` treats the q, k
    and v of a fused projection as matrices of their own.

    Nothing to convert, a cost below what the format can have, and inputs or weights that are NaN or infinite are a
    ValueError; the model is then as it was.

    >>> model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32))
    >>> report = convert_(model, gblr.LowRankConfig(relative_cost=0.5))
    >>> list(report)
    ['0', '2']
    >>> round(report.relative_cost, 2)
    0.47
    """
    where = linear_layers() if where is None else where
    check_arguments(model, config, where)
    if sensitivity and calibration is None:
        raise ValueError("`sensitivity` is measured on `calibration` batches; give some.")
    sources, skipped = choose(model, where, split_fused, config)
    notes = where.unmatched([n for n, _ in model.named_modules()]) if isinstance(where, NameFilter) else []
    if not any(map(is_lazy, model.parameters())):
        notes = [*notes, *notes_on_stacks(model)]
    measured = Calibration()
    if not _from_scratch(config):
        check_weights(sources)
        measured = _measured(model, sources, calibration, sensitivity)
        notes = [*notes, *notes_on_few(measured.statistics), *notes_on_uncalled(measured.statistics)]
    rows = convert_measured_(model, config, sources, measured)
    title = report_title(config, calibration, sensitivity)
    return Report([*rows, *skipped], [source.name for source in sources], title, notes, measured.sensitivity)


def _measured(
    model: nn.Module, sources: Sequence[Source], calibration: Iterable[Any] | Calibration | None, sensitivity: bool
) -> Calibration:
    if calibration is None:
        return Calibration()
    if isinstance(calibration, Calibration):
        return calibration.of(sources, sensitivity)
    return measure(model, sources, calibration, sensitivity)


@full_precision()
def convert_measured_(model: nn.Module, config: Config, sources: Sequence[Source], measured: Calibration) -> list[Row]:
    """Replaces the layers of these sources; what was measured may be of more, so that several calls share it."""
    jobs = make_jobs(sources, measured.statistics, measured.sensitivity)
    if _from_scratch(config):
        for job in jobs:
            job.budget = config.relative_cost * job.dense_mults
    else:
        set_budgets(config, jobs)
        _fit(config, jobs)
    layers = [build_converted(config, source, [job for job in jobs if job.source is source]) for source in sources]
    for source, layer in zip(sources, layers, strict=True):
        replace_layer(model, source.name, layer)
    return [
        report_row(job, part)
        for source, layer in zip(sources, layers, strict=True)
        for job, part in zip((job for job in jobs if job.source is source), parts_of(layer), strict=True)
    ]


def _from_scratch(config: Config) -> bool:
    return isinstance(config, GaudiConfig) and config.init == "scratch"


def make_jobs(
    sources: Sequence[Source],
    statistics: Mapping[str, Statistics],
    sensitivity: Mapping[str, Tensor] = MappingProxyType({}),
) -> list[Job]:
    jobs = []
    for source in sources:
        found, rows = statistics.get(source.name), sensitivity.get(source.name)
        places = rows_of_parts(source.part_sizes, source.runs)
        for name, (weight, bias), place in zip(source.part_names, source.parts(), places, strict=True):
            gram, positions = (None, 1) if found is None else (found.gram, max(1, found.positions))
            part = None if rows is None else rows[place]
            jobs.append(Job(name, source, weight, bias, gram, positions, part))
    return jobs


@full_precision()
def set_budgets(config: Config, jobs: Sequence[Job]) -> None:
    """Multiplications allowed to each matrix: the same share everywhere, or where they lower the error most."""
    for job in jobs:
        job.budget = config.relative_cost * job.dense_mults
    if config.allocation == "uniform":
        return
    spectra, importance = [], []
    for job in jobs:
        gram = None if job.gram is None else prepare_gram(job.gram[None])
        spectra.append(weighted_svd(_weighted(job)[None], gram)[1][0])
        importance.append(_importance(job, spectra[-1]))
    choices = [_choices(config, job) for job in jobs]
    dense_costs = [float(job.positions * job.dense_mults) for job in jobs]
    total = config.relative_cost * sum(dense_costs)
    for job, budget in zip(jobs, allocate(spectra, choices, dense_costs, total, importance), strict=True):
        job.budget = budget / job.positions


def _choices(config: Config, job: Job) -> list[Choice]:
    shape = (job.weight.shape[0], job.weight.shape[1])
    return [Choice(rank, job.positions * mults) for rank, mults in rank_choices(config, shape)]


def _weighted(job: Job) -> Tensor:
    """The weight in which an error in each row counts by its sensitivity."""
    return _precise(job.weight) if job.sensitivity is None else _precise(job.weight) * _factors(job)[:, None]


def _precise(weight: Tensor) -> Tensor:
    """In float32 at least, in which fits compute."""
    return weight.to(torch.promote_types(weight.dtype, torch.float32))


def _factors(job: Job) -> Tensor:
    assert job.sensitivity is not None
    return row_factors(job.sensitivity).to(_precise(job.weight[:1]))


def _importance(job: Job, spectrum: Tensor) -> float:
    """What a relative error of 1 does: the same for all layers, or by how much it would move the predictions."""
    if job.sensitivity is None or job.gram is None:
        return 1.0
    inputs = float(job.gram.diagonal().mean())
    return float(job.sensitivity.mean()) * inputs * float(spectrum.double().square().sum())


def _fit(config: Config, jobs: Sequence[Job]) -> None:
    """Fits all matrices of one shape as one batch, in pieces that fit into memory."""
    pieces = [piece for group in _groups(jobs) for piece in _pieces(group)]
    with progress(f"fitting {len(jobs)} weights", len(pieces) * max(1, num_ticks(config))) as tick:
        for piece in pieces:
            fit_piece(config, piece, tick)
            if num_ticks(config) == 0:
                tick()


@full_precision()
def fit_piece(config: Config, piece: Sequence[Job], tick: Tick = lambda: None) -> None:
    """Fits matrices of one shape as one batch, and notes errors and time in the jobs."""
    begin = time.perf_counter()
    weight = _stacked([_weighted(job) for job in piece])
    size = unusual_size(weight)
    weight = weight if size is None else weight / size[:, None, None]
    gram = None
    if piece[0].gram is not None:
        grams = [prepare_gram(job.gram[None].to(weight.device)).to(weight.dtype)[0] for job in piece]  # type: ignore
        gram = _stacked(grams)
        del grams
    budget = torch.tensor([job.budget for job in piece], device=weight.device)
    try:
        with few_threads(weight):
            matrices = fit_batch(config.for_dtype(piece[0].weight.dtype), weight, gram, budget, tick)
    except ValueError as reason:  # a budget below the smallest matrix: which layers are to be left out?
        more = f" and {len(piece) - 1} more of this shape" if len(piece) > 1 else ""
        raise ValueError(f"{piece[0].name}{more}: {reason}") from reason
    if size is not None:
        matrices = [m.scale_rows(s.expand(weight.shape[1])) for m, s in zip(matrices, size, strict=True)]
    if piece[0].sensitivity is not None:
        matrices = [m.scale_rows(1 / _factors(job)) for m, job in zip(matrices, piece, strict=True)]
    if size is not None or piece[0].sensitivity is not None:
        weight = _stacked([_precise(job.weight) for job in piece])
    matrices = [m.to(job.weight.dtype) for m, job in zip(matrices, piece, strict=True)]  # errors are of what is kept
    error = squared_error(_stacked([m.to(weight.dtype).to_dense() for m in matrices]).sub_(weight), gram)
    of_zeros = squared_error(weight, gram)
    relative = (error / torch.where(of_zeros > 0, of_zeros, 1.0)).sqrt()
    seconds = (time.perf_counter() - begin) / len(piece)
    for job, matrix, e in zip(piece, matrices, relative.tolist(), strict=True):
        job.matrix, job.error, job.seconds = matrix, e, seconds


def _stacked(tensors: list[Tensor]) -> Tensor:
    """A batch; of one tensor without a copy, which for the largest layers of the largest models matters."""
    return tensors[0][None].contiguous() if len(tensors) == 1 else torch.stack(tensors)


def _groups(jobs: Sequence[Job]) -> list[list[Job]]:
    groups: dict[Any, list[Job]] = {}
    for job in jobs:
        key = (job.weight.shape, job.weight.dtype, job.weight.device, job.gram is None, job.sensitivity is None)
        groups.setdefault(key, []).append(job)
    return list(groups.values())


def _pieces(group: list[Job]) -> list[list[Job]]:
    """As many matrices as there is room for, with what a calibrated fit keeps beside them."""
    out_features, in_features = group[0].weight.shape
    numbers = out_features * in_features + (0 if group[0].gram is None else 16 * in_features**2)
    size = max(1, room(group[0].weight.device) // numbers)
    return [group[i : i + size] for i in range(0, len(group), size)]


@functools.singledispatch
def build_layer(
    config: Config, matrix: StructuredMatrix, bias: Tensor | None, geometry: ConvGeometry | None
) -> nn.Module:
    """The layer that a fitted matrix becomes: fixed structure, contents as parameters."""
    return StructuredLinear(matrix, bias) if geometry is None else StructuredConv2d(matrix, geometry, bias)


@build_layer.register
def _(config: GaudiConfig, matrix: GBLRMatrix, bias: Tensor | None, geometry: ConvGeometry | None) -> GaudiModule:
    layer = _empty_gaudi(config, matrix.shape, bias, geometry, matrix.u.device, matrix.u.dtype)
    layer.load_matrix(matrix)
    return layer


def _empty_gaudi(
    config: GaudiConfig, shape: tuple[int, int], bias: Tensor | None, geometry: ConvGeometry | None,
    device: torch.device, dtype: torch.dtype,
) -> GaudiModule:  # fmt: skip
    options: dict[str, Any] = {
        "bias": bias is not None, "block_rank": config.block_rank, "align": config.align, "rounding": config.rounding,
        "num_blocks": config.num_blocks, "relative_cost": config.relative_cost, "device": device, "dtype": dtype,
    }  # fmt: skip
    if geometry is None:
        layer: GaudiModule = GaudiLinear(shape[1], shape[0], **options)
    else:
        layer = GaudiConv2d(
            geometry.in_channels, shape[0], geometry.kernel_size, geometry.stride, geometry.padding,
            geometry.dilation, padding_mode=geometry.padding_mode, **options,
        )  # fmt: skip
    if layer.bias is not None and bias is not None and not layer.bias.is_meta:
        layer.bias.data.copy_(bias)
    return layer


def build_converted(config: Config, source: Source, jobs: Sequence[Job]) -> nn.Module:
    """The layer that takes the place of the source: what `convert_` makes."""
    layers = []
    for job in jobs:
        if job.matrix is None:  # scratch
            assert isinstance(config, GaudiConfig)
            shape = (job.weight.shape[0], job.weight.shape[1])
            layer: Any = _empty_gaudi(config, shape, job.bias, source.geometry, job.weight.device, job.weight.dtype)
            layer.take_variance(job.weight)
        else:
            layer = build_layer(config, job.matrix, job.bias, source.geometry)
        layers.append(layer)
    return layers[0] if len(layers) == 1 else SplitLinear(layers, source.runs)


def build_structured(config: Config, source: Source, jobs: Sequence[Job]) -> nn.Module:
    """A layer for inference: what `convert_` and `harden_` make, without the trainable one between."""
    parts: list[nn.Module] = []
    for job in jobs:
        assert job.matrix is not None
        packed = PackedGBLR.from_gblr(job.matrix) if isinstance(job.matrix, GBLRMatrix) else job.matrix
        plain = source.geometry is None
        if isinstance(packed, PackedGBLR):
            layer: nn.Module = (
                StructuredLinear(packed, job.bias) if plain else StructuredConv2d(packed, source.geometry, job.bias)  # type: ignore[arg-type]
            )
        else:
            layer = build_layer(config, packed, job.bias, source.geometry)
        parts.append(layer)
    return parts[0] if len(parts) == 1 else SplitLinear(parts, source.runs)


def parts_of(layer: nn.Module) -> list[nn.Module]:
    """Its matrices: several of a fused projection."""
    return list(layer.parts) if isinstance(layer, SplitLinear) else [layer]


def report_row(job: Job, layer: Any) -> Row:
    if isinstance(layer, GaudiModule):
        structure = layer.structure if not layer.width_frac.is_meta else None
        live = "?" if structure is None else int(structure.live.sum())
        mults = 0 if structure is None else layer.num_mults
        what = f"Gaudi, {live} of {layer.num_blocks} blocks of rank {layer.block_rank}"
    else:
        mults, what = layer.matrix.num_mults, describe(layer.matrix)
    return Row(
        job.name, (job.weight.shape[0], job.weight.shape[1]), what, job.error, job.dense_mults, mults, job.seconds
    )


def describe(matrix: StructuredMatrix) -> str:
    name = type(matrix).__name__.removesuffix("Matrix")
    rank, num_blocks = getattr(matrix, "rank", None), getattr(matrix, "num_blocks", None)
    if isinstance(matrix, PackedGBLR):
        return f"packed, {matrix.structure.num_blocks} blocks of rank {matrix.block_rank}"
    if rank is not None:
        return f"{name}, rank {rank}"
    return name if num_blocks is None else f"{name}, {num_blocks} blocks"


def report_title(config: Config, calibration: object, sensitivity: bool = False) -> str:
    how = "errors weighted by calibration inputs" if calibration is not None else "plain errors"
    how += " and the sensitivity of outputs" if sensitivity else ""
    return f"{type(config).__name__}(relative_cost={config.relative_cost}, {config.allocation} allocation), {how}"

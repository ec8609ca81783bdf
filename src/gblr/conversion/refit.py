"""Refits the structured layers of a model one after the other, each on the inputs that the layers before it leave it.

A fit of single weights (`convert_`) sees the inputs of the dense model. In the converted one they differ, and errors
add up from layer to layer. Here each layer is given what it really sees, and the dense layer's outputs as its goal.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gblr.conversion.block_runs import BlockRuns
from gblr.conversion.calibrate import batch_call, input_vectors, padding_of
from gblr.conversion.convert import build_layer
from gblr.conversion.measure import undisturbed
from gblr.conversion.replace import replace_layer
from gblr.conversion.sources import read_source
from gblr.fitting.blocks import Blocks
from gblr.fitting.config import BlastConfig, Config, GaudiConfig, LowRankConfig, MonarchConfig, PixelflyConfig
from gblr.fitting.descent import refit as refit_contents
from gblr.fitting.fit import few_threads, fit_batch, prepare_gram
from gblr.fitting.metric import make_metric
from gblr.fitting.svd import squared_error
from gblr.layers.gaudi import GaudiModule
from gblr.layers.split import SplitLinear
from gblr.layers.structured import MatrixModule
from gblr.matrices.base import StructuredMatrix
from gblr.matrices.blast import BlastMatrix
from gblr.matrices.gblr import GBLRMatrix
from gblr.matrices.low_rank import LowRankMatrix
from gblr.matrices.monarch import MonarchMatrix
from gblr.matrices.packed import PackedGBLR
from gblr.matrices.pixelfly import PixelflyMatrix
from gblr.progress import progress

Freedom = Literal["frozen", "free"]
_SWEEPS = 4  # over the blocks, where only their contents move
_DAMPING = 1e-2  # of the mean diagonal: how far a goal may leave the dense weight where inputs say little


@dataclass(frozen=True)
class Refitted:
    """What became of one layer: errors of its outputs on these inputs, relative to those of the dense layer."""

    layer: str
    error_before: float
    error: float


class _Reached(Exception):
    """Every layer that was asked for has been run."""


@dataclass
class _Statistics:
    """Sums over positions, in float64: what is needed to find the best weight, with a bias or without."""

    gram: Float[Tensor, "in in"]
    cross: Float[Tensor, "out in"]
    inputs: Float[Tensor, " in"]
    outputs: Float[Tensor, " out"]
    count: int = 0

    @classmethod
    def zeros(cls, in_features: int, out_features: int, device: torch.device) -> "_Statistics":
        def new(*size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.float64, device=device)

        gram, cross = new(in_features, in_features), new(out_features, in_features)
        return cls(gram, cross, new(in_features), new(out_features))

    def add(self, x: Float[Tensor, "n in"], y: Float[Tensor, "n out"]) -> None:
        x, y = x.double(), y.double()
        self.gram += x.T @ x
        self.cross += y.T @ x
        self.inputs += x.sum(0)
        self.outputs += y.sum(0)
        self.count += len(x)

    def centred(self) -> "_Statistics":
        """Without the means, which a bias takes care of."""
        n = max(1, self.count)
        gram = self.gram - torch.outer(self.inputs, self.inputs) / n
        cross = self.cross - torch.outer(self.outputs, self.inputs) / n
        return _Statistics(gram, cross, torch.zeros_like(self.inputs), torch.zeros_like(self.outputs), self.count)


def refit_layers_(
    model: nn.Module,
    teacher: nn.Module,
    batches: Sequence[Any],
    structure: Freedom = "frozen",
    skip: Sequence[str] = (),
    on_done: Callable[[list[Refitted]], None] = lambda layers: None,
) -> list[Refitted]:
    """Refits every structured layer of `model` in the order in which they run; `teacher` is its dense original.

    `structure="frozen"` keeps the blocks of GBLR layers where they are and fits their contents; `"free"` fits all
    anew at the layer's present cost, as it always does for other formats. No layer becomes worse on these inputs.
    Models that are a chain of blocks are run block by block, with the hidden states of all batches in memory, twice.
    Layers named in `skip` stay; `on_done` is called with those that were given the same input, as they are done.
    Masks of Gaudi layers are folded into their contents first; they are sharp (sigma infinite) afterwards.
    """
    with undisturbed(model), undisturbed(teacher):
        sets = [[name for name in names if name not in skip] for names in _in_order(model, batches)]
        sets = [names for names in sets if names]
        found: list[Refitted] = []
        every = [name for names in sets for name in names]
        runs = BlockRuns(model, batches, every), BlockRuns(teacher, batches, every)
        with progress(f"refitting {len(every)} layers", len(sets) * len(batches)) as tick:
            for names in sets:
                statistics = _collect(*runs, names, tick)
                found += [_refit_layer(model, teacher, name, statistics[name], structure) for name in names]
                on_done(found[-len(names) :])
        return found


def structured_layers(model: nn.Module) -> dict[str, Any]:
    """Those that a refit knows; parts of a fused projection stand for themselves in the whole."""
    kinds = (GaudiModule, MatrixModule, SplitLinear)
    found = {name: module for name, module in model.named_modules() if isinstance(module, kinds)}
    wholes = tuple(f"{name}.parts." for name, module in found.items() if isinstance(module, SplitLinear))
    return {name: module for name, module in found.items() if not (wholes and name.startswith(wholes))}


def _in_order(model: nn.Module, batches: Sequence[Any]) -> list[list[str]]:
    """Names of layers as they run; those that are given the very same input together."""
    order: list[list[str]] = []
    last: list[Any] = [None]  # kept alive, so that no other tensor can be taken for it
    with ExitStack() as stack:
        for name, module in structured_layers(model).items():

            def hook(module: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
                x = args[0] if args else next(iter(kwargs.values()))
                if any(name in names for names in order):
                    return
                order[-1].append(name) if x is last[0] else order.append([name])
                last[0] = x

            stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
        if not batches:
            raise ValueError("`batches` is empty: there is nothing to refit the layers to.")
        batch_call(model, batches[0])
    if not order:
        raise ValueError("the model has no structured layer that `batches` reach; convert it first with `convert_`.")
    return order


def _collect(
    model: BlockRuns, teacher: BlockRuns, names: Sequence[str], tick: Callable[[], None]
) -> dict[str, _Statistics]:
    """Inputs from the model as it is now, outputs from its teacher."""
    found: dict[str, _Statistics] = {}
    for runs in (model, teacher):
        runs.go_to(names[0])
    for number in range(len(model.batches)):
        outputs = dict(_outputs(teacher, names, number))
        for name, x in _inputs(model, names, number):
            y = outputs[name]
            if name not in found:
                found[name] = _Statistics.zeros(x.shape[1], y.shape[1], x.device)
            found[name].add(x, y.to(x.device))
        tick()
    return found


def _inputs(model: BlockRuns, names: Sequence[str], number: int) -> Iterator[tuple[str, Tensor]]:
    kept: dict[str, Tensor] = {}
    padding = padding_of(model.batches[number])

    def keep(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        geometry = getattr(module, "geometry", None)
        kept.setdefault(name, input_vectors(args[0] if args else next(iter(kwargs.values())), geometry, padding))
        if len(kept) == len(names):
            raise _Reached

    _run(model, names, number, lambda module, hook: module.register_forward_pre_hook(hook, with_kwargs=True), keep)
    return iter(kept.items())


def _outputs(teacher: BlockRuns, names: Sequence[str], number: int) -> Iterator[tuple[str, Tensor]]:
    kept: dict[str, Tensor] = {}
    padding = padding_of(teacher.batches[number])

    def keep(name: str, module: nn.Module, args: Any, output: Tensor) -> None:
        if isinstance(module, nn.Conv2d):
            kept.setdefault(name, output.flatten(2).mT.reshape(-1, output.shape[1]).float())
        else:
            kept.setdefault(name, input_vectors(output, None, padding))
        if len(kept) == len(names):
            raise _Reached

    _run(teacher, names, number, lambda module, hook: module.register_forward_hook(hook), keep)
    return iter(kept.items())


def _run(runs: BlockRuns, names: Sequence[str], number: int, register: Any, keep: Any) -> None:
    """Runs the model until all layers of that name were met."""
    with ExitStack() as stack:
        for name in names:

            def hook(*args: Any, name: str = name) -> None:
                keep(name, *args)

            stack.callback(register(runs.model.get_submodule(name), hook).remove)
        try:
            runs.run(number)
        except _Reached:
            return
    raise ValueError(f"{', '.join(names)}: not every layer runs on every batch, so their outputs cannot be compared.")


def _refit_layer(
    model: nn.Module, teacher: nn.Module, name: str, statistics: _Statistics, structure: Freedom
) -> Refitted:
    layer: Any = model.get_submodule(name)
    dense = read_source(teacher, name, teacher.get_submodule(name), split_fused=False).weight
    parts: list[Any] = list(layer.parts) if isinstance(layer, SplitLinear) else [layer]
    before = after = total = 0.0
    new, begin = [], 0
    for part in parts:
        rows = slice(begin, begin + part.out_features)
        begin = rows.stop
        errors, made = _refit_part(part, dense[rows], _rows(statistics, rows), structure)
        before, after, total = (a + b for a, b in zip((before, after, total), errors, strict=True))
        new.append(made)
    replaced = SplitLinear(new) if isinstance(layer, SplitLinear) else new[0]
    replaced.train(layer.training).requires_grad_(any(p.requires_grad for p in layer.parameters()))
    replace_layer(model, name, replaced)
    return Refitted(name, (before / max(total, 1e-30)) ** 0.5, (after / max(total, 1e-30)) ** 0.5)


def _rows(statistics: _Statistics, rows: slice) -> _Statistics:
    s = statistics
    return _Statistics(s.gram, s.cross[rows], s.inputs, s.outputs[rows], s.count)


def _refit_part(
    layer: Any, dense: Tensor, statistics: _Statistics, structure: Freedom
) -> tuple[tuple[float, float, float], nn.Module]:
    """Squared errors before and after, and the size of the outputs, all around their best weight; and the new layer."""
    used = statistics.centred() if layer.bias is not None else statistics
    goal = _goal(dense.double(), used)
    gram = prepare_gram(used.gram[None])
    matrix = _matrix(layer)
    fitted = _fit(matrix, layer, goal.float()[None], gram.float(), structure)
    errors = [float(squared_error((m.to(torch.float64).to_dense() - goal)[None], gram)) for m in (matrix, fitted)]
    if not errors[1] < errors[0]:
        fitted, errors[1] = matrix, errors[0]
    bias = None
    if layer.bias is not None:
        mean = (statistics.inputs / max(1, statistics.count), statistics.outputs / max(1, statistics.count))
        bias = (mean[1] - fitted.to(torch.float64).to_dense() @ mean[0]).to(layer.bias.dtype)
    made = build_layer(_config(matrix, layer), _in_format(fitted, layer), bias, getattr(layer, "geometry", None))
    total = float(squared_error(goal[None], gram))
    return (errors[0], errors[1], total), made


def _goal(dense: Float[Tensor, "out in"], statistics: _Statistics) -> Float[Tensor, "out in"]:
    """The weight that comes nearest to the teacher's outputs; near the dense one where inputs say little."""
    scale = float(statistics.gram.diagonal().mean())
    damped = statistics.gram + _DAMPING * max(scale, 1e-30) * torch.eye(len(statistics.gram)).to(statistics.gram)
    missing = statistics.cross - dense @ statistics.gram
    return dense + torch.linalg.solve(damped, missing.T).T


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


def _fit(matrix: StructuredMatrix, layer: Any, goal: Tensor, gram: Tensor, structure: Freedom) -> StructuredMatrix:
    if not matrix.num_mults:
        return matrix  # a layer that was given nothing stays so
    with few_threads(goal):
        if isinstance(matrix, GBLRMatrix) and (structure == "frozen" or not isinstance(layer, GaudiModule)):
            return _with_new_contents(matrix, goal, gram)
        budget = torch.tensor([float(matrix.num_mults)], device=goal.device)
        return fit_batch(_config(matrix, layer).for_dtype(next(layer.parameters()).dtype), goal, gram, budget)[0]


def _with_new_contents(matrix: GBLRMatrix, goal: Tensor, gram: Tensor) -> GBLRMatrix:
    s = matrix.structure
    sides = [side.long()[None] for side in (s.row_location, s.row_width, s.col_location, s.col_width)]
    blocks = Blocks(matrix.u.float()[None], matrix.v.float()[None], *sides)
    (found,) = refit_contents(goal, make_metric(gram, 1), blocks, _SWEEPS).to_matrices()
    return found

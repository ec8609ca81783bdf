"""Refits the structured layers of a model one after the other, each on the inputs that the layers before it leave it.

A fit of single weights (`convert_`) sees the inputs of the dense model. In the converted one they differ, and errors
add up from layer to layer. Here each layer is given what it really sees, and the dense layer's outputs as its goal, as
far as samples that did not make the goal agree (`goals.py`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from gblr.conversion.block_runs import BlockRuns
from gblr.conversion.calibrate import batch_call, input_vectors, padding_of
from gblr.conversion.goals import Halves
from gblr.conversion.measure import undisturbed
from gblr.conversion.refit_parts import Freedom, Part, refit_parts
from gblr.conversion.replace import replace_layer
from gblr.conversion.sensitivity import collect_sensitivity
from gblr.conversion.sources import read_source
from gblr.fitting.config import TRAINABLE_GROWTH
from gblr.layers.gaudi import GaudiModule
from gblr.layers.split import SplitLinear
from gblr.layers.structured import MatrixModule
from gblr.progress import progress


@dataclass(frozen=True)
class Refitted:
    """What became of one layer: errors of its outputs on these inputs, relative to those of the dense layer."""

    layer: str
    error_before: float
    error: float


class _Reached(Exception):
    """Every layer that was asked for has been run."""


def refit_layers_(
    model: nn.Module,
    teacher: nn.Module,
    batches: Sequence[Any],
    structure: Freedom = "frozen",
    skip: Sequence[str] = (),
    on_done: Callable[[list[Refitted]], None] = lambda layers: None,
    sensitivity: bool = False,
    max_growth: float = TRAINABLE_GROWTH,
) -> list[Refitted]:
    """Refits every structured layer of `model` in the order in which they run; `teacher` is its dense original.

    `structure="frozen"` keeps the blocks of GBLR layers where they are and fits their contents; `"free"` fits all
    anew at the layer's present cost, as it always does for other formats. No layer ends farther from its goal.
    Models that are a chain of blocks are run block by block, with the hidden states of all batches in memory, twice.
    Layers named in `skip` stay; `on_done` is called with those that were given the same input, as they are done.
    With `sensitivity`, errors count by how much the teacher's predictions depend on each output; `max_growth` is that
    of `GaudiConfig`.
    Masks of Gaudi layers are folded into their contents first; they are sharp (sigma infinite) afterwards.
    """
    with undisturbed(model), undisturbed(teacher):
        sets = [[name for name in names if name not in skip] for names in _in_order(model, batches)]
        sets = [names for names in sets if names]
        found: list[Refitted] = []
        every = [name for names in sets for name in names]
        rows = _sensitivity(teacher, every, batches) if sensitivity else {}
        runs = BlockRuns(model, batches, every), BlockRuns(teacher, batches, every)
        with progress(f"refitting {len(every)} layers", len(sets) * len(batches)) as tick:
            for names in sets:
                found += _refit_set(model, teacher, names, _collect(*runs, names, tick), structure, rows, max_growth)
                on_done(found[-len(names) :])
        return found


def _sensitivity(teacher: nn.Module, names: Sequence[str], batches: Sequence[Any]) -> dict[str, Tensor]:
    sources = [read_source(teacher, name, teacher.get_submodule(name), split_fused=False) for name in names]
    return collect_sensitivity(teacher, sources, batches)


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


def _collect(model: BlockRuns, teacher: BlockRuns, names: Sequence[str], tick: Callable[[], None]) -> dict[str, Halves]:
    """Inputs from the model as it is now, outputs from its teacher."""
    found: dict[str, Halves] = {}
    for runs in (model, teacher):
        runs.go_to(names[0])
    for number in range(len(model.batches)):
        outputs = dict(_outputs(teacher, names, number))
        for name, x in _inputs(model, names, number):
            y = outputs[name]
            if name not in found:
                found[name] = Halves.zeros(x.shape[1], y.shape[1], x.device)
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


def _refit_set(
    model: nn.Module, teacher: nn.Module, names: Sequence[str], seen: dict[str, Halves], structure: Freedom,
    sensitivity: Mapping[str, Tensor], max_growth: float,
) -> list[Refitted]:  # fmt: skip
    """Layers with the same input, which can be fitted together."""
    layers: list[Any] = [model.get_submodule(name) for name in names]
    parts = [
        _parts(layer, teacher, name, seen[name], sensitivity.get(name))
        for layer, name in zip(layers, names, strict=True)
    ]
    refit_parts([part for of_layer in parts for part in of_layer], structure, max_growth)
    found = []
    for name, layer, of_layer in zip(names, layers, parts, strict=True):
        new = [part.layer for part in of_layer]
        replaced = SplitLinear(new) if isinstance(layer, SplitLinear) else new[0]
        replaced.train(layer.training).requires_grad_(any(p.requires_grad for p in layer.parameters()))
        replace_layer(model, name, replaced)
        total = max(sum(part.size for part in of_layer), 1e-30)
        before, after = (sum(part.errors[i] for part in of_layer) for i in range(2))
        found.append(Refitted(name, (before / total) ** 0.5, (after / total) ** 0.5))
    return found


def _parts(layer: Any, teacher: nn.Module, name: str, seen: Halves, sensitivity: Tensor | None) -> list[Part]:
    """The matrices of the layer: several for a fused projection."""
    dense = read_source(teacher, name, teacher.get_submodule(name), split_fused=False).weight
    found, begin = [], 0
    matrices: list[Any] = list(layer.parts) if isinstance(layer, SplitLinear) else [layer]
    for part in matrices:
        rows = slice(begin, begin + part.out_features)
        of_rows = None if sensitivity is None else sensitivity[rows]
        found.append(Part(part, dense[rows], seen.of_outputs(rows), of_rows))
        begin = rows.stop
    return found

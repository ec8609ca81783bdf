"""Refits the structured layers of a model one after the other, each on the inputs that the layers before it leave it.

A fit of single weights (`convert_`) sees the inputs of the dense model. In the converted one they differ, and errors
add up from layer to layer. Here each layer is given what it really sees, and the dense layer's outputs as its goal, or
what its stream lacks to the dense model's at the end of a residual branch (`residual.py`), as far as samples that did
not make the goal agree (`goals.py`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from gblr.conversion.block_runs import BlockRuns
from gblr.conversion.calls import batch_call
from gblr.conversion.goals import Halves, Moments
from gblr.conversion.measure import undisturbed
from gblr.conversion.refit_parts import Freedom, Part, refit_parts
from gblr.conversion.refit_runs import collect_pairs, repeated_layers
from gblr.conversion.replace import replace_everywhere
from gblr.conversion.residual import Stream, residual_streams
from gblr.conversion.sensitivity import collect_sensitivity, row_factors
from gblr.conversion.sources import read_source
from gblr.fitting.config import TRAINABLE_GROWTH
from gblr.fitting.precision import full_precision
from gblr.layers.gaudi import GaudiModule
from gblr.layers.split import SplitLinear
from gblr.layers.structured import MatrixModule
from gblr.progress import progress


@dataclass(frozen=True)
class Refitted:
    """What `heal_` made of one layer: the error of its outputs on these inputs, before and after (`error`), relative to
    those of the weight that it aims at. `inputs` counts the vectors that it was fitted to, each of `features` numbers.
    """

    layer: str
    error_before: float
    error: float
    inputs: int = 0
    features: int = 0


def refit_layers_(
    model: nn.Module,
    teacher: nn.Module,
    batches: Sequence[Any],
    structure: Freedom = "frozen",
    skip: Sequence[str] = (),
    on_done: Callable[[list[Refitted]], None] = lambda layers: None,
    sensitivity: bool | Mapping[str, Tensor] = False,
    max_growth: float = TRAINABLE_GROWTH,
) -> list[Refitted]:
    """Refits every structured layer of `model` in the order in which they run; `teacher` is its dense original.

    `structure="frozen"` keeps the blocks of GBLR layers where they are and fits their contents; `"free"` fits all
    anew at the layer's present cost, as it always does for other formats. No layer ends farther from its goal. A layer
    that is called several times is fitted to all of its calls.
    Models that are a chain of blocks are run block by block, with the hidden states of all batches in memory, twice.
    Layers named in `skip` stay; `on_done` is called with those that were given the same input, as they are done.
    With `sensitivity`, errors count by how much the teacher's predictions depend on each output: measured, or as
    `convert_` has measured it, by layer. `max_growth` is that of `GaudiConfig`.
    Masks of Gaudi layers are folded into their contents first; they are sharp (sigma infinite) afterwards.
    """
    modes = {name: layer.training for name, layer in structured_layers(model).items()}
    with ExitStack() as stack:
        stack.callback(_set_modes, model, modes)
        stack.enter_context(undisturbed(model))
        stack.enter_context(undisturbed(teacher))
        order = _in_order(model, batches)
        found: list[Refitted] = []
        every = [name for names in order for name in names if name not in skip]
        repeated = repeated_layers(model, teacher, every, batches[0])
        rows = {} if sensitivity is False else _sensitivity(teacher, every, batches, sensitivity)
        runs = BlockRuns(model, batches, every), BlockRuns(teacher, batches, every, fixed=True)
        in_order = [name for names in order for name in names]  # sums have what a call before this one refitted, too
        streams = residual_streams(teacher, in_order, batches[0], runs[0].blocks)
        sets = [part for names in order for part in _apart([name for name in names if name not in skip], streams)]
        with progress(f"refitting {len(every)} layers", len(sets) * len(batches)) as tick:
            for names in sets:
                seen, before = collect_pairs(*runs, names, repeated, tick, streams), structured_layers(model)
                again = [name for name in names if name in repeated]
                then = _distances(model, again, seen, rows)
                done = _refit_set(model, teacher, names, seen, structure, rows, max_growth)
                if again:
                    now = _distances(model, again, collect_pairs(*runs, again, repeated), rows)
                    worse = [name for name in again if not now[name] <= then[name]]  # or is no number any more
                    replace_everywhere(model, {model.get_submodule(name): before[name] for name in worse})
                    done = [replace(row, error=row.error_before) if row.layer in worse else row for row in done]
                found += done
                on_done(found[-len(names) :])
        return found


def _set_modes(model: nn.Module, modes: Mapping[str, bool]) -> None:
    """Those of layers that were replaced: `undisturbed` knows the old ones."""
    for name, mode in modes.items():
        model.get_submodule(name).train(mode)


def _sensitivity(
    teacher: nn.Module, names: Sequence[str], batches: Sequence[Any], given: bool | Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Of all these layers; those that are given are not measured again."""
    found = dict(given) if isinstance(given, Mapping) else {}
    sources = [read_source(teacher, name, teacher.get_submodule(name), split_fused=False) for name in names]
    for source in sources:
        if source.name in found and len(found[source.name]) != len(source.weight):
            raise ValueError(
                f"`sensitivity` has {len(found[source.name])} numbers for {source.name!r}, which has "
                f"{len(source.weight)} outputs. Pass that of this model's own `convert_`, or True."
            )
    missing = [source for source in sources if source.name not in found]
    return found | (collect_sensitivity(teacher, missing, batches) if missing else {})


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


def _apart(names: Sequence[str], streams: Mapping[str, Stream]) -> Iterator[list[str]]:
    """Layers that can be refitted together: one that makes up for what others leave of the same sum comes after."""
    while names:
        later = {name for name in names if name in streams and not set(streams[name].branches).isdisjoint(names)}
        yield [name for name in names if name not in later]
        names = [name for name in names if name in later]


@full_precision()
def _refit_set(
    model: nn.Module, teacher: nn.Module, names: Sequence[str], seen: dict[str, Halves], structure: Freedom,
    sensitivity: Mapping[str, Tensor], max_growth: float,
) -> list[Refitted]:  # fmt: skip
    """Layers with the same input, which can be fitted together. What was `seen` is taken out as it is used."""
    layers: list[Any] = [model.get_submodule(name) for name in names]
    for name in names:
        _check_finite(name, seen[name])
    sizes = [(sum(half.count for half in seen[name]), len(seen[name].first.gram)) for name in names]
    parts = [
        _parts(layer, teacher, name, seen.pop(name), sensitivity.get(name))
        for layer, name in zip(layers, names, strict=True)
    ]
    refit_parts([part for of_layer in parts for part in of_layer], structure, max_growth)
    found = []
    for name, layer, size, of_layer in zip(names, layers, sizes, parts, strict=True):
        new = [part.layer for part in of_layer]
        replace_everywhere(model, {layer: SplitLinear(new, layer.runs) if isinstance(layer, SplitLinear) else new[0]})
        total = sum(part.size for part in of_layer) or 1.0
        before, after = (sum(part.errors[i] for part in of_layer) for i in range(2))
        found.append(Refitted(name, (before / total) ** 0.5, (after / total) ** 0.5, *size))
    return found


def _check_finite(name: str, seen: Halves) -> None:
    if not all(bool(sums.isfinite().all()) for half in seen for sums in (half.gram, half.cross, half.squares)):
        raise ValueError(
            f"what {name!r} is given in the model, or gives in its teacher, is NaN or infinite for some of the "
            "`batches`, or so large that its squares are (above 1e18). Look at what both models make of each batch."
        )


@full_precision()
def _distances(
    model: nn.Module, names: Sequence[str], seen: Mapping[str, Halves], sensitivity: Mapping[str, Tensor]
) -> dict[str, float]:
    """Of layers from their teacher, on what they were given. One that is called several times may feed itself,
    and then sees other inputs than it was fitted to.
    """
    return {name: _distance(model.get_submodule(name), seen[name].whole(), sensitivity.get(name)) for name in names}


def _distance(layer: Any, seen: Moments, sensitivity: Tensor | None) -> float:
    """Squared, of the layer's outputs on these inputs from those of the teacher."""
    weight = layer.weight.double()
    bias = 0 * seen.outputs if layer.bias is None else layer.bias.double()
    found = seen.squares + ((weight @ seen.gram - 2 * seen.cross) * weight).sum(1)
    found += bias * (seen.count * bias - 2 * seen.outputs + 2 * weight @ seen.inputs)
    return float((found if sensitivity is None else found * row_factors(sensitivity).square().to(found)).sum())


def _parts(layer: Any, teacher: nn.Module, name: str, seen: Halves, sensitivity: Tensor | None) -> list[Part]:
    """The matrices of the layer: several for a fused projection."""
    dense = read_source(teacher, name, teacher.get_submodule(name), split_fused=False).weight
    found = []
    parts: list[Any] = list(layer.parts) if isinstance(layer, SplitLinear) else [layer]
    places = layer.rows if isinstance(layer, SplitLinear) else [slice(None)]
    for part, rows in zip(parts, places, strict=True):
        of_rows = None if sensitivity is None else sensitivity[rows]
        found.append(Part(part, dense[rows], seen.of_outputs(rows), of_rows))
    return found

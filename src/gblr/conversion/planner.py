"""Which form a packed layer should multiply by: measured on this machine, on the inputs that the layer really sees."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gblr.conversion.measure import undisturbed
from gblr.conversion.timing import captured, interleaved
from gblr.layers.structured import MatrixModule
from gblr.matrices import forms
from gblr.matrices.forms import Form
from gblr.matrices.packed import PackedGBLR
from gblr.progress import progress

_ROUNDS, _SECONDS = 3, 0.02  # per layer: at least so many rounds, and more while they are short
_PER_GRAPH = 10  # calls: starting a graph takes longer than a small layer
_HOPELESS = 3.0  # times slower than the best in the first rounds: not measured further

Times = dict[Form, float]


def record_inputs(model: nn.Module, layers: Mapping[str, nn.Module], example_inputs: Any) -> dict[str, Tensor]:
    """What each layer is given in one run of the model; the first input for a layer that is called several times."""
    found: dict[str, Tensor] = {}
    handles = []
    for name, layer in layers.items():

        def hook(module: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
            found.setdefault(name, (args[0] if args else next(iter(kwargs.values()))).detach())

        handles.append(layer.register_forward_pre_hook(hook, with_kwargs=True))
    args, kwargs = as_call(example_inputs)
    try:
        with undisturbed(model):
            model(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return found


def as_call(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A tensor, a tuple or list of positional arguments, or a mapping of named ones."""
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    return tuple(example_inputs) if isinstance(example_inputs, (tuple, list)) else (example_inputs,), {}


def fastest(times: Times) -> Form | None:
    """None where nothing was measured."""
    best = min(times.values(), default=None)
    return next((form for form, seconds in times.items() if seconds == best), None)


def measure_forms(
    layers: Mapping[str, MatrixModule], inputs: Mapping[str, Tensor], graphs: bool = False
) -> dict[str, Times]:
    """Seconds of every possible form of every layer that has an input; of CUDA graphs, or of plain calls."""
    times = {}
    with progress("measuring forms", len(inputs)) as tick:
        for name, x in inputs.items():
            times[name] = form_times(layers[name], x, graphs)
            tick()
    return times


@torch.no_grad()
def form_times(layer: MatrixModule, x: Tensor, graphs: bool = False) -> Times:
    matrix = layer.matrix
    assert isinstance(matrix, PackedGBLR)
    dtype = matrix.u.dtype  # the input may have another, inside of autocast
    x, bias = layer.product_input(x).to(dtype), None if layer.bias is None else layer.bias.to(dtype)
    derived = {form: forms.derive(form, matrix) for form in forms.possible_forms(matrix)}

    made: dict[Form, Any] = {form: partial(forms.multiply, form, each, x, bias) for form, each in derived.items()}
    per_run = _PER_GRAPH if graphs else 1
    if graphs:
        made = {form: captured(call, per_run) for form, call in made.items()}

    def calls(chosen: Sequence[Form]) -> list[Any]:
        return [made[form] for form in chosen]

    # the least time of each: other programs make calls slower, never faster
    first = {
        form: min(found) for form, found in zip(derived, interleaved(calls(list(derived)), x.device, 2), strict=True)
    }
    close = [form for form, seconds in first.items() if seconds < _HOPELESS * min(first.values())]
    more = interleaved(calls(close), x.device, _ROUNDS, _SECONDS)
    first |= {form: min(first[form], *found) for form, found in zip(close, more, strict=True)}
    return {form: seconds / per_run for form, seconds in first.items()}

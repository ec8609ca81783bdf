"""Which form a packed layer should multiply by: measured on this machine, on the inputs that the layer really sees."""

import itertools
from collections.abc import Callable, Mapping, Sequence
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
# calls with weights of their own, where a product is bound by reading them: bytes that no cache holds; a graph has
# several calls in any case, as starting it takes time too
_CACHE, _LEAST_COPIES, _MOST_COPIES = 64 * 2**20, 4, 128
_FEW_VECTORS = 16
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
    x, bias = x.to(dtype), None if layer.bias is None else layer.bias.to(dtype)
    derived = {form: forms.derive(form, matrix) for form in forms.possible_forms(matrix)}
    cold = graphs or (x.is_cpu and layer.num_vectors(x) <= _FEW_VECTORS)
    made, per_run = {}, {}
    for form, tensors in derived.items():
        calls = [partial(layer.by_form, form, each, x, bias) for each in (_copies(tensors) if cold else [tensors])]
        made[form], per_run[form] = (captured(calls), len(calls)) if graphs else (_in_turn(calls), 1)
    # the least time of each: other programs make calls slower, never faster
    first = {form: min(found) for form, found in zip(made, interleaved(list(made.values()), x.device, 2), strict=True)}
    first = {form: seconds / per_run[form] for form, seconds in first.items()}
    close = [form for form, seconds in first.items() if seconds < _HOPELESS * min(first.values())]
    more = interleaved([made[form] for form in close], x.device, _ROUNDS, _SECONDS)
    return first | {
        f: min(first[f], *(each / per_run[f] for each in found)) for f, found in zip(close, more, strict=True)
    }


def _in_turn(calls: Sequence[Callable[[], Any]]) -> Callable[[], Any]:
    """One of them at each call."""
    following = itertools.cycle(calls)
    return lambda: next(following)()


def _copies(derived: forms.Derived) -> list[forms.Derived]:
    """So many that they do not fit into the cache together: in a model, other layers' weights were there before."""
    size = sum(tensor.numel() * tensor.element_size() for tensor in derived.tensors)
    count = min(_MOST_COPIES, max(_LEAST_COPIES, -(-_CACHE // max(1, size))))
    return [derived, *(derived._replace(tensors=tuple(t.clone() for t in derived.tensors)) for _ in range(count - 1))]

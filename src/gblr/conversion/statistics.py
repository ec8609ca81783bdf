"""Gram matrices X^T X of the inputs that layers really see, collected in one pass without keeping activations."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gblr.conversion.calls import batch_call, padding_of
from gblr.conversion.grams import LastInputs
from gblr.conversion.measure import undisturbed
from gblr.conversion.sources import Source
from gblr.progress import progress


@dataclass
class Statistics:
    """Of one layer: the Gram matrix of its inputs and how many input vectors there were."""

    gram: Float[Tensor, "in in"]
    positions: int = 0


def collect(model: nn.Module, sources: Sequence[Source], batches: Iterable[Any]) -> dict[str, Statistics]:
    """Runs `model` on every batch and sums X^T X for every source, in float64.

    A batch is what the model is called with: a tensor, a tuple of positional arguments, or a mapping of named ones.
    Where it has an "attention_mask", padded positions are left out; in a decoder by its "decoder_attention_mask".
    """
    statistics: dict[str, Statistics] = {}
    last = LastInputs()
    running: list[Any] = [None]  # the batch
    handles = []
    for source in sources:
        size, weight = source.weight.shape[1], source.weight
        gram = torch.zeros(size, size, dtype=torch.float64, device=weight.device)
        statistics[source.name] = Statistics(gram)

        def hook(module: nn.Module, args: Any, kwargs: Any, source: Source = source) -> None:
            padding = padding_of(running[0], source.name, model)
            x = last.vectors(args[0] if args else next(iter(kwargs.values())), source.geometry, padding)
            last.add_gram_(statistics[source.name].gram)
            statistics[source.name].positions += x.shape[0]

        handles.append(source.module.register_forward_pre_hook(hook, with_kwargs=True))
    try:
        with undisturbed(model):
            _run(model, batches, running)
    finally:
        for handle in handles:
            handle.remove()
    unused = [name for name, found in statistics.items() if found.positions == 0]
    if len(unused) == len(statistics):
        raise ValueError("`calibration` reached none of the layers to convert: is it empty, or does it skip them?")
    for name, found in statistics.items():
        if not bool(found.gram.isfinite().all()):
            raise ValueError(
                f"the inputs of {name!r} are NaN or infinite for some of the `calibration` batches, or so large that "
                "their squares are (above 1e18). Look at what the model makes of each batch, or leave the layer out."
            )
    return statistics


def notes_on_few(statistics: Mapping[str, Statistics]) -> list[str]:
    """A line for the user if layers saw fewer inputs than they have features: their fits keep what these few need.

    >>> notes_on_few({"fc": Statistics(torch.eye(8), 3), "out": Statistics(torch.eye(4), 5)})
    ['`calibration` has few samples: fc saw 3 inputs and has 8 features. With more, fits hold better on other data.']
    """
    return note_on_few("calibration", {name: (found.positions, len(found.gram)) for name, found in statistics.items()})


def note_on_few(samples: str, seen: Mapping[str, tuple[int, int]]) -> list[str]:
    """The same of layers by their numbers of inputs and features; `samples` is the argument that was given."""
    few = {name: sizes for name, sizes in seen.items() if 0 < sizes[0] < sizes[1]}
    if not few:
        return []
    first, *others = few
    more = f" (and {len(others)} more layer{'s' if len(others) > 1 else ''} likewise)" if others else ""
    return [
        f"`{samples}` has few samples: {first} saw {few[first][0]} inputs and has {few[first][1]} features{more}. "
        "With more, fits hold better on other data."
    ]


def _run(model: nn.Module, batches: Iterable[Any], running: list[Any]) -> None:
    total = len(batches) if isinstance(batches, Sequence) else 0
    with progress("calibrating", total) as tick:
        for batch in batches:
            running[0] = batch
            batch_call(model, batch)
            tick()

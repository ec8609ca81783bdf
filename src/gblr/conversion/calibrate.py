"""Gram matrices X^T X of the inputs that layers really see, collected in one pass without keeping activations."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gblr.conversion.sources import Source
from gblr.layers.conv import ConvGeometry
from gblr.layers.modes import modes_of, restore_modes
from gblr.progress import progress


@dataclass
class Statistics:
    """Of one layer: the Gram matrix of its inputs and how many input vectors there were."""

    gram: Float[Tensor, "in in"]
    positions: int = 0


def collect(model: nn.Module, sources: Sequence[Source], batches: Iterable[Any]) -> dict[str, Statistics]:
    """Runs `model` on every batch and sums X^T X for every source, in float64.

    A batch is what the model is called with: a tensor, a tuple of positional arguments, or a mapping of named ones.
    Where it has an "attention_mask", padded positions are left out.
    """
    statistics: dict[str, Statistics] = {}
    padding: list[Tensor | None] = [None]
    handles = []
    for source in sources:
        size, weight = source.weight.shape[1], source.weight
        gram = torch.zeros(size, size, dtype=torch.float64, device=weight.device)
        statistics[source.name] = Statistics(gram)

        def hook(module: nn.Module, args: Any, kwargs: Any, source: Source = source) -> None:
            x = input_vectors(args[0] if args else next(iter(kwargs.values())), source.geometry, padding[0])
            add_gram_(statistics[source.name].gram, x)
            statistics[source.name].positions += x.shape[0]

        handles.append(source.module.register_forward_pre_hook(hook, with_kwargs=True))
    modes = modes_of(model)
    model.eval()
    try:
        _run(model, batches, padding)
    finally:
        restore_modes(modes)
        for handle in handles:
            handle.remove()
    unused = [name for name, found in statistics.items() if found.positions == 0]
    if len(unused) == len(statistics):
        raise ValueError("`calibration` reached none of the layers to convert: is it empty, or does it skip them?")
    for name, found in statistics.items():
        if not bool(found.gram.isfinite().all()):
            raise ValueError(f"the inputs of {name!r} are NaN or infinite for some of the `calibration` batches.")
    return statistics


_SLICE = 1 << 24  # numbers of a product at once: 64 MiB in float32


def add_gram_(gram: Float[Tensor, "in in"], x: Float[Tensor, "positions in"]) -> None:
    """gram += X^T X, some rows at a time, so that a wide layer needs no second matrix of that size."""
    rows = max(1, _SLICE // max(1, x.shape[1]))
    for part, columns in zip(gram.split(rows), x.split(rows, dim=1), strict=True):
        part += columns.mT @ x


def _run(model: nn.Module, batches: Iterable[Any], padding: list[Tensor | None]) -> None:
    total = len(batches) if isinstance(batches, Sequence) else 0
    with torch.no_grad(), progress("calibrating", total) as tick:
        for batch in batches:
            padding[0] = padding_of(batch)
            batch_call(model, batch)
            tick()


def batch_call(model: nn.Module, batch: Any) -> Any:
    """The model's output on a tensor, a tuple of arguments, or a mapping of named ones."""
    if isinstance(batch, Tensor):
        return model(batch)
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, Sequence) and not isinstance(batch, str):
        try:
            return model(*batch)
        except TypeError as error:
            if "positional argument" not in str(error):
                raise
            raise TypeError(
                f"{error}. A batch is what the model is called with: leave labels out, e.g. (x for x, _ in loader)."
            ) from error
    raise ValueError(
        "`calibration` must yield tensors, tuples of arguments or dicts of named arguments; "
        f"got {type(batch).__name__}."
    )


def padding_of(batch: Any) -> Tensor | None:
    """(samples, positions) bool, True where a token is real; None if the batch has no attention mask."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    return mask.bool() if isinstance(mask, Tensor) and mask.dim() == 2 else None


def input_vectors(x: Tensor, geometry: ConvGeometry | None, padding: Tensor | None) -> Float[Tensor, "positions in"]:
    """What the matrix of a layer is applied to, in float32, without padded positions."""
    x = x.detach()
    if geometry is not None:
        x = geometry.unfold(x)[0]
    elif padding is not None and x.shape[:-1] == padding.shape:
        x = x[padding.to(x.device)]
    return x.reshape(-1, x.shape[-1]).float()

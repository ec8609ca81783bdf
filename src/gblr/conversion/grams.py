"""Sums of X^T X over the inputs of layers: half of each product is computed, and once for all that share an input."""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gblr.conversion.blocks import version_of
from gblr.conversion.calls import input_vectors
from gblr.conversion.sources import Source
from gblr.fitting.precision import full_precision
from gblr.layers.conv import ConvGeometry

_SLICE = 1 << 24  # numbers of a product at once: 64 MiB in float32
_PANEL = 256  # columns at once on a CPU, the best of 192 to 768 for 384 to 3072 columns; half is saved, less one panel


@full_precision()
def add_gram_(gram: Float[Tensor, "in in"], x: Float[Tensor, "positions in"]) -> None:
    """gram += X^T X, some columns at a time: right of the diagonal, and once more for its mirror image."""
    size = x.shape[1]
    width = max(1, min(_PANEL if x.device.type == "cpu" else size, _SLICE // max(1, size)))
    for begin in range(0, size, width):
        end = min(size, begin + width)
        part = x[:, begin:end].mT @ x[:, begin:]
        gram[begin:end, begin:] += part
        gram[end:, begin:end] += part[:, end - begin :].mT


def gram_of(x: Float[Tensor, "positions in"]) -> Float[Tensor, "in in"]:
    """X^T X in the dtype of `x`: of one batch that is precise enough, sums over batches are not."""
    found = x.new_zeros(x.shape[1], x.shape[1])
    add_gram_(found, x)
    return found


class LastInputs:
    """The vectors of the input that came last, and their X^T X. Layers that are given the very same tensor (q, k and v)
    are called one after the other, and share both.
    """

    def __init__(self) -> None:
        self._given: Callable[[], Any] = lambda: None
        self._how: tuple[Any, ...] = ()
        self._vectors = torch.empty(0)
        self._product: Tensor | None = None

    def vectors(
        self, x: Tensor, geometry: ConvGeometry | None, padding: Tensor | None
    ) -> Float[Tensor, "positions in"]:
        """As `input_vectors`; the same object for the same input."""
        how = (version_of(x), geometry, padding)
        if self._given() is not x or not _is_same(self._how, how):
            self._given, self._how, self._product = weakref.ref(x), how, None
            self._vectors = input_vectors(x, geometry, padding)
        return self._vectors

    def add_gram_(self, gram: Float[Tensor, "in in"]) -> None:
        """gram += X^T X of these vectors; of wide ones without a second matrix of that size."""
        if gram.numel() > _SLICE:
            add_gram_(gram, self._vectors)
            return
        if self._product is None:
            self._product = gram_of(self._vectors)
        gram += self._product


def _is_same(first: tuple[Any, ...], second: tuple[Any, ...]) -> bool:
    """Of (version, geometry, padding); a tensor without a version may have been changed."""
    if first[:2] != second[:2] or first[0] is None:
        return False
    one, other = first[2], second[2]
    return one is other or (one is not None and other is not None and torch.equal(one, other))


class _Given(NamedTuple):
    """An input of a layer, as it was then."""

    tensor: Callable[[], Tensor | None]
    version: int | None
    layer: str

    def was(self, x: Tensor) -> bool:
        """Not if it was changed in between, or may have been."""
        return self.tensor() is x and self.version is not None and self.version == version_of(x)


class Grams:
    """Sums of X^T X for some layers; those that are given the very same tensor (q, k and v) share one."""

    def __init__(self, sources: Sequence[Source], make: Callable[[str, int], Tensor]):
        self.sources = {source.name: source for source in sources}
        self.make = make
        self.grams: dict[str, Tensor] = {}
        self.owners: dict[str, str] = {}
        self.positions: dict[str, int] = dict.fromkeys(self.sources, 0)

    @contextmanager
    def hooked(self, modules: Mapping[str, nn.Module], padding: Callable[[str], Tensor | None]) -> Iterator[set[str]]:
        """While a batch runs; yields the names of the layers that it has reached. `padding` is asked for each."""
        given: list[_Given] = []
        reached: set[str] = set()

        def hook(module: nn.Module, args: Any, kwargs: Any, name: str) -> None:
            x = args[0] if args else next(iter(kwargs.values()))
            reached.add(name)
            self._see(name, x, given, padding(name))

        handles = [
            module.register_forward_pre_hook(
                lambda module, args, kwargs, name=name: hook(module, args, kwargs, name), with_kwargs=True
            )
            for name, module in modules.items()
        ]
        try:
            yield reached
        finally:
            for handle in handles:
                handle.remove()

    def _see(self, name: str, x: Tensor, given: list["_Given"], padding: Tensor | None) -> None:
        source = self.sources[name]
        alike = [o.layer for o in given if o.was(x) and self.sources[o.layer].geometry == source.geometry]
        owner = self.owners.setdefault(name, self.owners[alike[0]] if alike else name)
        if owner != name and owner not in (self.owners[layer] for layer in alike):
            raise ValueError(
                f"{name} is given the same input as {owner} in the first batch of `calibration`, and another in a "
                "later one: they cannot share statistics. Convert the model in memory (`convert_`), or leave one out."
            )
        given.append(_Given(weakref.ref(x), version_of(x), name))
        vectors = input_vectors(x, source.geometry, padding)
        self.positions[name] += vectors.shape[0]
        if self.owners[name] != name:
            return
        if name not in self.grams:
            self.grams[name] = self.make(name, vectors.shape[1])
        add_gram_(self.grams[name], vectors)

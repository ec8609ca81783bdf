"""What every matrix format offers."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Self

import torch
from jaxtyping import Float
from torch import Tensor


class StructuredMatrix(ABC):
    """A matrix of `shape` (out_features, in_features) kept in a form that is cheaper than dense.

    A format is a frozen dataclass whose fields are tensors, other dataclasses of tensors, or plain numbers.
    """

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features)."""

    @property
    @abstractmethod
    def num_mults(self) -> int:
        """Multiplications that one matrix-vector product needs."""

    @property
    @abstractmethod
    def num_params(self) -> int:
        """Numbers that have to be stored, whole-number indices of the structure aside."""

    @property
    @abstractmethod
    def T(self) -> "StructuredMatrix":
        """The transpose, in the same format and without copying contents."""

    @abstractmethod
    def to_dense(self) -> Float[Tensor, "out in"]:
        """The matrix itself: the ground truth of the format."""

    @abstractmethod
    def _matmul(self, x: Float[Tensor, "*b in"]) -> Float[Tensor, "*b out"]:
        """`matmul` on an `x` whose last axis is known to fit."""

    def matmul(self, x: Float[Tensor, "*b in"]) -> Float[Tensor, "*b out"]:
        """W x for every vector along the last axis of `x`, as `torch.nn.functional.linear` does."""
        in_features = self.shape[1]
        if x.dim() == 0 or x.shape[-1] != in_features:
            raise ValueError(
                f"`x` must end with an axis of in_features = {in_features} elements; got shape {tuple(x.shape)}."
            )
        return self._matmul(x)

    def scale_rows(self, factor: Float[Tensor, " out"]) -> "StructuredMatrix":
        """The same format with row i multiplied by `factor[i]`; fits with `sensitivity` need it, nothing else does."""
        raise NotImplementedError(f"{type(self).__name__} has no `scale_rows`, which fits with `sensitivity` need.")

    @property
    def relative_cost(self) -> float:
        """`num_mults` over that of the dense matrix."""
        return self.num_mults / max(1, self.shape[0] * self.shape[1])

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """The matrix with its tensors moved or cast, by the rules of `torch.Tensor.to`; a dtype leaves indices
        alone.
        """
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)

        def move(t: Tensor) -> Tensor:
            return t.to(device, dtype if t.is_floating_point() else None, non_blocking)

        moved = self.map_tensors(move)
        structure = getattr(self, "structure", None)
        if structure is None or dtype is None:
            return moved
        # widths and locations may be floats, but a cast to bfloat16 would turn 301 into 300
        kept = _map_fields(structure, lambda t: t.to(device, non_blocking=non_blocking))
        return dataclasses.replace(moved, structure=kept)  # type: ignore[type-var]

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> Self:
        """The same format with `function` applied to the tensors of its fields."""
        return _map_fields(self, function)

    def __repr__(self) -> str:
        out_features, in_features = self.shape
        return f"{type(self).__name__}({out_features} x {in_features}, relative_cost={self.relative_cost:.3f})"


def _map_fields(instance: Any, function: Callable[[Tensor], Tensor]) -> Any:
    changes = {}
    for field in dataclasses.fields(instance):
        value = getattr(instance, field.name)
        if isinstance(value, Tensor):
            changes[field.name] = function(value)
        elif dataclasses.is_dataclass(value):
            changes[field.name] = _map_fields(value, function)
    return dataclasses.replace(instance, **changes)


def check_dims(name: str, tensor: Tensor, layout: str) -> None:
    """Raises unless `tensor` has as many axes as `layout` ("rank out_features") names."""
    if tensor.dim() != len(layout.split()):
        raise ValueError(f"`{name}` must be ({', '.join(layout.split())}); got shape {tuple(tensor.shape)}.")

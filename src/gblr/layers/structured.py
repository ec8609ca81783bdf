"""Linear layers over any matrix format, with a fixed structure: baselines, and inference."""

import dataclasses
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gblr.layers.arguments import one_input
from gblr.layers.prepared import AskedWeight, PreparedModule, autocast_dtype
from gblr.matrices.base import StructuredMatrix
from gblr.ops.checks import is_plain_eager


class MatrixModule(PreparedModule):
    """Owns the tensors of a `StructuredMatrix`: contents as parameters, indices as buffers; `matrix` puts them
    together.

    Fields of nested dataclasses (the structure of a GBLR matrix) are named by their path, "structure_row_width".
    """

    bias: Tensor | None

    def __init__(self, matrix: StructuredMatrix):
        super().__init__()
        self._template = matrix.map_tensors(lambda t: t.detach().to("meta"))
        for name, tensor in _tensor_fields(matrix):
            # in plain order, as a checkpoint gives it back: products of the same numbers in another differ in last bits
            own = tensor.detach().clone(memory_format=torch.contiguous_format)
            if tensor.is_floating_point() and not name.startswith("structure_"):
                self.register_parameter(name, nn.Parameter(own))
            else:
                self.register_buffer(name, own)
        self.prepare()

    @property
    def matrix(self) -> StructuredMatrix:
        return _rebuild(self._template, self)

    @property
    def weight(self) -> Float[Tensor, "out in"]:
        """W itself, composed anew at each access; without gradients it is kept from the second one on, until contents
        change, as for the products of packed blocks.

        Models that ask for its dtype in every call (T5 and its kin) would wait for hundreds of products' time. Whoever
        reads it once leaves nothing behind.
        """
        if torch.is_grad_enabled() or not is_plain_eager():
            return self.matrix.to_dense()
        contents = [t for t in (*self._parameters.values(), *self._buffers.values()) if t is not None]
        asked = self._asked
        if asked is None or not asked.fits(contents):
            self._asked = AskedWeight(contents)
            return self.matrix.to_dense()
        return asked.weight(self.matrix)

    @property
    def out_features(self) -> int:
        return self._template.shape[0]

    @property
    def in_features(self) -> int:
        return self._template.shape[1]

    def num_vectors(self, x: Tensor) -> int:
        """To how many the matrix is applied, in what the layer is given."""
        return x.numel() // max(1, self.in_features)

    def _product(self, x: Float[Tensor, "*b in"]) -> Float[Tensor, "*b out"]:
        """W x + bias for every vector along the last axis of `x`."""
        if (y := self.quick(x)) is not None:
            return y
        bias = self.bias
        if x.dim() and x.shape[-1] == self.in_features and (y := self.multiply(x, bias)) is not None:
            return y
        matrix = self.matrix
        if (dtype := autocast_dtype(x)) is not None:
            x, matrix = x.to(dtype), matrix.to(dtype)
        y = matrix.matmul(x)
        return y if bias is None else y + bias.to(y.dtype)

    def _cast_contents(self, fn: Any, recurse: bool) -> None:
        """Casts leave the structure alone: widths and locations need every bit."""
        kept = {name: t for name, t in self._buffers.items() if t is not None and name.startswith("structure_")}
        super()._cast_contents(fn, recurse)
        for name, before in kept.items():
            after = self._buffers[name]
            if after is not None and after.dtype != before.dtype:
                self._buffers[name] = before.to(after.device)


def _tensor_fields(instance: Any, prefix: str = "") -> list[tuple[str, Tensor]]:
    found: list[tuple[str, Tensor]] = []
    for field in dataclasses.fields(instance):
        value = getattr(instance, field.name)
        if isinstance(value, Tensor):
            found.append((prefix + field.name, value))
        elif dataclasses.is_dataclass(value):
            found += _tensor_fields(value, f"{prefix}{field.name}_")
    return found


def _rebuild(template: Any, module: nn.Module, prefix: str = "") -> Any:
    """A copy of `template` with the module's tensors; `__post_init__` is skipped, as they were checked when they
    came.
    """
    copy = object.__new__(type(template))
    for field in dataclasses.fields(template):
        value = getattr(template, field.name)
        if isinstance(value, Tensor):
            value = getattr(module, prefix + field.name)
        elif dataclasses.is_dataclass(value):
            value = _rebuild(value, module, f"{prefix}{field.name}_")
        object.__setattr__(copy, field.name, value)
    return copy


class StructuredLinear(MatrixModule):
    """y = W x + bias for any matrix format W, whose structure stays as it is.

    >>> layer = StructuredLinear(gblr.LowRankMatrix(torch.randn(2, 6), torch.randn(2, 4)), bias=torch.zeros(6))
    >>> layer
    StructuredLinear(in_features=4, out_features=6, bias=True, LowRankMatrix, relative_cost=0.833)
    >>> layer(torch.randn(5, 4)).shape
    torch.Size([5, 6])
    """

    def __init__(self, matrix: StructuredMatrix, bias: Float[Tensor, " out"] | None = None):
        super().__init__(matrix)
        if bias is not None and tuple(bias.shape) != (matrix.shape[0],):
            raise ValueError(f"`bias` must have shape ({matrix.shape[0]},); got {tuple(bias.shape)}.")
        self.bias = None if bias is None else nn.Parameter(bias.detach().clone())

    def forward(
        self, input: Float[Tensor, "*b in"] | None = None, *, x: Float[Tensor, "*b in"] | None = None
    ) -> Float[Tensor, "*b out"]:
        return self._product(one_input(input, x))

    def to_dense_layer(self) -> nn.Linear:
        """The same layer as a plain `nn.Linear`."""
        return dense_linear(self.matrix.to_dense(), self.bias)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            + matrix_repr(self.matrix)
        )


def matrix_repr(matrix: StructuredMatrix) -> str:
    """The format, its blocks where it has any, and its cost."""
    if matrix_is_meta(matrix):
        return type(matrix).__name__
    parts = [type(matrix).__name__]
    structure = getattr(matrix, "structure", None)
    if structure is not None:
        parts.append(f"blocks={structure.num_blocks}, live={int(structure.live.sum())}")
    return ", ".join([*parts, f"relative_cost={matrix.relative_cost:.3f}"])


def matrix_is_meta(matrix: StructuredMatrix) -> bool:
    return any(tensor.is_meta for _, tensor in _tensor_fields(matrix))


def dense_linear(weight: Float[Tensor, "out in"], bias: Tensor | None) -> nn.Linear:
    out_features, in_features = weight.shape
    with torch.device("meta"):
        linear = nn.Linear(in_features, out_features, bias=bias is not None)
    linear.weight = nn.Parameter(weight.detach().clone())
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach().clone())
    return linear

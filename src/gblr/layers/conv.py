"""The same layers over convolutions: a weight (out, in, kh, kw) is the matrix out x (in * kh * kw) (paper A.8.1).

The matrix is applied to every patch of the image: by one convolution with the composed weight; by a convolution with
the right factor followed by a 1 x 1 convolution with the left one; or to patches that are written out as vectors, which
takes as long as `UNFOLDING` multiplications for each of their numbers, so that only large layers gain by it.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gblr.layers.gaudi import GaudiModule
from gblr.layers.prepared import autocast_dtype
from gblr.layers.structured import MatrixModule, matrix_repr
from gblr.matrices import forms
from gblr.matrices.base import StructuredMatrix
from gblr.matrices.forms import UNFOLDING, Form
from gblr.matrices.gblr import GBLRMatrix
from gblr.matrices.low_rank import LowRankMatrix
from gblr.matrices.packed import PackedGBLR

PaddingMode = Literal["zeros", "reflect", "replicate", "circular"]


@dataclass(frozen=True)
class ConvGeometry:
    """What a convolution does besides its weight; groups are 1."""

    in_channels: int
    kernel_size: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] | str = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    padding_mode: PaddingMode = "zeros"

    @classmethod
    def of(cls, conv: nn.Conv2d) -> "ConvGeometry":
        if conv.groups != 1:
            raise ValueError(
                f"a structured convolution has one group; got groups={conv.groups}. Leave this layer dense."
            )
        padding = conv.padding if isinstance(conv.padding, str) else _pair(conv.padding)
        pairs = (_pair(value) for value in (conv.kernel_size, conv.stride, conv.dilation))
        kernel_size, stride, dilation = pairs
        return cls(conv.in_channels, kernel_size, stride, padding, dilation, conv.padding_mode)

    @property
    def in_features(self) -> int:
        return self.in_channels * self.kernel_size[0] * self.kernel_size[1]

    def num_positions(self, x: Float[Tensor, "*b c h w"]) -> int:
        """Patches of the images, borders aside."""
        return x.numel() // (self.in_channels * self.stride[0] * self.stride[1])

    def weight(self, matrix: Float[Tensor, "out in"]) -> Float[Tensor, "out c kh kw"]:
        return matrix.unflatten(1, (self.in_channels, *self.kernel_size))

    def pad(self, x: Tensor) -> Tensor:
        """Explicit padding for the modes that `conv2d` does not know."""
        if self.padding_mode == "zeros":
            return x
        return nn.functional.pad(x, self._padding_sides(), mode=self.padding_mode)

    def _padding_sides(self) -> list[int]:
        sides: list[int] = []
        for axis in (1, 0):  # `pad` counts axes from the last
            if self.padding == "same":
                total = self.dilation[axis] * (self.kernel_size[axis] - 1)
                sides += [total // 2, total - total // 2]
            else:
                amount = 0 if isinstance(self.padding, str) else self.padding[axis]
                sides += [amount, amount]
        return sides

    def convolve(self, x: Tensor, weight: Float[Tensor, "o c kh kw"], bias: Tensor | None) -> Tensor:
        padding = self.padding if self.padding_mode == "zeros" else 0
        return nn.functional.conv2d(self.pad(x), weight, bias, self.stride, padding, self.dilation)

    def convolve_twice(
        self, x: Tensor, right: Float[Tensor, "ranks in"], left: Float[Tensor, "out ranks"], bias: Tensor | None
    ) -> Tensor:
        """With the weight left @ right, which is not composed; torch has no convolution of no channels."""
        if not len(right):
            return self.convolve(x, self.weight(left @ right), bias)
        return nn.functional.conv2d(self.convolve(x, self.weight(right), None), left[:, :, None, None], bias)

    def unfold(self, x: Float[Tensor, "*b c h w"]) -> tuple[Float[Tensor, "*b positions in"], tuple[int, int]]:
        """Patches as vectors, and the height and width of the output."""
        x = nn.functional.pad(
            x, self._padding_sides(), mode="constant" if self.padding_mode == "zeros" else self.padding_mode
        )
        patches = nn.functional.unfold(x, self.kernel_size, self.dilation, stride=self.stride)
        height, width = (
            (x.shape[axis - 2] - self.dilation[axis] * (self.kernel_size[axis] - 1) - 1) // self.stride[axis] + 1
            for axis in range(2)
        )
        return patches.mT, (height, width)

    def dense_layer(self, matrix: Float[Tensor, "out in"], bias: Tensor | None) -> nn.Conv2d:
        with torch.device("meta"):
            conv = nn.Conv2d(
                self.in_channels, matrix.shape[0], self.kernel_size, self.stride, self.padding, self.dilation,
                bias=bias is not None, padding_mode=self.padding_mode,
            )  # fmt: skip
        conv.weight = nn.Parameter(self.weight(matrix.detach()).clone())
        if bias is not None:
            conv.bias = nn.Parameter(bias.detach().clone())
        return conv

    def __str__(self) -> str:
        return f"kernel_size={self.kernel_size}, stride={self.stride}, padding={self.padding}"


def _pair(value: Any) -> tuple[int, int]:
    first, second = (value, value) if isinstance(value, int) else value
    return int(first), int(second)


class ConvAttributes:
    """What `nn.Conv2d` tells of itself: models read it, to pad images or to build the next layer."""

    geometry: ConvGeometry
    out_features: int
    groups = 1

    @property
    def in_channels(self) -> int:
        return self.geometry.in_channels

    @property
    def out_channels(self) -> int:
        return self.out_features

    @property
    def kernel_size(self) -> tuple[int, int]:
        return self.geometry.kernel_size

    @property
    def stride(self) -> tuple[int, int]:
        return self.geometry.stride

    @property
    def padding(self) -> tuple[int, int] | str:
        return self.geometry.padding

    @property
    def dilation(self) -> tuple[int, int]:
        return self.geometry.dilation

    @property
    def padding_mode(self) -> PaddingMode:
        return self.geometry.padding_mode


class GaudiConv2d(ConvAttributes, GaudiModule):
    """A convolution that learns where its weight needs parameters: a drop-in for `nn.Conv2d` with one group.

    `options` are those of `GaudiLinear`: `rounding`, `num_blocks`, `relative_cost` (at the start), `device`, `dtype`,
    `generator`.

    >>> layer = GaudiConv2d(3, 8, kernel_size=3, padding=1)
    >>> layer(torch.randn(2, 3, 5, 5)).shape
    torch.Size([2, 8, 5, 5])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] | str = 0,
        dilation: int | tuple[int, int] = 1,
        bias: bool = True,
        padding_mode: PaddingMode = "zeros",
        block_rank: int = 1,
        align: int = 1,
        **options: Any,
    ):
        pad = padding if isinstance(padding, str) else _pair(padding)
        geometry = ConvGeometry(in_channels, _pair(kernel_size), _pair(stride), pad, _pair(dilation), padding_mode)
        super().__init__(geometry.in_features, out_channels, block_rank, align, **options)
        self.geometry = geometry
        self.add_bias(bias, options.get("generator"))

    def forward(self, input: Float[Tensor, "*b c h w"]) -> Float[Tensor, "*b o h2 w2"]:
        x = input
        u, v = self.flat_factors()
        if self.composes(self.geometry.num_positions(x)):
            y = self.geometry.convolve(x, self.geometry.weight(self.composed(u, v)), self.bias)
        else:
            y = self.geometry.convolve_twice(x, v, u.T, self.bias)
        self._count(y.numel() // self.out_features)
        return y

    def to_dense_layer(self) -> nn.Conv2d:
        """The same layer, as it is now, as a plain `nn.Conv2d`."""
        return self.geometry.dense_layer(self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.geometry}"


class StructuredConv2d(ConvAttributes, MatrixModule):
    """A convolution whose unfolded weight, out x (in * kh * kw), is any matrix format, with a fixed structure.

    >>> geometry = ConvGeometry.of(nn.Conv2d(4, 8, kernel_size=3, padding=1))
    >>> layer = StructuredConv2d(gblr.LowRankMatrix(torch.randn(2, 8), torch.randn(2, 4 * 3 * 3)), geometry)
    >>> layer(torch.randn(1, 4, 5, 5)).shape
    torch.Size([1, 8, 5, 5])
    """

    def __init__(self, matrix: StructuredMatrix, geometry: ConvGeometry, bias: Float[Tensor, " out"] | None = None):
        super().__init__(matrix)
        if geometry.in_features != matrix.shape[1]:
            raise ValueError(
                f"`matrix` must have in_channels * kh * kw = {geometry.in_features} columns; got {matrix.shape[1]}."
            )
        if bias is not None and tuple(bias.shape) != (matrix.shape[0],):
            raise ValueError(f"`bias` must have shape ({matrix.shape[0]},); got {tuple(bias.shape)}.")
        self.geometry = geometry
        self.bias = None if bias is None else nn.Parameter(bias.detach().clone())

    def forward(self, input: Float[Tensor, "*b c h w"]) -> Float[Tensor, "*b o h2 w2"]:
        x = input
        if (y := self.multiply(x, self.bias)) is not None:
            return y
        matrix, bias = self.matrix, self.bias
        if (dtype := autocast_dtype(x)) is not None:
            x, matrix = x.to(dtype), matrix.to(dtype)
        bias = None if bias is None else bias.to(x.dtype)
        if isinstance(matrix, LowRankMatrix):
            return self.geometry.convolve_twice(x, matrix.v, matrix.u.T, bias)
        if not _unfolds(matrix):
            return self.geometry.convolve(x, self.geometry.weight(matrix.to_dense()), bias)
        patches, size = self.geometry.unfold(x)
        y = matrix.matmul(patches)
        return (y if bias is None else y + bias).mT.unflatten(-1, size)

    def by_form(self, form: Form, derived: forms.Derived, x: Tensor, bias: Tensor | None) -> Tensor:
        if form == "dense":
            return self.geometry.convolve(x, self.geometry.weight(derived.tensors[0]), bias)
        if form == "factors":
            return self.geometry.convolve_twice(x, derived.tensors[1], derived.tensors[0], bias)
        patches, size = self.geometry.unfold(x)
        return forms.multiply(form, derived, patches, bias).mT.unflatten(-1, size)

    def expected_form(self, matrix: PackedGBLR) -> Form:
        return forms.expected_form(matrix, unfolds=True)

    def num_vectors(self, x: Tensor) -> int:
        return self.geometry.num_positions(x)

    def to_dense_layer(self) -> nn.Conv2d:
        return self.geometry.dense_layer(self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"{matrix_repr(self.matrix)}, bias={self.bias is not None}, {self.geometry}"


def _unfolds(matrix: StructuredMatrix) -> bool:
    """Whether its own product, on patches, should take less time than a convolution with the composed weight."""
    if isinstance(matrix, GBLRMatrix | PackedGBLR):
        return False  # what they cost stands in their tensors, and packed ones have forms
    return UNFOLDING * matrix.shape[1] + matrix.num_mults < math.prod(matrix.shape)

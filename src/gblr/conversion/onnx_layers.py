"""Hardened layers as plain operators, for export, in one of two forms.

In tiles: dense products over tiles of both axes, and gathers between them.

    pieces = tiles of v times tiles of x      a batch of products, or a grouped convolution
    z      = sums of pieces                   gathers and sums
    y      = tiles of u times gathered z      gathers and batches of products

Data is laid out as (batch, features, positions), so that a gather copies whole rows of positions; features may be in
several axes. Reshapes leave one size open, so that the exporter need not compute shapes at run time.

Composed: the dense weight, from operators on constants alone. A runtime folds them when it loads the file.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from gblr.layers.conv import ConvGeometry


class TiledLayer(nn.Module):
    """What stands for a layer: z = sums(pieces(x)), y = rows(z) + bias."""

    bias: Tensor | None

    def __init__(self, pieces: nn.Module, sums: nn.Module, rows: "Rows", bias: Float[Tensor, " out"] | None):
        super().__init__()
        self.pieces, self.sums, self.rows = pieces, sums, rows
        self.register_buffer("bias", None if bias is None else bias.detach())


class TiledLinear(TiledLayer):
    """y = W x + bias along the last axis."""

    def forward(self, input: Float[Tensor, "*b in"]) -> Float[Tensor, "*b out"]:
        x = input
        flat = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        y = self.rows(self.sums(self.pieces(flat.mT)))
        y = y.reshape(self.rows.padded_length, -1)[: self.rows.length].mT
        y = y if self.bias is None else y + self.bias
        return y if x.dim() == 2 else y.reshape(*x.shape[:-1], self.rows.length)

    @property
    def weight(self) -> Float[Tensor, "out in"]:
        """For models that ask for its dtype (T5); there are no numbers in it."""
        return torch.empty(self.rows.length, int(self.pieces.length), device="meta")  # type: ignore[arg-type]


class TiledConv2d(TiledLayer):
    """The same for every patch of an image."""

    def forward(self, input: Float[Tensor, "b c h w"]) -> Float[Tensor, "b o h2 w2"]:
        pieces = self.pieces(input)
        y = features(self.rows(self.sums(pieces.flatten(2))), self.rows.padded_length)
        y = y[:, : self.rows.length].unflatten(2, pieces.shape[2:])
        return y if self.bias is None else y + self.bias[:, None, None]


class ComposedLayer(nn.Module):
    """A dense layer whose file has blocks alone: W = u^T v is computed once, by whoever loads it."""

    bias: Tensor | None

    def __init__(self, u: "Spread", v: "Spread", bias: Float[Tensor, " out"] | None, geometry: ConvGeometry | None):
        super().__init__()
        self.u, self.v, self.geometry = u, v, geometry
        self.register_buffer("bias", None if bias is None else bias.detach())

    @property
    def weight(self) -> Float[Tensor, "out in"]:
        return self.u().mT @ self.v()

    def forward(self, input: Tensor) -> Tensor:
        if self.geometry is None:
            return nn.functional.linear(input, self.weight, self.bias)
        return self.geometry.convolve(input, self.geometry.weight(self.weight), self.bias)


class Spread(nn.Module):
    """Cropped contents at full length, zeros around them.

    By comparing positions and gathering: a runtime folds that, while it cannot know the size of a `NonZero`.
    """

    content: Tensor
    width: Tensor
    location: Tensor

    def __init__(self, content: Float[Tensor, " total"], width: Tensor, location: Tensor, rank: int, length: int):
        super().__init__()
        self.rank, self.length = rank, length
        self.register_buffer("content", content)
        self.register_buffer("width", width.int()[:, None, None])
        self.register_buffer("location", location.int()[:, None, None])

    def forward(self) -> Float[Tensor, "ranks length"]:
        width, row = self.width.long(), torch.arange(self.rank, device=self.width.device)[:, None]
        offset = (torch.arange(self.length, device=self.width.device) - self.location.long()) % self.length
        inside = offset < width  # (k, 1, length)
        first = (width.cumsum(0) - width) * self.rank
        index = torch.where(inside, first + row * width + offset, 0)  # (k, rank, length)
        return torch.where(inside, self.content[index], 0.0).flatten(0, 1)


class LinearPieces(nn.Module):
    """Products of units of chunks with the tiles of x, as one batch. `tiles` has the tile of each unit; None: each tile
    has one.
    """

    content: Tensor
    tiles: Tensor | None

    def __init__(self, content: Float[Tensor, "units ranks tile"], tiles: Int[Tensor, " units"] | None, length: int):
        super().__init__()
        self.length, self.tile = length, content.shape[2]
        self.register_buffer("content", content)
        self.register_buffer("tiles", tiles)

    def forward(self, x: Float[Tensor, "in p"]) -> Float[Tensor, "1 units ranks p"]:
        if missing := -self.length % self.tile:
            x = nn.functional.pad(x, (0, 0, 0, missing))
        x = x.reshape(1, -(-self.length // self.tile), self.tile, -1)
        return self.content @ (x if self.tiles is None else x.index_select(1, self.tiles))


class ConvPieces(nn.Module):
    """The same over patches, as one grouped convolution; tiles are whole channels."""

    content: Tensor
    channels: Tensor | None

    def __init__(
        self, content: Float[Tensor, "units ranks tile"], tiles: Int[Tensor, " units"] | None, geometry: ConvGeometry
    ):
        super().__init__()
        self.geometry, self.num_units = geometry, len(content)
        self.register_buffer("content", content.flatten(0, 1).unflatten(1, (-1, *geometry.kernel_size)))
        self.tile = self.content.shape[1]  # in channels
        channels = None if tiles is None else (tiles[:, None] * self.tile + torch.arange(self.tile)).flatten()
        self.register_buffer("channels", channels)

    def forward(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b pieces h2 w2"]:
        g = self.geometry
        if missing := -g.in_channels % self.tile:
            x = nn.functional.pad(x, (0, 0, 0, 0, 0, missing))
        x = x if self.channels is None else x.index_select(1, self.channels)
        padding: Any = g.padding if g.padding_mode == "zeros" else 0
        return nn.functional.conv2d(g.pad(x), self.content, None, g.stride, padding, g.dilation, self.num_units)


class Sums(nn.Module):
    """Adds up the pieces of each chunk, given in the columns of an index; without any, pieces are z already."""

    def __init__(self, indices: Sequence[Int[Tensor, "pieces chunks"]], rows: int):
        super().__init__()
        self.gathers = nn.ModuleList(Gather(index.flatten(), rows) for index in indices)
        self.ones = _frozen([torch.ones(1, len(index)) for index in indices])
        self.sizes = [index.shape[1] * rows for index in indices]

    def forward(self, pieces: Float[Tensor, "b *pieces p"]) -> Float[Tensor, "b *z p"]:
        if not self.sizes:
            return pieces
        sums = []
        b, p = _open_sizes(pieces)
        for gather, ones, size in zip(self.gathers, self.ones, self.sizes, strict=True):
            picked = gather(pieces).reshape(b, ones.shape[1], -1 if p == -1 else size * p)
            # by a product: onnxruntime's ReduceSum takes six times as long at 197 positions
            sums.append((ones @ picked).reshape(b, size, p))
        return concatenate(sums)


class Rows(nn.Module):
    """y = U^T z, tile by tile: batches of products with what `gathers` pick of z, then tiles put in order."""

    def __init__(
        self,
        contents: Sequence[Float[Tensor, "m tile ranks"]],
        gathers: Sequence[nn.Module],
        length: int,
        before: nn.Module,
        after: nn.Module,
    ):
        super().__init__()
        self.contents, self.gathers = _frozen(contents), nn.ModuleList(gathers)
        self.before, self.after, self.length = before, after, length
        self.padded_length = sum(content.shape[0] * content.shape[1] for content in contents)

    def forward(self, z: Float[Tensor, "b *z p"]) -> Float[Tensor, "b *rows p"]:
        z = self.before(z)
        pairs = zip(self.contents, self.gathers, strict=True)
        return self.after(concatenate([c @ features(gather(z), c.shape[0], c.shape[2]) for c, gather in pairs]))


class Gather(nn.Module):
    """Picks groups of `rows` features each."""

    index: Tensor

    def __init__(self, index: Int[Tensor, " n"], rows: int):
        super().__init__()
        self.rows = rows
        self.register_buffer("index", index)

    def forward(self, x: Float[Tensor, "b *f p"]) -> Float[Tensor, "b n rows p"]:
        return features(x, num_features(x) // self.rows, self.rows).index_select(1, self.index)


def features(x: Float[Tensor, "b *f p"], *sizes: int) -> Tensor:
    """`x` with its features in axes of these sizes."""
    b, p = _open_sizes(x)
    return x if x.shape[1:-1] == sizes else x.reshape(b, *sizes, p)


def _open_sizes(x: Float[Tensor, "b *f p"]) -> tuple[int, int]:
    """Batch and positions for a reshape, one of them open: the batch where it is dynamic."""
    batch, positions = x.shape[0], x.shape[-1]
    return (batch, -1) if isinstance(batch, int) else (-1, positions)


def num_features(x: Float[Tensor, "b *f p"]) -> int:
    return math.prod(x.shape[1:-1])


def concatenate(parts: Sequence[Tensor]) -> Tensor:
    """Along the features, put in one axis if there is more than one part."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat([features(part, num_features(part)) for part in parts], dim=1)


def _frozen(tensors: Sequence[Tensor]) -> nn.ParameterList:
    return nn.ParameterList(nn.Parameter(tensor.contiguous(), requires_grad=False) for tensor in tensors)

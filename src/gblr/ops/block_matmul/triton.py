"""The product of packed blocks on a GPU: two launches, z = V x and y = U z + bias, over the tiles of `tiling.py`.

One kernel for many tokens (matrix units, loops in software pipelines) and one for few (each weight is read once, and
bandwidth is all that matters). Both know both products; strides tell how their inputs and outputs lie.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda as cuda_extra
from triton.tools.tensor_descriptor import TensorDescriptor

from gblr.ops.block_matmul.shapes import FEW_TOKENS, FewShape, Product, Shape, choose_shape
from gblr.ops.block_matmul.tiling import IN_TILE, OUT_TILE, Sizes

_OVERLAPPING = (9, 0)  # Hopper: a kernel may start before the one it depends on has ended


@triton.jit
def _activated(y, ACTIVATION: tl.constexpr):
    if ACTIVATION == "relu":
        y = tl.maximum(y, 0.0)
    elif ACTIVATION == "silu":
        y = y * tl.sigmoid(y)
    elif ACTIVATION == "gelu":
        y = 0.5 * y * (1.0 + tl.erf(y * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":
        y = y * tl.sigmoid(1.5957691216057308 * (y + 0.044715 * y * y * y))
    return y


@triton.jit
def _finish(
    acc, bias_ptr, out_ptr, out_tiles, token, feature, token_at, feature_at, tokens, out_features, out_token,
    out_feature, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, SWAPPED: tl.constexpr, TRANSPOSED: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Writes `acc` of (tokens, features), or of (features, tokens) if SWAPPED, by a descriptor where there is one.

    WHOLE: the output has room for all tokens and features of every tile, so that no mask stands in the way.
    """
    features: tl.constexpr = 1 if SWAPPED else 0  # the axis that they are spread along
    inside = feature < out_features
    if HAS_BIAS:
        acc += tl.expand_dims(tl.load(bias_ptr + feature, inside, other=0.0).to(tl.float32), features)
    acc = _activated(acc, ACTIVATION).to(out_ptr.dtype.element_ty)
    if out_tiles is not None:
        if SWAPPED != TRANSPOSED:
            acc = tl.trans(acc)
        if TRANSPOSED:
            out_tiles.store([feature_at, token_at], acc)
        else:
            out_tiles.store([token_at, feature_at], acc)
    else:
        at_token = tl.expand_dims(token.to(tl.int64) * out_token, 1 - features)
        at_feature = tl.expand_dims(feature.to(tl.int64) * out_feature, features)
        if WHOLE:
            tl.store(out_ptr + at_token + at_feature, acc)
        else:
            there = tl.expand_dims(token < tokens, 1 - features) & tl.expand_dims(inside, features)
            tl.store(out_ptr + at_token + at_feature, acc, there)


@triton.jit
def _inputs_of(inputs_ptr, entry, C: tl.constexpr, GATHER: tl.constexpr):
    """The tile of x that an entry takes, or its C single features."""
    if GATHER:
        return tl.load(inputs_ptr + entry * C + tl.arange(0, C))
    else:
        return tl.load(inputs_ptr + entry)


@triton.jit
def _input_tile(
    x_ptr, place, token, tokens, in_features, x_token, x_feature, C: tl.constexpr, GATHER: tl.constexpr,
    MASK_TOKENS: tl.constexpr, MASK_FEATURES: tl.constexpr,
):  # fmt: skip
    """(tokens, C) numbers of x for one entry, of which `_inputs_of` tells the place."""
    if GATHER:
        feature = place
        inside = (feature >= 0)[None, :]
    else:
        feature = place * C + tl.arange(0, C)
        inside = (feature < in_features)[None, :]
    at = token.to(tl.int64)[:, None] * x_token + feature.to(tl.int64)[None, :] * x_feature
    if MASK_TOKENS and (GATHER or MASK_FEATURES):
        return tl.load(x_ptr + at, (token < tokens)[:, None] & inside, other=0.0)
    elif MASK_TOKENS:
        return tl.load(x_ptr + at, (token < tokens)[:, None], other=0.0)
    elif GATHER or MASK_FEATURES:
        return tl.load(x_ptr + at, inside, other=0.0)
    else:
        return tl.load(x_ptr + at)


@triton.jit
def _meet_other_product(OVERLAP: tl.constexpr):
    """The second product may start while the first ends, and waits here for what the first has written."""
    if OVERLAP == "first":
        cuda_extra.gdc_launch_dependents()
    elif OVERLAP == "second":
        cuda_extra.gdc_wait()


@triton.jit
def _bring_near(pointers):
    """The 128 bytes at each pointer into the second-level cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )


# What differs from layer to layer would else be compiled for: multiples of 16, and 1.
@triton.jit(do_not_specialize=["begins_at", "inputs_at", "tokens", "num_tiles", "tiles_per_program", "group_size"])
def _many_tokens_kernel(
    x_ptr, values_ptr, bias_ptr, out_ptr, index_ptr, x_tiles, value_tiles, out_tiles, begins_at, inputs_at, tokens,
    in_features, out_features, num_tiles, tiles_per_program, group_size, x_token, x_feature, out_token, out_feature,
    R: tl.constexpr, C: tl.constexpr, TOKENS: tl.constexpr, SWAPPED: tl.constexpr, GATHER: tl.constexpr,
    MASK_TOKENS: tl.constexpr, MASK_FEATURES: tl.constexpr, TRANSPOSED: tl.constexpr, HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, WHOLE: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """A program has TOKENS tokens and some tiles of outputs, and goes through their entries in one loop.

    One loop keeps the pipeline of loads full while a tile is written. Places of tiles and ends are loaded a round
    before they are needed: waiting for them would take longer than the products. (Single features are left to the
    pipeline, which spends a stage on them: in registers they were slower.) Neighbouring programs share tiles of x and
    of values. Tiles come by descriptors (the copy engine of Hopper) where these are given, else by pointers.
    """
    pid = tl.program_id(0)
    chunks = tl.cdiv(num_tiles, tiles_per_program)
    first_token_tile = pid // (group_size * chunks) * group_size
    group = tl.minimum(tl.cdiv(tokens, TOKENS) - first_token_tile, group_size)
    in_group = pid % (group_size * chunks)
    token_at = (first_token_tile + in_group % group) * TOKENS
    token = token_at + tl.arange(0, TOKENS)
    tile = in_group // group * tiles_per_program
    begins_ptr = index_ptr + begins_at
    inputs_ptr = index_ptr + inputs_at
    first = tl.load(begins_ptr + tile)
    last = tl.load(begins_ptr + tl.minimum(tile + tiles_per_program, num_tiles))
    end = tl.load(begins_ptr + tile + 1)
    next_end = tl.load(begins_ptr + tl.minimum(tile + 2, num_tiles))
    place = _inputs_of(inputs_ptr, first, C, GATHER)
    at = tl.arange(0, R)[:, None] * C + tl.arange(0, C)[None, :]
    acc = tl.zeros((R, TOKENS) if SWAPPED else (TOKENS, R), tl.float32)
    if OVERLAP == "second":
        if token_at == 0:  # one program for all that need these values
            for entry in range(first, last):
                _bring_near(values_ptr + entry * (R * C) + tl.arange(0, R) * C)
    _meet_other_product(OVERLAP)
    for entry in tl.range(first, last, num_stages=STAGES):
        if GATHER:
            place = _inputs_of(inputs_ptr, entry, C, GATHER)
        if x_tiles is not None:
            x = x_tiles.load([token_at, place * C])
        else:
            x = _input_tile(
                x_ptr, place, token, tokens, in_features, x_token, x_feature, C, GATHER, MASK_TOKENS, MASK_FEATURES
            )
        if not GATHER:
            place = _inputs_of(inputs_ptr, tl.minimum(entry + 1, last - 1), C, GATHER)
        if value_tiles is not None:
            values = value_tiles.load([entry * R, 0])
        else:
            values = tl.load(values_ptr + entry * (R * C) + at)
        if SWAPPED:
            acc = tl.dot(values, tl.trans(x), acc, input_precision=PRECISION)
        else:
            acc = tl.dot(x, tl.trans(values), acc, input_precision=PRECISION)
        if entry + 1 == end:
            _finish(
                acc, bias_ptr, out_ptr, out_tiles, token, tile * R + tl.arange(0, R), token_at, tile * R, tokens,
                out_features, out_token, out_feature, HAS_BIAS, ACTIVATION, SWAPPED, TRANSPOSED, WHOLE,
            )  # fmt: skip
            acc = tl.zeros_like(acc)
            tile += 1
            end = next_end
            next_end = tl.load(begins_ptr + tl.minimum(tile + 2, num_tiles))


@triton.jit
def _few_entries(
    values_ptr, inputs_ptr, i, last, row, in_features, R: tl.constexpr, C: tl.constexpr, ENTRIES: tl.constexpr,
    GATHER: tl.constexpr,
):  # fmt: skip
    """Values (rows, ENTRIES C) and inputs of ENTRIES entries from `i` on; zeros and -1 beyond the last."""
    lane = tl.arange(0, ENTRIES * C)
    entry = i + lane // C
    valid = entry < last
    if GATHER:
        feature = tl.load(inputs_ptr + i * C + lane, valid, other=-1)
    else:
        feature = tl.load(inputs_ptr + entry, valid, other=0) * C + lane % C
    values = tl.load(
        values_ptr + entry[None, :] * (R * C) + row[:, None] * C + (lane % C)[None, :], valid[None, :], other=0.0
    )
    return values, tl.where(valid & (feature < in_features), feature, -1)


@triton.jit(do_not_specialize=["begins_at", "inputs_at", "tokens"])
def _few_tokens_kernel(
    x_ptr, values_ptr, bias_ptr, out_ptr, index_ptr, begins_at, inputs_at, tokens, in_features, out_features,
    x_token, x_feature, out_token, out_feature, R: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr,
    ENTRIES: tl.constexpr, TOKENS: tl.constexpr, GATHER: tl.constexpr, HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr, PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """A program has ROWS outputs of a tile, all tokens, and reads ENTRIES entries of its list at a time.

    One token alone: sums in registers, and values one round ahead, the first even before the other product is waited
    for. Several: a product of 16 rows; values ahead of it would go through registers, which is slower.
    """
    pid = tl.program_id(0)
    parts: tl.constexpr = R // ROWS
    inputs_ptr = index_ptr + inputs_at
    tile = pid // parts
    row = pid % parts * ROWS + tl.arange(0, ROWS)  # of the tile
    first, last = tl.load(index_ptr + begins_at + tile), tl.load(index_ptr + begins_at + tile + 1)
    token = tl.arange(0, TOKENS)
    if TOKENS == 1:
        sums = tl.zeros((ROWS,), tl.float32)
        values, feature = _few_entries(values_ptr, inputs_ptr, first, last, row, in_features, R, C, ENTRIES, GATHER)
        _meet_other_product(OVERLAP)
        for i in range(first, last, ENTRIES):
            next_values, next_feature = _few_entries(
                values_ptr, inputs_ptr, i + ENTRIES, last, row, in_features, R, C, ENTRIES, GATHER
            )
            x = tl.load(x_ptr + feature * x_feature, feature >= 0, other=0.0)
            sums += tl.sum(values.to(tl.float32) * x.to(tl.float32)[None, :], 1)
            values, feature = next_values, next_feature
        acc = sums[None, :]
    else:
        acc = tl.zeros((TOKENS, ROWS), tl.float32)
        if OVERLAP == "second":
            for entry in range(first, last):
                _bring_near(values_ptr + entry * (R * C) + row * C)
        _meet_other_product(OVERLAP)
        for i in range(first, last, ENTRIES):
            values, feature = _few_entries(values_ptr, inputs_ptr, i, last, row, in_features, R, C, ENTRIES, GATHER)
            x = tl.load(
                x_ptr + token[:, None] * x_token + feature[None, :] * x_feature,
                (token < tokens)[:, None] & (feature >= 0)[None, :], other=0.0,
            )  # fmt: skip
            acc = tl.dot(x, tl.trans(values), acc, input_precision=PRECISION)
    _finish(
        acc, bias_ptr, out_ptr, None, token, tile * R + row, 0, 0, tokens, out_features, out_token, out_feature,
        HAS_BIAS, ACTIVATION, False, False, False,
    )  # fmt: skip


class Part(NamedTuple):
    """One of the two products in the index."""

    kind: str
    num_tiles: int
    begins_at: int
    inputs_at: int
    gathered: bool


def tile_matmul(
    x: Tensor, values: Tensor, index: Tensor, bias: Tensor | None, sizes: Sizes, activation: str = ""
) -> Tensor:
    """y = W x + bias for x of (tokens, in_features); `values` are what `tiling.pack` made."""
    tokens = x.shape[0]
    out = x.new_empty(tokens, sizes.out_features)
    if not out.numel():
        return out
    columns, rows = parts(sizes, tokens)
    first, second = values.split(sizes.value_parts)
    column_shape, row_shape = (choose(part, tokens, x) for part in (columns, rows))
    z = new_slots(x, sizes, max(getattr(shape, "tokens", 1) for shape in (column_shape, row_shape)))
    overlap = x.is_cuda and torch.cuda.get_device_capability(x.device) >= _OVERLAPPING
    launch(x, first, index, None, z, columns, column_shape, tokens, overlap="first" if overlap else "")
    launch(z, second, index, bias, out, rows, row_shape, tokens, activation, "second" if overlap else "")
    return out


def parts(sizes: Sizes, tokens: int) -> tuple[Part, Part]:
    slots, column_begins, column_inputs, row_begins, _ = sizes.parts
    begin = slots + column_begins + column_inputs
    first = "columns, transposed" if _transposed(sizes, tokens) else "columns"
    second = "rows, gathered" if sizes.gathered else "rows"
    return (
        Part(first, sizes.column_tiles, slots, slots + column_begins, False),
        Part(second, sizes.row_tiles, begin, begin + row_begins, bool(sizes.gathered)),
    )


def new_slots(x: Tensor, sizes: Sizes, multiple: int) -> Tensor:
    """An empty z for the tokens of x, padded so that whole tiles of them need no masks."""
    padded = triton.cdiv(x.shape[0], multiple) * multiple
    if _transposed(sizes, x.shape[0]):
        return x.new_empty(sizes.num_slots, padded).T
    return x.new_empty(padded, sizes.num_slots)


def _transposed(sizes: Sizes, tokens: int) -> bool:
    """Gathered slots are read by rows of tokens, so tokens are then the inner axis."""
    return bool(sizes.gathered) and tokens > 1


def choose(part: Part, tokens: int, x: Tensor) -> Shape | FewShape:
    return choose_shape(Product(part.kind, tokens, max(1, part.num_tiles)), x)


def launch(
    x: Tensor, values: Tensor, index: Tensor, bias: Tensor | None, out: Tensor, part: Part, shape: Shape | FewShape,
    tokens: int, activation: str = "", overlap: str = "",
) -> None:  # fmt: skip
    """One product; x and out may have more tokens than there are, which are neither meant nor written."""
    if not part.num_tiles:
        return
    tensors = x, values, values if bias is None else bias, out, index
    sizes = part.begins_at, part.inputs_at, tokens, x.shape[1], out.shape[1]
    strides = *x.stride(), *out.stride()
    common = {
        "R": OUT_TILE, "C": IN_TILE, "GATHER": part.gathered, "HAS_BIAS": bias is not None, "ACTIVATION": activation,
        "PRECISION": _precision(x), "OVERLAP": overlap, **({"launch_pdl": True} if overlap == "second" else {}),
    }  # fmt: skip
    if isinstance(shape, FewShape):
        _few_tokens_kernel[(part.num_tiles * (OUT_TILE // shape.rows),)](
            *tensors, *sizes, *strides, ROWS=shape.rows, ENTRIES=shape.entries,
            TOKENS=1 if tokens == 1 else FEW_TOKENS, num_warps=shape.warps, **common,
        )  # fmt: skip
        return
    token_tiles = triton.cdiv(tokens, shape.tokens)
    transposed = out.stride(1) != 1
    _many_tokens_kernel[(token_tiles * triton.cdiv(part.num_tiles, shape.tiles),)](
        *tensors, *_descriptors(x, values, out, part, shape), *sizes, part.num_tiles, shape.tiles, shape.group,
        *strides, TOKENS=shape.tokens, SWAPPED=shape.swapped, STAGES=shape.stages,
        MASK_TOKENS=x.shape[0] < token_tiles * shape.tokens, MASK_FEATURES=not x.shape[1] or x.shape[1] % IN_TILE != 0,
        TRANSPOSED=transposed, WHOLE=out.shape[0] >= token_tiles * shape.tokens and out.shape[1] % OUT_TILE == 0,
        num_warps=shape.warps, **common,
    )  # fmt: skip


def _descriptors(
    x: Tensor, values: Tensor, out: Tensor, part: Part, shape: Shape
) -> tuple[TensorDescriptor | None, TensorDescriptor | None, TensorDescriptor | None]:
    """Of tiles of x, of values and of outputs; None for what pointers have to do."""
    if not shape.descriptors:
        return None, None, None
    x_tiles = None if part.gathered or not _describable(x) else TensorDescriptor.from_tensor(x, [shape.tokens, IN_TILE])
    value_tiles = TensorDescriptor.from_tensor(values.view(-1, IN_TILE), [OUT_TILE, IN_TILE])
    return x_tiles, value_tiles, _out_descriptor(out, shape) if shape.stores else None


def _out_descriptor(out: Tensor, shape: Shape) -> TensorDescriptor | None:
    if _describable(out):
        return TensorDescriptor.from_tensor(out, [shape.tokens, OUT_TILE])
    return TensorDescriptor.from_tensor(out.T, [OUT_TILE, shape.tokens]) if _describable(out.T) else None


def _describable(x: Tensor) -> bool:
    return x.numel() > 0 and x.stride(1) == 1 and x.stride(0) * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0


def _precision(x: Tensor) -> str:
    """As torch's own products in float32: full unless the user allows less."""
    return "tf32" if x.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest" else "ieee"

"""The product of packed blocks on a GPU: two launches, z = V x and y = U z + bias, over the tiles of `tiling.py`.

One kernel for many tokens (matrix units, loops in software pipelines) and one for few (each weight is read once, and
bandwidth is all that matters). Both know both products; strides tell how their inputs and outputs lie.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from gblr.ops.block_matmul.tiling import TILE, Sizes

_FEW_TOKENS = 16  # at most so many go to the kernel for few


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
    acc, bias_ptr, out_ptr, token, feature, tokens, out_features, out_token, out_feature,
    HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """WHOLE: the output has room for all tokens and features of every tile, so that no mask stands in the way."""
    inside = feature < out_features
    if HAS_BIAS:
        acc += tl.load(bias_ptr + feature, inside, other=0.0).to(tl.float32)[None, :]
    acc = _activated(acc, ACTIVATION)
    at = token.to(tl.int64)[:, None] * out_token + feature.to(tl.int64)[None, :] * out_feature
    acc = acc.to(out_ptr.dtype.element_ty)
    if WHOLE:
        tl.store(out_ptr + at, acc)
    else:
        tl.store(out_ptr + at, acc, (token < tokens)[:, None] & inside[None, :])


@triton.jit
def _input_tile(
    x_ptr, inputs_ptr, entry, token, tokens, in_features, x_token, x_feature,
    C: tl.constexpr, GATHER: tl.constexpr, MASK_TOKENS: tl.constexpr, MASK_FEATURES: tl.constexpr,
):  # fmt: skip
    """(tokens, C) numbers of x for one entry."""
    lane = tl.arange(0, C)
    if GATHER:
        feature = tl.load(inputs_ptr + entry * C + lane)
        inside = (feature >= 0)[None, :]
    else:
        feature = tl.load(inputs_ptr + entry) * C + lane
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
def _run(
    acc, x_ptr, x_tiles, values_ptr, value_tiles, inputs_ptr, entry, row, count, token_tile, token, tokens, in_features,
    x_token, x_feature, ROWS: tl.constexpr, C: tl.constexpr, TOKENS: tl.constexpr, GATHER: tl.constexpr,
    MASK_TOKENS: tl.constexpr, MASK_FEATURES: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Adds `count` entries, of ROWS rows of values each, to `acc` (tokens, ROWS).

    Tiles come by descriptors (the copy engine of Hopper) where these are given, else by pointers.
    """
    at = tl.arange(0, ROWS)[:, None] * C + tl.arange(0, C)[None, :]
    for i in tl.range(0, count, num_stages=STAGES):
        if x_tiles is not None:
            x = x_tiles.load([token_tile * TOKENS, tl.load(inputs_ptr + entry + i) * C])
        else:
            x = _input_tile(
                x_ptr, inputs_ptr, entry + i, token, tokens, in_features, x_token, x_feature, C, GATHER, MASK_TOKENS,
                MASK_FEATURES,
            )  # fmt: skip
        if value_tiles is not None:
            values = value_tiles.load([row + i * ROWS, 0])
        else:
            values = tl.load(values_ptr + (row + i * ROWS).to(tl.int64) * C + at)
        acc = tl.dot(x, tl.trans(values), acc, input_precision=PRECISION)
    return acc


# What differs from layer to layer would else be compiled for: multiples of 16, and 1.
@triton.jit(do_not_specialize=["pairs_at", "inputs_at", "tokens", "num_pairs"])
def _many_tokens_kernel(
    x_ptr, values_ptr, bias_ptr, out_ptr, index_ptr, x_tiles, pair_tiles, value_tiles, pairs_at, inputs_at, tokens,
    in_features, out_features, num_pairs, x_token, x_feature, out_token, out_feature, R: tl.constexpr, C: tl.constexpr,
    TOKENS: tl.constexpr, GROUP: tl.constexpr, GATHER: tl.constexpr, MASK_TOKENS: tl.constexpr,
    MASK_FEATURES: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """A program has a pair of output tiles and TOKENS tokens; neighbours share tiles of x and of values."""
    pid = tl.program_id(0)
    inputs_ptr = index_ptr + inputs_at
    first_token_tile = pid // (GROUP * num_pairs) * GROUP
    group = tl.minimum(tl.cdiv(tokens, TOKENS) - first_token_tile, GROUP)
    in_group = pid % (GROUP * num_pairs)
    token_tile = first_token_tile + in_group % group
    token = token_tile * TOKENS + tl.arange(0, TOKENS)
    fields = index_ptr + pairs_at + in_group // group * 7
    tile_a, tile_b, row, entry = tl.load(fields), tl.load(fields + 1), tl.load(fields + 2), tl.load(fields + 3)
    both, only_a, only_b = tl.load(fields + 4), tl.load(fields + 5), tl.load(fields + 6)

    acc = _run(
        tl.zeros((TOKENS, 2 * R), tl.float32), x_ptr, x_tiles, values_ptr, pair_tiles, inputs_ptr, entry, row, both,
        token_tile, token, tokens, in_features, x_token, x_feature, 2 * R, C, TOKENS, GATHER, MASK_TOKENS,
        MASK_FEATURES, PRECISION, STAGES,
    )  # fmt: skip
    acc_a, acc_b = tl.split(tl.permute(tl.reshape(acc, (TOKENS, 2, R)), (0, 2, 1)))
    row += both * 2 * R
    entry += both
    acc_a = _run(
        acc_a, x_ptr, x_tiles, values_ptr, value_tiles, inputs_ptr, entry, row, only_a, token_tile, token, tokens,
        in_features, x_token, x_feature, R, C, TOKENS, GATHER, MASK_TOKENS, MASK_FEATURES, PRECISION, STAGES,
    )  # fmt: skip
    lane = tl.arange(0, R)
    _finish(
        acc_a, bias_ptr, out_ptr, token, tile_a * R + lane, tokens, out_features, out_token, out_feature, HAS_BIAS,
        ACTIVATION, WHOLE,
    )  # fmt: skip
    if tile_b >= 0:
        acc_b = _run(
            acc_b, x_ptr, x_tiles, values_ptr, value_tiles, inputs_ptr, entry + only_a, row + only_a * R, only_b,
            token_tile, token, tokens, in_features, x_token, x_feature, R, C, TOKENS, GATHER, MASK_TOKENS,
            MASK_FEATURES, PRECISION, STAGES,
        )  # fmt: skip
        _finish(
            acc_b, bias_ptr, out_ptr, token, tile_b * R + lane, tokens, out_features, out_token, out_feature, HAS_BIAS,
            ACTIVATION, WHOLE,
        )  # fmt: skip


@triton.jit(do_not_specialize=["pairs_at", "inputs_at", "tokens"])
def _few_tokens_kernel(
    x_ptr, values_ptr, bias_ptr, out_ptr, index_ptr, pairs_at, inputs_at, tokens, in_features, out_features,
    x_token, x_feature, out_token, out_feature, R: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr,
    ENTRIES: tl.constexpr, TOKENS: tl.constexpr, GATHER: tl.constexpr, HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A program has ROWS outputs of a pair, all tokens, and reads ENTRIES entries of its list at a time."""
    pid = tl.program_id(0)
    parts: tl.constexpr = 2 * R // ROWS
    inputs_ptr = index_ptr + inputs_at
    fields = index_ptr + pairs_at + pid // parts * 7
    at = pid % parts * ROWS  # first of its outputs in the pair
    second = at // R
    tile = tl.load(fields + second)
    if tile >= 0:
        row, entry, both, only_a = tl.load(fields + 2), tl.load(fields + 3), tl.load(fields + 4), tl.load(fields + 5)
        count = both + tl.load(fields + 5 + second)
        past = both * 2 * R + second * only_a * R + at % R  # rows before those of its own tile alone
        token = tl.arange(0, TOKENS)
        lane = tl.arange(0, ENTRIES * C)
        acc = tl.zeros((TOKENS, ROWS) if TOKENS > 1 else (ROWS,), tl.float32)
        for i in range(0, count, ENTRIES):
            number = i + lane // C
            shared = number < both
            value_row = row + tl.where(shared, number * 2 * R + at, past + (number - both) * R)
            own_entry = entry + number + tl.where(shared, 0, second * only_a)
            valid = number < count
            if GATHER:
                feature = tl.load(inputs_ptr + own_entry * C + lane % C, valid, other=-1)
            else:
                feature = tl.load(inputs_ptr + own_entry, valid, other=0) * C + lane % C
            inside = valid & (feature >= 0) & (feature < in_features)
            values = tl.load(
                values_ptr + (value_row * C + lane % C).to(tl.int64)[None, :] + tl.arange(0, ROWS)[:, None] * C,
                valid[None, :], other=0.0,
            )  # fmt: skip
            if TOKENS > 1:
                x = tl.load(
                    x_ptr + token[:, None] * x_token + feature[None, :] * x_feature,
                    (token < tokens)[:, None] & inside[None, :], other=0.0,
                )  # fmt: skip
                acc = tl.dot(x, tl.trans(values), acc, input_precision=PRECISION)
            else:
                x = tl.load(x_ptr + feature * x_feature, inside, other=0.0)
                acc += tl.sum(values.to(tl.float32) * x.to(tl.float32)[None, :], 1)
        feature = tile * R + at % R + tl.arange(0, ROWS)
        if TOKENS == 1:
            acc = acc[None, :]
        _finish(
            acc, bias_ptr, out_ptr, token, feature, tokens, out_features, out_token, out_feature, HAS_BIAS, ACTIVATION,
            False,
        )  # fmt: skip


class Shape(NamedTuple):
    """How the work of one product is cut: constants of `_many_tokens_kernel`."""

    tokens: int
    group: int
    stages: int  # two make one more buffer: an entry's place is loaded before its tile
    warps: int
    descriptors: bool  # Hopper and newer


class FewShape(NamedTuple):
    """Constants of `_few_tokens_kernel`: outputs of a program, entries that it reads at a time."""

    rows: int
    entries: int
    warps: int


def choose_few_shape(tokens: int) -> FewShape:
    return FewShape(16, 8, 4) if tokens == 1 else FewShape(16, 4, 4)


def choose_shape(tokens: int, x: Tensor) -> Shape:
    """For the products of this many tokens."""
    if x.dtype == torch.float32:
        return Shape(32, 8, 2, 4, False)
    descriptors = x.is_cuda and torch.cuda.get_device_capability(x.device) >= (9, 0)
    if tokens <= 64:
        return Shape(64, 8, 5, 4, descriptors)
    return Shape(128, 8, 5, 4 if tokens <= 1024 else 8, descriptors)


class _Part(NamedTuple):
    """One of the two products in the index."""

    num_pairs: int
    pairs_at: int
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
    shape = None if tokens <= _FEW_TOKENS else choose_shape(tokens, x)
    # Gathered slots are read by rows of tokens, so tokens are then the inner axis; whole tiles need no masks.
    padded = tokens if shape is None else triton.cdiv(tokens, shape.tokens) * shape.tokens
    transposed = shape is not None and sizes.gathered
    z = x.new_empty(sizes.num_slots, padded).T if transposed else x.new_empty(padded, sizes.num_slots)
    slots, column_pairs, column_inputs, row_pairs, _ = sizes.parts
    columns = _Part(sizes.column_pairs, slots, slots + column_pairs, False)
    begin = slots + column_pairs + column_inputs
    rows = _Part(sizes.row_pairs, begin, begin + row_pairs, bool(sizes.gathered))
    first, second = values.split([TILE * sizes.column_rows, TILE * sizes.row_rows])
    _launch(x, first, index, None, z, columns, shape, tokens, "")
    _launch(z, second, index, bias, out, rows, shape, tokens, activation)
    return out


def _launch(
    x: Tensor, values: Tensor, index: Tensor, bias: Tensor | None, out: Tensor, part: _Part, shape: Shape | None,
    tokens: int, activation: str,
) -> None:  # fmt: skip
    """One product; x and out may have more tokens than there are, which are neither meant nor written."""
    if not part.num_pairs:
        return
    tensors = x, values, values if bias is None else bias, out, index
    sizes = part.pairs_at, part.inputs_at, tokens, x.shape[1], out.shape[1]
    strides = *x.stride(), *out.stride()
    common = {
        "R": TILE, "C": TILE, "GATHER": part.gathered, "HAS_BIAS": bias is not None, "ACTIVATION": activation,
        "PRECISION": _precision(x),
    }  # fmt: skip
    if shape is None:
        few = choose_few_shape(tokens)
        _few_tokens_kernel[(part.num_pairs * (2 * TILE // few.rows),)](
            *tensors, *sizes, *strides, ROWS=few.rows, ENTRIES=few.entries,
            TOKENS=1 if tokens == 1 else _FEW_TOKENS, num_warps=few.warps, **common,
        )  # fmt: skip
        return
    token_tiles = triton.cdiv(tokens, shape.tokens)
    _many_tokens_kernel[(token_tiles * part.num_pairs,)](
        *tensors, *_descriptors(x, values, part, shape), *sizes, part.num_pairs, *strides, TOKENS=shape.tokens,
        GROUP=shape.group, STAGES=shape.stages, MASK_TOKENS=x.shape[0] < token_tiles * shape.tokens,
        MASK_FEATURES=x.shape[1] % TILE != 0,
        WHOLE=out.shape[0] >= token_tiles * shape.tokens and out.shape[1] % TILE == 0, num_warps=shape.warps, **common,
    )  # fmt: skip


def _descriptors(
    x: Tensor, values: Tensor, part: _Part, shape: Shape
) -> tuple[TensorDescriptor | None, TensorDescriptor | None, TensorDescriptor | None]:
    """Of tiles of x, of values of a pair, and of one tile; None for what pointers have to do."""
    if not shape.descriptors or not values.numel():
        return None, None, None
    rows = values.view(-1, TILE)
    pair, single = (TensorDescriptor.from_tensor(rows, [height, TILE]) for height in (2 * TILE, TILE))
    aligned = x.stride(1) == 1 and x.stride(0) * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0
    if part.gathered or not aligned or not x.numel():
        return None, pair, single
    return TensorDescriptor.from_tensor(x, [shape.tokens, TILE]), pair, single


def _precision(x: Tensor) -> str:
    """As torch's own products in float32: full unless the user allows less."""
    return "tf32" if x.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest" else "ieee"

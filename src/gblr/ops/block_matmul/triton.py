"""The product of packed blocks on a GPU: two launches, z = V x and y = U z + bias, over the tiles of `tiling.py`.

One kernel for many tokens (matrix units, loops in software pipelines) and one for few (each weight is read once, and
bandwidth is all that matters). Both know both products; strides tell how their inputs and outputs lie.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from gblr.ops.block_matmul.tiling import TILE, Product, Tiling

_FEW_TOKENS = 16  # at most so many go to the kernel for few
_FEW_ROWS, _FEW_ENTRIES = 16, 4


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
    HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    inside = feature < out_features
    if HAS_BIAS:
        acc += tl.load(bias_ptr + feature, inside, other=0.0).to(tl.float32)[None, :]
    acc = _activated(acc, ACTIVATION)
    at = token.to(tl.int64)[:, None] * out_token + feature.to(tl.int64)[None, :] * out_feature
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), (token < tokens)[:, None] & inside[None, :])


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
    acc, x_ptr, values_ptr, inputs_ptr, entry, row, count, token, tokens, in_features, x_token, x_feature,
    ROWS: tl.constexpr, C: tl.constexpr, GATHER: tl.constexpr, MASK_TOKENS: tl.constexpr,
    MASK_FEATURES: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Adds `count` entries, of ROWS rows of values each, to `acc` (tokens, ROWS)."""
    at = tl.arange(0, ROWS)[:, None] * C + tl.arange(0, C)[None, :]
    for i in tl.range(0, count, num_stages=STAGES):
        x = _input_tile(
            x_ptr, inputs_ptr, entry + i, token, tokens, in_features, x_token, x_feature, C, GATHER, MASK_TOKENS,
            MASK_FEATURES,
        )  # fmt: skip
        values = tl.load(values_ptr + (row + i * ROWS).to(tl.int64) * C + at)
        acc = tl.dot(x, tl.trans(values), acc, input_precision=PRECISION)
    return acc


@triton.jit
def _many_tokens_kernel(
    x_ptr, values_ptr, bias_ptr, out_ptr, pairs_ptr, inputs_ptr, tokens, in_features, out_features, num_pairs,
    x_token, x_feature, out_token, out_feature, R: tl.constexpr, C: tl.constexpr, TOKENS: tl.constexpr,
    GROUP: tl.constexpr, GATHER: tl.constexpr, MASK_TOKENS: tl.constexpr, MASK_FEATURES: tl.constexpr,
    HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program has a pair of output tiles and TOKENS tokens; neighbours share tiles of x and of values."""
    pid = tl.program_id(0)
    first_token_tile = pid // (GROUP * num_pairs) * GROUP
    group = tl.minimum(tl.cdiv(tokens, TOKENS) - first_token_tile, GROUP)
    in_group = pid % (GROUP * num_pairs)
    token = (first_token_tile + in_group % group) * TOKENS + tl.arange(0, TOKENS)
    fields = pairs_ptr + in_group // group * 7
    tile_a, tile_b, row, entry = tl.load(fields), tl.load(fields + 1), tl.load(fields + 2), tl.load(fields + 3)
    both, only_a, only_b = tl.load(fields + 4), tl.load(fields + 5), tl.load(fields + 6)

    acc = _run(
        tl.zeros((TOKENS, 2 * R), tl.float32), x_ptr, values_ptr, inputs_ptr, entry, row, both, token, tokens,
        in_features, x_token, x_feature, 2 * R, C, GATHER, MASK_TOKENS, MASK_FEATURES, PRECISION, STAGES,
    )  # fmt: skip
    acc_a, acc_b = tl.split(tl.permute(tl.reshape(acc, (TOKENS, 2, R)), (0, 2, 1)))
    row += both * 2 * R
    entry += both
    acc_a = _run(
        acc_a, x_ptr, values_ptr, inputs_ptr, entry, row, only_a, token, tokens, in_features, x_token, x_feature,
        R, C, GATHER, MASK_TOKENS, MASK_FEATURES, PRECISION, STAGES,
    )  # fmt: skip
    lane = tl.arange(0, R)
    _finish(
        acc_a, bias_ptr, out_ptr, token, tile_a * R + lane, tokens, out_features, out_token, out_feature, HAS_BIAS,
        ACTIVATION,
    )  # fmt: skip
    if tile_b >= 0:
        acc_b = _run(
            acc_b, x_ptr, values_ptr, inputs_ptr, entry + only_a, row + only_a * R, only_b, token, tokens, in_features,
            x_token, x_feature, R, C, GATHER, MASK_TOKENS, MASK_FEATURES, PRECISION, STAGES,
        )  # fmt: skip
        _finish(
            acc_b, bias_ptr, out_ptr, token, tile_b * R + lane, tokens, out_features, out_token, out_feature, HAS_BIAS,
            ACTIVATION,
        )  # fmt: skip


@triton.jit
def _few_tokens_kernel(
    x_ptr, values_ptr, bias_ptr, out_ptr, pairs_ptr, inputs_ptr, tokens, in_features, out_features,
    x_token, x_feature, out_token, out_feature, R: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr,
    ENTRIES: tl.constexpr, TOKENS: tl.constexpr, GATHER: tl.constexpr, HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A program has ROWS outputs of a pair, all tokens, and reads ENTRIES entries of its list at a time."""
    pid = tl.program_id(0)
    parts: tl.constexpr = 2 * R // ROWS
    fields = pairs_ptr + pid // parts * 7
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
            acc, bias_ptr, out_ptr, token, feature, tokens, out_features, out_token, out_feature, HAS_BIAS, ACTIVATION
        )


class Shape(NamedTuple):
    """How the work of one product is cut: constants of `_many_tokens_kernel`."""

    tokens: int
    group: int
    stages: int
    warps: int


def choose_shape(tokens: int, dtype: torch.dtype) -> Shape:
    """For the products of this many tokens."""
    if dtype == torch.float32:
        return Shape(32, 8, 2, 4)
    if tokens <= 64:
        return Shape(64, 8, 4, 4)
    return Shape(128, 8, 4, 4) if tokens <= 1024 else Shape(128, 8, 3, 8)


def tile_matmul(x: Tensor, values: Tensor, bias: Tensor | None, tiling: Tiling, activation: str = "") -> Tensor:
    """y = W x + bias for x of (tokens, in_features); `values` are what `tiling.pack` made."""
    tokens, slots = x.shape[0], tiling.lines.shape[0]
    out = x.new_empty(tokens, tiling.shape[0])
    if not out.numel():
        return out
    shape = None if tokens <= _FEW_TOKENS else choose_shape(tokens, x.dtype)
    # Gathered slots are read by rows of tokens, so tokens are then the inner axis; whole tiles need no masks.
    padded = tokens if shape is None else triton.cdiv(tokens, shape.tokens) * shape.tokens
    transposed = shape is not None and tiling.rows.is_gathered
    z = x.new_empty(slots, padded).T if transposed else x.new_empty(padded, slots)
    num_columns = TILE * tiling.columns.num_rows
    _launch(x, values[:num_columns], None, z, tiling.columns, shape, tokens, "")
    _launch(z, values[num_columns:], bias, out, tiling.rows, shape, tokens, activation)
    return out


def _launch(
    x: Tensor, values: Tensor, bias: Tensor | None, out: Tensor, product: Product, shape: Shape | None, tokens: int,
    activation: str,
) -> None:  # fmt: skip
    """One product; x and out may have more tokens than there are, which are neither meant nor written."""
    num_pairs = product.pairs.shape[0]
    if not num_pairs:
        return
    tensors = x, values, bias if bias is not None else values, out, product.pairs, product.inputs
    sizes = tokens, x.shape[1], out.shape[1]
    strides = *x.stride(), *out.stride()
    common = {
        "R": TILE, "C": TILE, "GATHER": product.is_gathered, "HAS_BIAS": bias is not None, "ACTIVATION": activation,
        "PRECISION": _precision(x),
    }  # fmt: skip
    if shape is None:
        _few_tokens_kernel[(num_pairs * (2 * TILE // _FEW_ROWS),)](
            *tensors, *sizes, *strides, ROWS=_FEW_ROWS, ENTRIES=_FEW_ENTRIES,
            TOKENS=1 if tokens == 1 else _FEW_TOKENS, num_warps=4, **common,
        )  # fmt: skip
        return
    token_tiles = triton.cdiv(tokens, shape.tokens)
    _many_tokens_kernel[(token_tiles * num_pairs,)](
        *tensors, *sizes, num_pairs, *strides, TOKENS=shape.tokens, GROUP=shape.group, STAGES=shape.stages,
        MASK_TOKENS=x.shape[0] < token_tiles * shape.tokens, MASK_FEATURES=x.shape[1] % TILE != 0,
        num_warps=shape.warps, **common,
    )  # fmt: skip


def _precision(x: Tensor) -> str:
    """As torch's own products in float32: full unless the user allows less."""
    return "tf32" if x.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest" else "ieee"

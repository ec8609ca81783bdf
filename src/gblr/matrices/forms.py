"""Three ways to multiply by a packed matrix, with the same result; which is fast depends on structure and device.

* `packed`: kernels over the cropped blocks, compiled ones on a CPU, Triton's on a GPU; time falls with the
  multiplications
* `factors`: two plain products with the factors, zeros outside the blocks included
* `dense`: one plain product with W itself

A form's tensors are derived from the cropped contents once; a `Stamp` tells whether they still fit.
"""

import functools
import math
from typing import Literal, NamedTuple, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.optimizer import register_optimizer_step_post_hook

from gblr.matrices.packed import PackedGBLR
from gblr.ops import block_matmul as blocks
from gblr.ops.block_matmul import gpu, tiling

Form = Literal["packed", "factors", "dense"]
FORMS: tuple[Form, ...] = get_args(Form)

# Time of a multiplication in the packed form, in those of a plain product (docs/results/cpu.json)
PACKED_MULT = 1.15
# The same on a GPU in half precision, where blocks fill whole tiles and where they do not; and what the numbers between
# the two products cost, which decides for small layers (docs/results/gpu.json)
TILED_MULT, PADDED_MULT, BETWEEN_MULTS = 1.7, 2.3, 700_000
# Writing a patch of an image out as a vector, for each of its numbers, in multiplications of a convolution; on a CPU
# (docs/dev/kernels.md), and taken for a GPU too until it is measured there
UNFOLDING = 110


class Derived(NamedTuple):
    """What a form multiplies with: tensors made of the contents, and whole numbers that the kernels want."""

    tensors: tuple[Tensor, ...]
    sizes: tuple[int, ...] = ()


def possible_forms(matrix: PackedGBLR) -> list[Form]:
    """Those that can run where the matrix is, in its dtype."""
    return [form for form in FORMS if form != "packed" or reason_against_packed(matrix) is None]


def reason_against_packed(matrix: PackedGBLR) -> str | None:
    """Why the packed form cannot run here; None where it can."""
    device, dtype = matrix.u.device, matrix.u.dtype
    if device.type != "cpu":
        return gpu.reason_against(device) or _reason_against_dtype(dtype, gpu.DTYPES)
    if reason := _reason_against_dtype(dtype, blocks.DTYPES):
        return reason
    return (
        None
        if blocks.available()
        else "the compiled CPU kernels are not there (gblr.ops.native.cpu_kernels() says why)"
    )


def _reason_against_dtype(dtype: torch.dtype, known: tuple[torch.dtype, ...]) -> str | None:
    names = " and ".join(str(each).removeprefix("torch.") for each in known)
    return None if dtype in known else f"the packed kernels know {names}, not {dtype}"


def knows(form: Form, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the form can multiply in that dtype."""
    return form != "packed" or dtype in (blocks.DTYPES if device.type == "cpu" else gpu.DTYPES)


def is_filled(matrix: PackedGBLR) -> bool:
    """Whether the structure is that of the contents; not so between `to_empty` and loading."""
    sides = ((matrix.u, matrix.structure.row_width), (matrix.v, matrix.structure.col_width))
    return all(
        not width.is_meta
        and content.numel() == matrix.block_rank * int(width.long().sum())
        and (not len(width) or 0 <= int(width.min()) <= int(width.max()) <= length)
        for (content, width), length in zip(sides, matrix.shape, strict=True)
    )


def expected_form(matrix: PackedGBLR, unfolds: bool = False) -> Form:
    """The form that should be the fastest, by counting multiplications; `harden_` with example inputs measures.

    `unfolds`: the matrix is that of a convolution, and the packed form takes patches written out as vectors.
    """
    more = {"packed": UNFOLDING * matrix.shape[1]} if unfolds else {}
    return min(possible_forms(matrix), key=lambda form: _time(form, matrix) + more.get(form, 0))


def plain_form(matrix: PackedGBLR) -> Form:
    """The cheaper of the forms that torch's own products do."""
    return min(("factors", "dense"), key=lambda form: _time(form, matrix))


def _time(form: Form, matrix: PackedGBLR) -> float:
    """In multiplications of a plain product."""
    out_features, in_features = matrix.shape
    if form == "dense":
        return out_features * in_features
    if form == "factors":
        return matrix.num_lines * (out_features + in_features)
    if matrix.u.is_cpu:
        return PACKED_MULT * matrix.num_mults
    if matrix.u.dtype == torch.float32:
        return math.inf  # without matrix units: plain products are faster, unless a measurement says otherwise
    return (PADDED_MULT if matrix.block_rank % tiling.IN_TILE else TILED_MULT) * matrix.num_mults + BETWEEN_MULTS


def _sides(matrix: PackedGBLR) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    s = matrix.structure
    return s.row_width, s.row_location, s.col_width, s.col_location


def derive(form: Form, matrix: PackedGBLR) -> Derived:
    """What the form multiplies with; differentiable in the contents."""
    if form == "dense":
        return Derived((matrix.to_dense(),))
    if form == "packed" and matrix.u.is_cpu:
        plan = blocks.plan_blocks(*_sides(matrix), matrix.block_rank, matrix.shape)
        return Derived((blocks.pack_blocks(matrix.u, matrix.v, plan), plan), (matrix.shape[0], matrix.num_lines))
    u, v = matrix.factors()
    if form == "packed":
        index, sizes = tiling.tile_blocks(*_sides(matrix), matrix.block_rank, matrix.shape)
        return Derived((tiling.pack(u, v, index, sizes), index), sizes)
    return Derived((u.T.contiguous(), v))


class BoundLinear:
    """The dense form for plain inference on a CPU, called as `BoundMatmul` is."""

    def __init__(self, weight: Float[Tensor, "out in"]):
        self._weight = weight
        self.dtype, self.in_features = weight.dtype, weight.shape[1]

    def takes(self, bias: Tensor) -> bool:
        return bias.dtype == self.dtype

    def __call__(self, x: Float[Tensor, "*b in"], bias: Tensor | None) -> Float[Tensor, "*b out"]:
        return functional.linear(x, self._weight, bias)


def multiply(form: Form, derived: Derived, x: Float[Tensor, "*b in"], bias: Tensor | None) -> Float[Tensor, "*b out"]:
    """W x + bias with what `derive` made."""
    tensors, sizes = derived
    if form == "packed" and tensors[0].is_cpu:
        return blocks.block_matmul(x, tensors[0], tensors[1], bias, out_features=sizes[0], num_lines=sizes[1])
    if form == "packed":
        return gpu.tile_matmul(x, tensors[0], tensors[1], bias, tiling.Sizes(*sizes))
    if form == "dense":
        return functional.linear(x, tensors[0], bias)
    return functional.linear(functional.linear(x, tensors[1]), tensors[0], bias)


class Stamp:
    """Tells whether tensors were replaced, or written to (which inference tensors do not tell) since it was made.

    It keeps them alive: memory given back could become that of their successors, with an address that is no news.
    """

    def __init__(self, u: Tensor, v: Tensor):
        self._tensors = u.detach(), v.detach()
        self._marks: tuple[int, ...] | None = _marks(u, v)

    def expire(self) -> None:
        """From now on it fits nothing."""
        self._marks = None

    def fits(self, u: Tensor | None, v: Tensor | None) -> bool:
        """Whether they are those of then, unchanged. Never for others than plain tensors."""
        return type(u) in _PLAIN and type(v) in _PLAIN and self._marks == _marks(u, v)  # type: ignore[arg-type]

    def is_alike(self, *tensors: Tensor) -> bool:
        """Whether they could have been: plain tensors of the same sizes and dtype, on the same device."""
        return all(
            type(t) in _PLAIN and (t.shape, t.dtype, t.device) == (own.shape, own.dtype, own.device)
            for t, own in zip(tensors, self._tensors, strict=True)
        )


_PLAIN = (Tensor, nn.Parameter)


_num_steps = [0]  # of all optimizers, since `watch_optimizers`


@functools.cache
def watch_optimizers() -> None:
    """Fused optimizers change parameters without a trace: from now on every step makes stamps of trainable ones old."""
    register_optimizer_step_post_hook(lambda *_: _num_steps.__setitem__(0, _num_steps[0] + 1))


def _marks(u: Tensor, v: Tensor) -> tuple[int, ...]:
    if u.is_inference() or v.is_inference():  # asked, since the error that they would raise takes 50 us
        return u.data_ptr(), v.data_ptr()
    steps = _num_steps[0] if u.requires_grad or v.requires_grad else 0
    return u.data_ptr(), v.data_ptr(), u._version, v._version, steps

"""Three ways to multiply by a packed matrix, with the same result; which is fast depends on structure and device.

* `packed`: compiled kernels over the cropped blocks; time falls with the multiplications
* `factors`: two plain products with the factors, zeros outside the blocks included
* `dense`: one plain product with W itself

A form's tensors are derived from the cropped contents once; a `Stamp` tells whether they still fit.
"""

from typing import Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from gblr.matrices.packed import PackedGBLR
from gblr.ops import block_matmul as blocks

Form = Literal["packed", "factors", "dense"]
FORMS: tuple[Form, ...] = get_args(Form)

# Time of a multiplication in the packed form, in those of a plain product (docs/results/cpu.json)
PACKED_MULT = 1.15


def possible_forms(matrix: PackedGBLR) -> list[Form]:
    """Those that can run where the matrix is, in its dtype."""
    return [form for form in FORMS if form != "packed" or reason_against_packed(matrix) is None]


def reason_against_packed(matrix: PackedGBLR) -> str | None:
    """Why the packed form cannot run here; None where it can."""
    if matrix.u.device.type != "cpu":
        return f"there are no packed kernels for {matrix.u.device.type}"
    if matrix.u.dtype not in blocks.DTYPES:
        return f"the packed kernels know float32 and bfloat16, not {matrix.u.dtype}"
    if not blocks.available():
        return "the compiled CPU kernels are not there (gblr.ops.native.cpu_kernels() says why)"
    return None


def knows(form: Form, dtype: torch.dtype) -> bool:
    """Whether the form can multiply in that dtype."""
    return form != "packed" or dtype in blocks.DTYPES


def is_filled(matrix: PackedGBLR) -> bool:
    """Whether the structure is that of the contents; not so between `to_empty` and loading."""
    sides = ((matrix.u, matrix.structure.row_width), (matrix.v, matrix.structure.col_width))
    return all(
        not width.is_meta
        and content.numel() == matrix.block_rank * int(width.sum())
        and (not len(width) or 0 <= int(width.min()) <= int(width.max()) <= length)
        for (content, width), length in zip(sides, matrix.shape, strict=True)
    )


def expected_form(matrix: PackedGBLR) -> Form:
    """The form that should be the fastest, by counting multiplications; `harden_` with example inputs measures."""
    out_features, in_features = matrix.shape
    mults: dict[Form, float] = {
        "packed": PACKED_MULT * matrix.num_mults,
        "factors": matrix.num_lines * (out_features + in_features),
        "dense": out_features * in_features,
    }
    return min(possible_forms(matrix), key=lambda form: mults[form])


def derive(form: Form, matrix: PackedGBLR) -> tuple[Tensor, ...]:
    """The tensors that the form multiplies with; differentiable in the contents."""
    if form == "packed":
        s = matrix.structure
        sides = (s.row_width, s.row_location, s.col_width, s.col_location)
        plan = blocks.plan_blocks(*sides, matrix.block_rank, matrix.shape)
        return blocks.pack_blocks(matrix.u, matrix.v, plan), plan
    if form == "dense":
        return (matrix.to_dense(),)
    u, v = matrix.factors()
    return u.T.contiguous(), v


class BoundLinear:
    """The dense form for plain inference on a CPU, called as `BoundMatmul` is."""

    def __init__(self, weight: Float[Tensor, "out in"]):
        self._weight = weight
        self.dtype, self.in_features = weight.dtype, weight.shape[1]

    def takes(self, bias: Tensor) -> bool:
        return bias.dtype == self.dtype

    def __call__(self, x: Float[Tensor, "*b in"], bias: Tensor | None) -> Float[Tensor, "*b out"]:
        return functional.linear(x, self._weight, bias)


def multiply(
    form: Form, tensors: tuple[Tensor, ...], x: Float[Tensor, "*b in"], bias: Tensor | None, num_lines: int, out: int
) -> Float[Tensor, "*b out"]:
    """W x + bias with what `derive` made."""
    if form == "packed":
        return blocks.block_matmul(x, tensors[0], tensors[1], bias, out, num_lines)
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


def _marks(u: Tensor, v: Tensor) -> tuple[int, ...]:
    if u.is_inference() or v.is_inference():  # asked, since the error that they would raise takes 50 us
        return u.data_ptr(), v.data_ptr()
    return u.data_ptr(), v.data_ptr(), u._version, v._version

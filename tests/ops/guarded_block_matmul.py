"""Runs the compiled kernels on tensors between unreadable pages: `python -m tests.ops.guarded_block_matmul`.

A read or write outside of a tensor, by one byte, ends the process. Tensors stand at the end of their pages, and in a
second round at the beginning.
"""

import ctypes
import itertools
import mmap

import torch
from torch import Tensor

from gblr.ops import native
from gblr.ops.block_matmul import cpu
from tests.ops.packed_blocks import STYLES, assert_is_product, plan_of, random_packed, values_of

SHAPES = [(1, 1), (7, 5), (64, 17), (65, 64), (100, 33), (129, 200)]
TOKENS = [1, 2, 3, 4, 5, 8, 9, 16, 17, 33, 49]


class Pages:
    """Memory between two pages that cannot be read or written."""

    def __init__(self, num_pages: int = 64):
        page = mmap.PAGESIZE
        self.memory = mmap.mmap(-1, (num_pages + 2) * page)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        protect = ctypes.CDLL(None, use_errno=True).mprotect
        for guard in (address, address + (num_pages + 1) * page):
            assert protect(ctypes.c_void_p(guard), page, 0) == 0, "mprotect failed"
        self.begin, self.end = page, (num_pages + 1) * page

    def place(self, tensor: Tensor, at_end: bool) -> Tensor:
        """A copy of the tensor that touches one of the two pages."""
        assert tensor.nbytes <= self.end - self.begin
        if not tensor.numel():
            return tensor
        offset = self.end - tensor.nbytes if at_end else self.begin
        placed = torch.frombuffer(self.memory, dtype=tensor.dtype, count=tensor.numel(), offset=offset)
        return placed.copy_(tensor.flatten()).view(tensor.shape)


def check(library: ctypes.CDLL, pages: dict[str, Pages], at_end: bool, shape, tokens, dtype, style) -> None:
    out_features, in_features = shape
    matrix = random_packed(out_features, in_features, 11, 3, style=style, dtype=dtype, seed=tokens)
    place = {name: lambda t, own=own: own.place(t, at_end) for name, own in pages.items()}
    plan, u, v = place["plan"](plan_of(matrix)), place["u"](matrix.u), place["v"](matrix.v)
    values = place["values"](torch.full((cpu.num_values(plan),), torch.nan, dtype=dtype))
    size, sizes = cpu.BYTES[dtype], (u.numel(), v.numel(), values.numel())

    def move(function, layout, *tensors):
        assert function(plan.data_ptr(), size, layout, *(t.data_ptr() for t in tensors), *sizes) == 0

    move(library.gblr_gather, cpu._CROPPED, u, v, values)
    assert torch.equal(values, values_of(matrix, plan))
    move(library.gblr_scatter, cpu._CROPPED, values, u.fill_(0), v.fill_(0))
    assert torch.equal(u, matrix.u) and torch.equal(v, matrix.v)
    factors = (
        place["u"](torch.zeros(33, out_features, dtype=dtype)),
        place["v"](torch.zeros(33, in_features, dtype=dtype)),
    )
    sizes = (factors[0].numel(), factors[1].numel(), values.numel())
    move(library.gblr_scatter, cpu._SPREAD, values, *factors)
    move(library.gblr_gather, cpu._SPREAD, *factors, values)
    assert torch.equal(values, values_of(matrix, plan))

    x, bias = place["x"](torch.randn(tokens, in_features).to(dtype)), place["bias"](torch.randn(out_features).to(dtype))
    y = place["y"](torch.full((tokens, out_features), torch.nan, dtype=dtype))
    tensors = [t.data_ptr() for t in (values, x, bias, y)]
    sizes = (in_features, out_features, values.numel(), tokens)
    assert library.gblr_block_matmul(plan.data_ptr(), size, *tensors, *sizes, 1) == 0
    assert_is_product(y, matrix, x, bias)


def main() -> None:
    pages = {name: Pages() for name in ("plan", "u", "v", "values", "x", "bias", "y")}
    for name in native._CHOICES.get(torch.backends.cpu.get_cpu_capability(), ()):
        library, reason = native._open(name)
        if library is None:
            print(f"{name}: {reason}")
            continue
        cpu.declare(library)
        cases = list(itertools.product(SHAPES, TOKENS, cpu.BYTES, STYLES))[::7]
        for at_end in (True, False):
            for case in cases:
                check(library, pages, at_end, *case)
        print(f"{name}: {2 * len(cases)} products, nothing was touched that is not theirs")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()

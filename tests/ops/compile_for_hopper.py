"""Compiles the GPU kernels for sm_90, which needs no GPU. A process of its own: the tests run Triton's interpreter."""

import itertools

import triton
from triton.backends.compiler import GPUTarget

from gblr.ops.elements import triton as rounding
from gblr.ops.inverse_factor import triton as factors
from gblr.ops.masked_content import triton as kernels

TARGET = GPUTarget("cuda", 90, 32)


def compile_for_hopper(kernel, signature: dict[str, str], constants: dict[str, object]) -> None:
    source = triton.compiler.ASTSource(kernel, signature | dict.fromkeys(constants, "constexpr"), constants)
    assert "ptx" in triton.compile(source, target=TARGET).asm
    print("compiled", kernel.__name__, *signature.values(), constants)


def main() -> None:
    for dtype in ("fp32", "bf16", "fp16"):
        pointers = {"content_ptr": f"*{dtype}", "width_ptr": "*fp32", "location_ptr": "*fp32", "table_ptr": "*fp32"}
        sizes = {"length": "i32", "block_rank": "i32"}
        forward = pointers | {"out_ptr": f"*{dtype}"} | sizes
        compile_for_hopper(kernels._masked_content_fwd_kernel, forward, {"TILE": 1024})
        sums = {"grad_content_ptr": f"*{dtype}", "first_ptr": "*fp32", "second_ptr": "*fp32"}
        backward = {"grad_ptr": f"*{dtype}"} | pointers | sums | sizes
        for content, structure in itertools.product((True, False), repeat=2):
            if content or structure:
                constants = {"NEED_CONTENT": content, "NEED_STRUCTURE": structure, "FINISH": True, "TILE": 1024}
                compile_for_hopper(kernels._masked_content_bwd_kernel, backward, constants)
    matrices = {"gram_ptr": "*fp64", "out_ptr": "*fp32", "size": "i32", "jitter": "fp32"}
    for size in (2, 16, factors.MAX_SIZE):
        compile_for_hopper(factors._inverse_factor_kernel, matrices, {"SIZE": size})
    fractions = {"width_ptr": "*fp32", "location_ptr": "*fp32", "out_ptr": "*fp32"}
    sizes = {"blocks": "i32", "rows": "i32", "cols": "i32"}
    compile_for_hopper(rounding._elements_fwd_kernel, fractions | sizes | {"align": "i32"}, {"TILE": 256})
    gradients = {f"{name}_ptr": "*fp32" for name in ("grad", "width", "grad_width", "grad_location")}
    compile_for_hopper(rounding._elements_bwd_kernel, gradients | sizes, {"TILE": 256})


if __name__ == "__main__":
    main()

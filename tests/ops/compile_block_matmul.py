"""Compiles the GPU kernels of block_matmul, without a GPU. A process of its own: tests run Triton's interpreter."""

import triton
from triton.backends.compiler import GPUTarget

from gblr.ops.block_matmul import triton as kernels

TARGETS = [(80, "bf16"), (90, "bf16"), (90, "fp32")]
COMMON = {"R": 128, "C": 64, "HAS_BIAS": True, "ACTIVATION": "gelu", "PRECISION": "ieee", "OVERLAP": ""}


def compile_for(target: GPUTarget, kernel, dtype: str, constants: dict[str, object]) -> None:
    constants = COMMON | constants
    tensors = {"x_ptr", "values_ptr", "bias_ptr", "out_ptr"}
    signature = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name in tensors:
            signature[name] = f"*{dtype}"
        else:
            signature[name] = "*i32" if name.endswith("_ptr") else "i32"
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if name not in constants}
    source = triton.compiler.ASTSource(kernel, signature, constants, aligned)
    asm = triton.compile(source, target=target).asm
    units = {"bf16": "mma", "fp32": "fma"}[dtype]  # tf32 is off: plain float32 arithmetic
    assert constants.get("TOKENS") == 1 or units in asm["ptx"]
    print("compiled", kernel.__name__, target.arch, dtype, constants)


def main() -> None:
    many = {
        "x_tiles": None,
        "value_tiles": None,
        "out_tiles": None,
        "MASK_TOKENS": True,
        "MASK_FEATURES": True,
        "TRANSPOSED": False,
        "WHOLE": False,
        "SWAPPED": False,
        "STAGES": 3,
    }
    for arch, dtype in TARGETS:
        target = GPUTarget("cuda", arch, 32)
        ends = ({"OVERLAP": "first"}, {"OVERLAP": "second"}) if arch >= 90 else ({}, {})
        tokens = 32 if dtype == "fp32" else 128
        first = many | {"TOKENS": tokens, "GATHER": False, "x_feature": 1}
        compile_for(target, kernels._many_tokens_kernel, dtype, first | ends[0] | {"out_feature": 1})
        compile_for(
            target, kernels._many_tokens_kernel, dtype, first | {"out_token": 1, "WHOLE": True, "SWAPPED": True}
        )
        second = many | {"TOKENS": tokens, "GATHER": True, "x_token": 1, "out_feature": 1}
        compile_for(target, kernels._many_tokens_kernel, dtype, second | ends[1])
        for number in (1, 16):
            few = {"ROWS": 16, "ENTRIES": 4, "TOKENS": number, "GATHER": True, "x_feature": 1, "out_feature": 1}
            compile_for(target, kernels._few_tokens_kernel, dtype, few | ends[1])


if __name__ == "__main__":
    main()

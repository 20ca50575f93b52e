"""Compiles the writing of accepted rows for an A100, an H100 and a B200, which needs none of them;
prints what came out.

A process of its own, so that no other test can have triton interpreted.
"""

from __future__ import annotations

import json

import triton.language as tl
from triton import compile as compile_kernel
from triton import next_power_of_2
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sglang_dspark.kernels.commit_write import _write_kernel

# Capability, type of the projection, of the caches, heads, their size, rotated, pairs by halves.
CASES = (
    (80, "*bf16", tl.bfloat16, 8, 128, 128, True),
    (80, "*fp16", tl.float16, 4, 80, 32, False),
    (90, "*bf16", tl.bfloat16, 8, 128, 128, True),
    (90, "*bf16", tl.float8e4nv, 1, 96, 96, True),
    (90, "*fp32", tl.float32, 32, 128, 64, True),
    (100, "*bf16", tl.bfloat16, 8, 128, 128, True),
    (100, "*bf16", tl.float8e4nv, 5, 128, 64, False),
)


def compiled(
    capability: int, given: str, cache: tl.dtype, heads: int, size: int, rotary: int, neox: bool
) -> dict[str, int]:
    """Bytes of code and of shared memory."""
    tensors = {"projected": given, "norms": given, "scales": "*fp32", "cos_sin": "*fp32"}
    indices = dict.fromkeys(("positions", "slots", "table"), "*i64")
    constants = {
        "heads": heads,
        "size": size,
        "rotary": rotary,
        "neox": neox,
        "dtype": cache,
        "head_block": next_power_of_2(heads),
        "size_block": next_power_of_2(size),
        "interpreted": False,
    }
    numbers = {"epsilon": "fp32", "row_stride": "i32"}
    signature = tensors | indices | numbers | dict.fromkeys(constants, "constexpr")
    source = ASTSource(_write_kernel, signature, constexprs=constants)
    made = compile_kernel(source, target=GPUTarget("cuda", capability, 32))
    return {"code": len(made.asm["cubin"]), "shared": made.metadata.shared}


if __name__ == "__main__":
    said = {}
    for each in CASES:
        capability, given, cache, heads, size, rotary, neox = each
        name = f"{capability}: {given[1:]} into {cache}, {heads} x {size}, {rotary}, {neox}"
        said[name] = compiled(*each)
    print(json.dumps(said))

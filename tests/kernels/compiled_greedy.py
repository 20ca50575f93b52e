"""Compiles greedy acceptance for an A100, an H100 and a B200, which needs none of them; prints what
came out.

A process of its own, so that no other test can have triton interpreted.
"""

from __future__ import annotations

import json

from triton import compile as compile_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sglang_dspark.kernels.accept_greedy import _accept_greedy_kernel

TENSORS = {
    "ids": "*i64",
    "rows": "*i64",
    "lens": "*i64",
    "tops": "*fp32",
    "choices": "*i32",
    "arrivals": "*i32",
    "accepted": "*i64",
    "bonus": "*i64",
    "dropped": "*i32",
    "emitted": "*i32",
    "new_lens": "*i64",
    "tokens": "*i64",
}
SIZES = ("requests", "vocab", "width", "row_stride", "part")
CASES = ((80, "*fp16", 1), (90, "*bf16", 1), (90, "*fp32", 32), (100, "*bf16", 8))


def compiled(capability: int, logits: str, parts: int) -> dict[str, int]:
    """Bytes of code and of shared memory, and arrivals counted."""
    constants = {"parts": parts, "lanes": 16, "places": 8, "block": 2048}
    signature = {**TENSORS, "logits": logits, **dict.fromkeys(SIZES, "i32")}
    signature |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(_accept_greedy_kernel, signature, constexprs=constants)
    target = GPUTarget("cuda", capability, 32)
    made = compile_kernel(source, target=target, options={"num_warps": 8})
    return {
        "code": len(made.asm["cubin"]),
        "shared": made.metadata.shared,
        "atomics": made.asm["ptx"].count("atom.global.gpu.acq_rel.add"),
    }


if __name__ == "__main__":
    cases = {f"{each[0]}: {each[1][1:]}, {each[2]} parts": compiled(*each) for each in CASES}
    print(json.dumps(cases))

"""Compiles the admission kernel for an A100, an H100 and a B200, which needs none of them; prints
what came out.

A process of its own, so that no other test can have triton interpreted.
"""

from __future__ import annotations

import json
import re

from triton import compile as compile_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sglang_dspark.kernels.admission import _admit_kernel

CASES = (  # capability, logits, [requests, gamma] of the block
    (80, "*fp16", (256, 8)),
    (90, "*bf16", (1, 8)),
    (90, "*fp32", (256, 8)),
    (90, "*bf16", (1024, 16)),
    (100, "*bf16", (256, 8)),
)


def compiled(capability: int, logits: str, block: tuple[int, int]) -> dict[str, int]:
    """Bytes of code and of shared memory, and float64 products fused with a sum outside of exp."""
    names = ("drafts", "rows", "gamma", "row_stride")
    signature = {
        "logits": logits,
        "terms": "*fp64",
        "indptr": "*i32",
        **dict.fromkeys(names, "i32"),
    }
    constants = dict(zip(("row_block", "gamma_block"), block, strict=True))
    signature |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(_admit_kernel, signature, constexprs=constants)
    target = GPUTarget("cuda", capability, 32)
    warps = 8 if block[0] * block[1] <= 4096 else 16
    options = {"num_warps": warps, "enable_fp_fusion": False}
    made = compile_kernel(source, target=target, options=options)
    return {
        "code": len(made.asm["cubin"]),
        "shared": made.metadata.shared,
        "fused": len(re.findall(r"fma\.rn\.f32", made.asm["ptx"])),
    }


def main() -> None:
    """Every case, by name."""
    report = {
        f"{capability}: {logits[1:]} {block}": compiled(capability, logits, block)
        for capability, logits, block in CASES
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()

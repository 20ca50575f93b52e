"""Compiles the packing of accepted rows for an A100, an H100 and a B200, which needs none of them;
prints what came out.

A process of its own, so that no other test can have triton interpreted.
"""

from __future__ import annotations

import json

from triton import compile as compile_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sglang_dspark.kernels.commit_rows import _pack_kernel

CASES = ((80, "*fp16", 64), (90, "*bf16", 1), (90, "*bf16", 1024), (100, "*fp32", 256))


def compiled(capability: int, hidden: str, lanes: int) -> dict[str, int]:
    """Bytes of code and of shared memory."""
    tensors = {"hidden": hidden, "emitted": "*i32", "lens": "*i64", "slots": "*i64"}
    written = {"packed": hidden, "positions": "*i64", "packed_slots": "*i64"}
    sizes = dict.fromkeys(("requests", "width", "features", "row_stride"), "i32")
    constants = {"lanes": lanes, "block": 4096}
    signature = {**tensors, **written, **sizes, **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(_pack_kernel, signature, constexprs=constants)
    made = compile_kernel(source, target=GPUTarget("cuda", capability, 32))
    return {"code": len(made.asm["cubin"]), "shared": made.metadata.shared}


if __name__ == "__main__":
    cases = {f"{each[0]}: {each[1][1:]}, {each[2]} lanes": compiled(*each) for each in CASES}
    print(json.dumps(cases))

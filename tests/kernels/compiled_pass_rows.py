"""Compiles the indexing of a pass for an A100, an H100 and a B200, which needs none of them; prints
what came out.

A process of its own, so that no other test can have triton interpreted.
"""

from __future__ import annotations

import json

from triton import compile as compile_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sglang_dspark.kernels.pass_rows import _rows_kernel


def compiled(capability: int, lanes: int) -> dict[str, int]:
    """Bytes of code and of shared memory."""
    read = {"indptr": "*i32", "ids": "*i64", "lens": "*i64", "owners": "*i64", "table": "*i32"}
    written = {"rows": "*i64", "windows": "*i32"}
    sizes = dict.fromkeys(("requests", "tokens", "slots", "table_stride"), "i32")
    constants = {"width": 8, "block": 256, "lanes": lanes, "steps": lanes.bit_length()}
    signature = {**read, **written, **sizes, **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(_rows_kernel, signature, constexprs=constants)
    made = compile_kernel(source, target=GPUTarget("cuda", capability, 32))
    return {"code": len(made.asm["cubin"]), "shared": made.metadata.shared}


if __name__ == "__main__":
    cases = ((80, 1), (90, 64), (100, 1024))
    print(json.dumps({f"{each[0]}: {each[1]} slots": compiled(*each) for each in cases}))

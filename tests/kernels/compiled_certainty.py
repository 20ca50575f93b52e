"""Compile the kernel of estimated confidence for an A100, an H100 and a B200, without a device.

Prints JSON. A process of its own: other tests may have Triton interpreted.
"""

from __future__ import annotations

import json

from triton import compile as compile_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sglang_dspark.kernels.certainty import _BLOCK, _certainty_kernel


def compiled(capability: int, logits: str, gamma: int) -> dict[str, int]:
    """Return bytes of code and of shared memory."""
    constants = {"least": 2.0**-24, "gamma": gamma, "rows": 1, "block": _BLOCK}
    types = {"logits": logits, "temperature": "*fp32", "out": "*fp32"}
    types |= dict.fromkeys(("count", "request_stride", "row_stride", "vocab"), "i32")
    types |= dict.fromkeys(constants, "constexpr")
    signature = {name: types[name] for name in _certainty_kernel.arg_names}
    source = ASTSource(_certainty_kernel, signature, constexprs=constants)
    target = GPUTarget("cuda", capability, 32)
    made = compile_kernel(source, target=target, options={"num_warps": 8})
    return {"code": len(made.asm["cubin"]), "shared": made.metadata.shared}


if __name__ == "__main__":
    cases = ((80, "*bf16", 5), (90, "*fp32", 7), (100, "*bf16", 15))
    print(json.dumps({f"{each[0]}: {each[1]} {each[2]}": compiled(*each) for each in cases}))

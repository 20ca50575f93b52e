"""Compile the kernel of penalties for an A100, an H100 and a B200, without these devices.

Prints JSON. A process of its own: other tests may have Triton interpreted.
"""

from __future__ import annotations

import json

from triton import compile as compile_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sglang_dspark.kernels.penalise import _BLOCK, _penalise_kernel


def compiled(capability: int, logits: str, width: int) -> dict[str, int]:
    """Bytes of code and of shared memory."""
    ids = dict.fromkeys(("rows", "window", "slots", "outputs", "minimum", "stops"), "*i64")
    numbers = dict.fromkeys(("frequency", "presence", "repetition"), "*fp32")
    integers = [
        "vocab", "stop_count", "request_stride", "row_stride", "window_stride", "table_stride",
        "frequency_stride", "presence_stride", "repetition_stride",
    ]  # fmt: skip
    constants = {"width": width, "block": _BLOCK, "interpreted": False}
    types = {"logits": logits, **ids, "table": "*i32", **numbers, **dict.fromkeys(integers, "i32")}
    types |= dict.fromkeys(constants, "constexpr")
    signature = {name: types[name] for name in _penalise_kernel.arg_names}
    source = ASTSource(_penalise_kernel, signature, constexprs=constants)
    target = GPUTarget("cuda", capability, 32)
    made = compile_kernel(source, target=target, options={"enable_fp_fusion": False})
    fused = made.asm["ptx"].count("fma.rn.f32")
    return {"code": len(made.asm["cubin"]), "shared": made.metadata.shared, "fused": fused}


if __name__ == "__main__":
    cases = ((80, "*fp32", 1), (90, "*bf16", 8), (100, "*fp32", 16))
    print(json.dumps({f"{each[0]}: {each[1]} {each[2]}": compiled(*each) for each in cases}))

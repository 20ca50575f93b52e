"""Compile the kernels of sampled acceptance for an A100, an H100 and a B200; needs no GPU.

Prints JSON: shared memory, atomics, size and instructions of each. A process of its own, so that no
other test can have triton interpreted.
"""

from __future__ import annotations

import json
from typing import Any

from triton import compile as compile_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sglang_dspark.kernels.accept_chunks import (
    bins_kernel,
    edge_kernel,
    list_kernel,
    softmax_kernel,
)
from sglang_dspark.kernels.accept_draws import draw_kernel
from sglang_dspark.kernels.accept_sampled import GPU
from sglang_dspark.kernels.accept_verdicts import judge_kernel

POINTERS = {
    "drafts": "*i64", "lengths": "*i32", "temperatures": "*fp32", "accept_uniforms": "*fp64",
    "bonus_uniforms": "*fp64", "top_k": "*i32", "top_p": "*fp32", "min_p": "*fp32",
    "draft_temperatures": "*fp32", "greedy": "*u8", "seeded": "*u8", "seeds": "*i64",
    "anchors": "*i64", "chunked": "*fp64", "counts": "*i16", "plan": "*i32", "tokens": "*i32",
    "weights": "*fp32", "findings": "*fp64", "arrivals": "*i32", "accepted": "*i64",
    "bonus": "*i64",
}  # fmt: skip
CONSTANTS = {"rows": 1, "block": GPU.block, "chunks": 64, "narrow": GPU.narrow}  # 152k tokens
KERNELS: dict[str, tuple[Any, dict[str, int]]] = {
    "softmax": (softmax_kernel, {}),
    "bins": (bins_kernel, {}),
    "edge": (edge_kernel, {}),
    "list": (list_kernel, {}),
    "judge": (judge_kernel, {}),
    "draw, token rule": (draw_kernel, {"by_block": 0}),
    "draw, block rule": (draw_kernel, {"by_block": 1}),
}
LOGITS = {80: "*fp16", 90: "*bf16", 100: "*fp32"}


def compiled(kernel: Any, own: dict[str, int], capability: int) -> Any:
    """Compile one kernel for a server's usual shapes; row strides are multiples of 16."""
    constants = {
        name: value for name, value in {**CONSTANTS, **own}.items() if name in kernel.arg_names
    }
    types = POINTERS | dict.fromkeys(("logits", "draft_logits"), LOGITS[capability])
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32")
        for name in kernel.arg_names
    }
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*") or name == "vocab" or name.endswith("stride")
    }
    source = ASTSource(kernel, signature, constexprs=constants, attrs=aligned)
    target = GPUTarget("cuda", capability, 32)
    return compile_kernel(source, target=target, options={"num_warps": GPU.num_warps})


def main() -> None:
    """Print what came of every kernel on each GPU; each has logits of another type."""
    report = {}
    for name, (kernel, own) in KERNELS.items():
        for capability in LOGITS:
            made = compiled(kernel, own, capability)
            ptx = made.asm["ptx"]
            report[f"{capability}: {name}"] = {
                "shared": made.metadata.shared,
                "atomics": ptx.count("atom.global.gpu.acq_rel.add"),
                "code": len(made.asm["cubin"]),
                "instructions": sum(line.endswith(";") for line in ptx.splitlines()),
            }
    print(json.dumps(report))


if __name__ == "__main__":
    main()

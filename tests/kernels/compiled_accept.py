"""Compiles the accept kernel for an A100, an H100 and a B200, which needs none of them; prints what
came out.

A process of its own, so that no other test can have triton interpreted.
"""

from __future__ import annotations

import json
import sys

from triton import compile as compile_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sglang_dspark.kernels.accept_sampled import GPU, _accept_kernel

REQUIRED = {
    "drafts": "*i64",
    "lengths": "*i32",
    "logits": "*bf16",
    "temperatures": "*fp32",
    "accept_uniforms": "*fp64",
    "bonus_uniforms": "*fp64",
}
OPTIONAL = {
    "top_k": "*i32",
    "top_p": "*fp32",
    "min_p": "*fp32",
    "draft_logits": "*bf16",
    "draft_temperatures": "*fp32",
    "greedy": "*u8",
    "seeded": "*u8",
    "seeds": "*i64",
    "anchors": "*i64",
    "skipped": "*u8",
}
WRITTEN = {"findings": "*fp64", "arrivals": "*i32", "accepted": "*i64", "bonus": "*i64"}
SIZES = ("requests", "gamma", "vocab", "row_stride", "draft_stride", "draft_row_stride")
DRAFT, SEEDS = ("draft_logits", "draft_temperatures"), ("seeded", "seeds", "anchors")
WAYS = {
    "uncut, dense": DRAFT,
    "top-k": ("top_k", *DRAFT),
    "min-p of an argmax": ("min_p", "skipped"),
    "all": tuple(OPTIONAL),
    "greedy and seeds": ("greedy", *SEEDS),
}


def compiled(given: tuple[str, ...], logits: str, capability: int) -> dict[str, int]:
    optional = {name: OPTIONAL[name] if name in given else "constexpr" for name in OPTIONAL}
    signature = {**REQUIRED, **optional, **WRITTEN, **dict.fromkeys(SIZES, "i32")}
    for name in ("logits", *(each for each in ("draft_logits",) if each in given)):
        signature[name] = logits
    constants = {name: None for name in OPTIONAL if name not in given}
    constants |= {"rows": 1, "block": GPU.block}
    signature |= dict.fromkeys(("rows", "block"), "constexpr")
    source = ASTSource(_accept_kernel, signature, constexprs=constants)
    target = GPUTarget("cuda", capability, 32)
    made = compile_kernel(source, target=target, options={"num_warps": GPU.num_warps})
    ptx = made.asm["ptx"]
    return {
        "shared": made.metadata.shared,
        "atomics": ptx.count("atom.global.gpu.acq_rel.add"),
        "code": len(made.asm["cubin"]),
    }


def main() -> None:
    """All options on an H100 and none; with the argument `every`, each of its ways, and all options
    on the others, whose logits are other types."""
    every = "every" in sys.argv
    ways = WAYS if every else {name: WAYS[name] for name in ("uncut, dense", "all")}
    report = {f"90: {name}": compiled(given, "*bf16", 90) for name, given in ways.items()}
    if every:
        report["80: all"] = compiled(WAYS["all"], "*fp16", 80)
        report["100: all"] = compiled(WAYS["all"], "*fp32", 100)
    print(json.dumps(report))


if __name__ == "__main__":
    main()

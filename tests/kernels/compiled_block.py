"""Compiles the block accept kernels for an A100, an H100 and a B200, which needs none of them;
prints what came out.

A process of its own, so that no other test can have triton interpreted.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from triton import compile as compile_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sglang_dspark.kernels.accept_block import _judge_kernel, _keep_kernel
from sglang_dspark.kernels.accept_sampled import GPU
from tests.kernels.compiled_accept import DRAFT, OPTIONAL, REQUIRED, SIZES, WAYS, WRITTEN

NOTED = {"findings": "*fp64", "chances": "*fp64"}
KERNELS = {"judge": (_judge_kernel, NOTED), "keep": (_keep_kernel, {**NOTED, **WRITTEN})}
LOGITS = {"80": "*fp16", "90": "*bf16", "100": "*fp32"}


def compiled(kernel: Any, own: dict[str, str], given: tuple[str, ...], target: str) -> Any:
    """One kernel with the optional arguments `given`."""
    optional = {name: OPTIONAL[name] if name in given else "constexpr" for name in OPTIONAL}
    signature = {**REQUIRED, **optional, **own, **dict.fromkeys(SIZES, "i32")}
    signature |= dict.fromkeys(("logits", "draft_logits"), LOGITS[target])
    constants = {name: None for name in OPTIONAL if name not in given}
    constants |= {"rows": 1, "block": GPU.block}
    signature |= dict.fromkeys(("rows", "block"), "constexpr")
    source = ASTSource(kernel, signature, constexprs=constants)
    made = compile_kernel(
        source, target=GPUTarget("cuda", int(target), 32), options={"num_warps": GPU.num_warps}
    )
    return {
        "shared": made.metadata.shared,
        "atomics": made.asm["ptx"].count("atom.global.gpu.acq_rel.add"),
        "code": len(made.asm["cubin"]),
    }


def main() -> None:
    """All options at once on an H100, and without any; with the argument `every`, on each."""
    report = {}
    for name, (kernel, own) in KERNELS.items():
        for target in LOGITS if "every" in sys.argv else ("90",):
            report[f"{target}: {name}"] = compiled(kernel, own, WAYS["all"], target)
    report["90: keep, uncut"] = compiled(*KERNELS["keep"], DRAFT, "90")
    print(json.dumps(report))


if __name__ == "__main__":
    main()

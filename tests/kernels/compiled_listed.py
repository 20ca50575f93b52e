"""Compiles the accept kernels on lists for an A100, an H100 and a B200, which needs none of them;
prints what came out.

A process of its own, so that no other test can have triton interpreted.
"""

from __future__ import annotations

import json
from typing import Any

from triton import compile as compile_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sglang_dspark.kernels.accept_listed import _WARPS, LISTS, _cut_kernel, _keep_kernel
from sglang_dspark.kernels.accept_listed import _scale_kernel as scale
from sglang_dspark.kernels.accept_sampled import GPU
from tests.kernels.compiled_accept import DRAFT, OPTIONAL, REQUIRED, SIZES

CUTS = ("top_k", "top_p", "min_p", "greedy", "seeded")
ROWS = {"ends": "*i64", "read": "*fp32", "findings": "*fp64"}
LISTED = {"weights": "*fp32", "tokens": "*i64"}
CHUNK = dict.fromkeys(("begin", "count", "total"), "i32")
KERNELS: dict[str, tuple[Any, dict[str, str], dict[str, Any], int]] = {
    "scale": (scale, ROWS | CHUNK, {"block": GPU.block}, GPU.num_warps),
    "cut": (_cut_kernel, ROWS | LISTED | CHUNK, {"block": GPU.block, "tier": 0}, _WARPS),
    "keep": (
        _keep_kernel,
        {"ends": "*i64", "findings": "*fp64", **LISTED}
        | {"accepted": "*i64", "bonus": "*i64", "complete": "*u8", "total": "i32"},
        {"tier": 0, "whole": True},
        _WARPS,
    ),
}
LOGITS = {"80": "*fp16", "90": "*fp32", "100": "*bf16"}


def compiled(name: str, target: str, given: tuple[str, ...], tier: int) -> dict[str, int]:
    """One kernel with the optional arguments `given`."""
    kernel, own, constants, warps = KERNELS[name]
    optional = {each: OPTIONAL[each] for each in (*CUTS, *DRAFT)}
    signature = REQUIRED | optional | own | dict.fromkeys((*SIZES, "listed"), "i32")
    signature |= dict.fromkeys(("logits", "draft_logits"), LOGITS[target])
    missing = [each for each in optional if each not in given]
    constants = {each: tier if each == "tier" else value for each, value in constants.items()}
    constants |= {"rows": 1, **dict.fromkeys(missing)}
    if "draft_logits" in missing and "whole" in constants:
        constants["whole"] = False
    signature |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(kernel, signature, constexprs=constants)
    made = compile_kernel(
        source, target=GPUTarget("cuda", int(target), 32), options={"num_warps": warps}
    )
    return {"shared": made.metadata.shared, "code": len(made.asm["cubin"])}


def main() -> None:
    """All settings on each card, and on an H100 lists of every length and drafts of an argmax."""
    report = {}
    for name in KERNELS:
        for target in LOGITS:
            report[f"{target}: {name}"] = compiled(name, target, (*CUTS, *DRAFT), LISTS[0])
        for tier in LISTS[1:] if name != "scale" else ():
            report[f"90: {name} {tier}"] = compiled(name, "90", (*CUTS, *DRAFT), tier)
        report[f"90: {name}, argmax, no seeds"] = compiled(name, "90", CUTS[:4], LISTS[0])
    print(json.dumps(report))


if __name__ == "__main__":
    main()

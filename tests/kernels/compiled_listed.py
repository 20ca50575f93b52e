"""Compiles the accept kernels on lists for an A100, an H100 and a B200, which needs none of them;
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

from sglang_dspark.kernels.accept_listed import (
    LISTS,
    REGISTERS,
    _cut_kernel,
    _keep_kernel,
    _list_kernel,
    capacity_of,
    warps_of,
)
from sglang_dspark.kernels.accept_sampled import GPU
from tests.kernels.compiled_accept import DRAFT, OPTIONAL, REQUIRED, SIZES

CUTS = ("top_k", "top_p", "min_p", "greedy", "seeded")
LISTED = {"ends": "*i64", "findings": "*fp64", "weights": "*fp32", "tokens": "*i32"}
KERNELS: dict[str, tuple[Any, dict[str, str], tuple[str, ...]]] = {
    "list": (_list_kernel, {"listed": "i32", "capacity": "i32"}, ("block",)),
    "cut": (_cut_kernel, {}, ("capacity",)),
    "keep": (
        _keep_kernel,
        {"accepted": "*i64", "bonus": "*i64", "complete": "*u8"},
        ("capacity", "whole"),
    ),
}
LOGITS = {"80": "*fp16", "90": "*fp32", "100": "*bf16"}


def compiled(name: str, target: str, given: tuple[str, ...], listed: int) -> dict[str, int]:
    """One kernel with the optional arguments `given`."""
    kernel, own, named = KERNELS[name]
    optional = {each: OPTIONAL[each] for each in (*CUTS, *DRAFT)}
    signature = REQUIRED | optional | LISTED | own | dict.fromkeys((*SIZES, "total"), "i32")
    signature |= dict.fromkeys(("logits", "draft_logits"), LOGITS[target])
    missing = [each for each in optional if each not in given]
    capacity = capacity_of(listed)
    values = {"block": GPU.block, "capacity": capacity, "whole": "draft_logits" not in missing}
    constants = {"rows": 1, **{each: values[each] for each in named}, **dict.fromkeys(missing)}
    signature |= dict.fromkeys(constants, "constexpr")
    options = {"num_warps": warps_of(capacity)}
    if name == "list":
        options = {"num_warps": GPU.num_warps, "maxnreg": REGISTERS}
    made = compile_kernel(
        ASTSource(kernel, signature, constexprs=constants),
        target=GPUTarget("cuda", int(target), 32),
        options=options,
    )
    return {"shared": made.metadata.shared, "code": len(made.asm["cubin"])}


def main() -> None:
    """All settings on an H100; with the argument `every`, on each card, and on an H100 lists of
    every length and drafts of an argmax."""
    report = {}
    for name in KERNELS:
        if "every" not in sys.argv:
            report[f"90: {name}"] = compiled(name, "90", (*CUTS, *DRAFT), LISTS[0])
            continue
        for target in LOGITS:
            report[f"{target}: {name}"] = compiled(name, target, (*CUTS, *DRAFT), LISTS[0])
        for listed in LISTS[1:] if name != "list" else ():
            report[f"90: {name} {listed}"] = compiled(name, "90", (*CUTS, *DRAFT), listed)
        report[f"90: {name}, argmax, no seeds"] = compiled(name, "90", CUTS[:4], LISTS[0])
    print(json.dumps(report))


if __name__ == "__main__":
    main()

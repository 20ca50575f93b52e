"""Compiles the kernels of the experts for an H100 and a B200, which needs neither; prints what came
out.

A process of its own, so that no other test can have triton interpreted.
"""

from __future__ import annotations

import json
import re
import sys

from triton import compile as compile_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sglang_dspark.benchmarks.grouped_shapes import KINDS
from sglang_dspark.kernels.fp8_rows import _fp8_rows_kernel
from sglang_dspark.kernels.grouped_config import tiling
from sglang_dspark.kernels.grouped_gemm import _grouped_kernel
from sglang_dspark.kernels.routing import _route_kernel, _sum_kernel

DTYPES = {"bf16": "*bf16", "fp8": "*fp8e4nv", "mxfp4": "*i16", "nvfp4": "*i16"}
SCALES = {"bf16": "*bf16", "fp8": "*fp32", "mxfp4": "*u8", "nvfp4": "*fp8e4nv"}
OPTIONS = ("num_warps", "num_stages", "maxnreg")
WIDTHS = ("n", "k", "w_width", "scale_width", "columns")  # multiples of 16
INTEGERS = ("size", "experts", "n", "k", "w_width", "scale_width")
PLAIN = {"swiglu": False, "scatter": False, "fp8_out": False, "top_k": 0}
_COMPUTES = re.compile(r"\s+(?:@!?%p\d+ )?(?!mov)[a-z][\w.:]+\s")
GATE_UP = {**PLAIN, "swiglu": True, "top_k": 6}
DOWN = {**PLAIN, "scatter": True}


def compiled(kernel, signature, constants, options, capability) -> dict[str, int | bool]:
    names = list(signature)
    aligned = [n for n in names if signature[n].startswith("*") or n in WIDTHS]
    attributes = {(names.index(n),): [["tt.divisibility", 16]] for n in aligned}
    signature = {**signature, **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    made = compile_kernel(source, target=GPUTarget("cuda", capability, 32), options=options)
    ptx = made.asm["ptx"]
    tensor = "wgmma" in ptx or "tcgen05.mma" in ptx
    return {
        "shared": made.metadata.shared,
        "warp_group": tensor,
        "code": len(made.asm["cubin"]),
        "packed": ptx.count("fma.rn.bf16x2"),
        "loop": _in_the_loop(ptx),
    }


def _in_the_loop(ptx: str) -> int:
    """Instructions of the innermost loop with tensor instructions, without moves; 0 for none."""
    lines = ptx.splitlines()
    labels = {line.split(":")[0]: i for i, line in enumerate(lines) if line.startswith("$L")}
    sizes = []
    for end, line in enumerate(lines):
        back = re.search(r"\bbra(?:\.uni)?\s+(\$L\w+);", line)
        first = end if back is None else labels[back[1]]
        body = lines[first:end]
        if any("wgmma.mma_async" in each for each in body):
            sizes.append(sum(_COMPUTES.match(each) is not None for each in body))
    return min(sizes, default=0)


def grouped(kind: str, group: int, way: dict, capability: int) -> dict[str, int | bool]:
    rows, form = kind.split(" x ")
    how = tiling(group, form, rows == "fp8", way["swiglu"], way["fp8_out"]).as_options()
    options = {name: how.pop(name) for name in OPTIONS if name in how}
    pointers = {
        "x": DTYPES[rows],
        "w": DTYPES[form],
        "out": "*fp8e4nv" if way["fp8_out"] else "*bf16",
        "x_scale": "*fp32",
        "w_scale": SCALES[form],
        **dict.fromkeys(("w_global", "out_scale"), "*fp32"),
        **dict.fromkeys(("gather", "pairs"), "*i32"),
        "weights": "*fp32",
        "offsets": "*i32",
    }
    signature = {**pointers, **dict.fromkeys(INTEGERS, "i32")}
    constants = {
        **way,
        **how,
        "form": form,
        "x_scaled": rows == "fp8",
        "joined": form.endswith("fp4") and capability >= 100,
        "upcast": False,
        "groups_block": 512,
    }
    return compiled(_grouped_kernel, signature, constants, options, capability)


def others(capability: int) -> dict[str, dict[str, int | bool]]:
    fp8 = {"x": "*bf16", "codes": "*fp8e4nv", "scales": "*fp32", "rows": "i32", "k": "i32"}
    route = {"ids": "*i64", "pairs": "*i32", "offsets": "*i32", "count": "i32", "experts": "i32"}
    total = {"products": "*bf16", "out": "*bf16", "columns": "i32"}
    cases = {
        "fp8 rows": (_fp8_rows_kernel, fp8, {"interpreted": False, "block": 16}),
        "route": (_route_kernel, route, {"block": 1024}),
        "sum": (_sum_kernel, total, {"top_k": 6, "interpreted": False, "block": 1024}),
    }
    return {name: compiled(*case, {}, capability) for name, case in cases.items()}


def cases(capability: int, every: bool) -> dict[str, tuple[str, int, dict]]:
    """By name: formats for few and many rows as they are used in a layer; on Blackwell FP4."""
    kinds = KINDS if capability == 90 else tuple(k for k in KINDS if k.endswith("fp4"))
    found = {}
    for i, kind in enumerate(kinds):
        for turn, group in enumerate((16, 128)):
            way = {**GATE_UP, "fp8_out": kind.startswith("fp8")}
            decode = kind in ("bf16 x mxfp4", "bf16 x nvfp4") and (capability, group) == (90, 16)
            if every or decode or (i % 2 == turn and (capability == 90 or i in (0, 3))):
                found[f"{kind}, gate-up, {group}"] = (kind, group, way)
            if every or (i % 2 != turn and capability == 90 and not kind.startswith("bf16")):
                found[f"{kind}, down, {group}"] = (kind, group, DOWN)
    return found


def main() -> None:
    """A choice of them; all with the argument `every`, which takes a minute."""
    report = others(90)
    for capability in (90, 100):
        for name, case in cases(capability, "every" in sys.argv).items():
            report[f"{capability}: {name}"] = grouped(*case, capability)
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()

"""Compiles the grouped GEMM for an H100, which needs none; prints what came out.

A process of its own, so that no other test can have triton interpreted.
"""

from __future__ import annotations

import json

from triton import compile as compile_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sglang_dspark.kernels.grouped_gemm import _grouped_kernel, launch_options

POINTERS = {
    "x_scale": "*fp32",
    "w_scale": "*fp32",
    "tile_expert": "*i32",
    "tile_row": "*i32",
    "ends": "*i32",
    "limits": "*i32",
}
SIZES = dict.fromkeys(("n", "k", "n_scales", "k_scales"), "i32")
ALIGNED = {(i,): [["tt.divisibility", 16]] for i in (0, 1, 2, 3, 4, 10)}  # pointers and K
FORMATS = (("*bf16", "*bf16"), ("*bf16", "*fp8e4nv"), ("*fp8e4nv", "*fp8e4nv"))


def compiled(x: str, weight: str, group: int) -> dict[str, int | bool]:
    how = launch_options(group, x == "*fp8e4nv", weight == "*fp8e4nv")
    options = {name: how.pop(name) for name in ("num_warps", "num_stages")}
    constants = {**how, "upcast": False}
    signature = {"x": x, "w": weight, "out": "*bf16", **POINTERS, **SIZES}
    signature |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(_grouped_kernel, signature, constexprs=constants, attrs=ALIGNED)
    kernel = compile_kernel(source, target=GPUTarget("cuda", 90, 32), options=options)
    return {"shared": kernel.metadata.shared, "warp_group": "wgmma" in kernel.asm["ptx"]}


def main() -> None:
    report = {
        f"{x} {weight} {height}": compiled(x, weight, height)
        for x, weight in FORMATS
        for height in (16, 128)
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()

"""Compiles attention of verify windows for an A100, an L40S, an H100, a B200 and an RTX 5090, which
needs none of them; prints what came out.

A process of its own, so that no other test can have triton interpreted.
"""

from __future__ import annotations

import json
import re
import sys

from triton import compile as compile_kernel
from triton import next_power_of_2
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sglang_dspark.kernels.window_attention import _merge_kernel, _window_kernel
from sglang_dspark.kernels.window_tiling import window_tiling
from tests.kernels.compiled_markov import resources

# Capability, rows, cache, query heads and KV heads, width, rows of a window, slots, processors,
# everything that a rule may have.
CASES = (
    (80, "bf16", "bf16", 32, 8, 128, 8, 64, 108, False),
    (80, "fp16", "fp8e5", 32, 8, 128, 8, 4, 108, True),
    (86, "bf16", "bf16", 64, 8, 128, 8, 1, 84, False),
    (89, "bf16", "fp8e4nv", 32, 8, 128, 8, 8, 142, False),
    (90, "bf16", "bf16", 32, 8, 128, 8, 128, 132, False),
    (90, "bf16", "bf16", 64, 8, 128, 8, 8, 132, True),
    (90, "fp32", "fp32", 9, 3, 64, 8, 8, 132, False),
    (90, "bf16", "bf16", 16, 1, 256, 8, 8, 132, False),
    (100, "bf16", "bf16", 64, 8, 128, 8, 8, 148, False),
    (120, "bf16", "bf16", 32, 8, 128, 8, 64, 170, False),
    (120, "bf16", "fp8e4nv", 8, 8, 80, 1, 1, 170, True),
)
FLOATS = ("scale", "cached_scale", "value_scale", "logit_cap")
SIXTEENS = re.compile(r"_step$|_head$")  # strides that Triton finds to be multiples of 16


def compiled(
    capability: int,
    given: str,
    cache: str,
    heads: int,
    kv_heads: int,
    size: int,
    longest: int,
    slots: int,
    processors: int,
    everything: bool,
) -> dict[str, dict[str, int]]:
    """Of both kernels (the merge only where contexts are split)."""
    group = heads // kv_heads
    how = divmod(capability, 10)
    tiling = window_tiling(slots, kv_heads, group, longest, size, processors, how)
    both = {
        "longest": longest,
        "value_size": size,
        "has_sinks": everything,
        "splits": tiling.splits,
        "least": tiling.least,
        "block_n": tiling.keys,
        "value_block": next_power_of_2(size),
        "interpreted": False,
    }
    constants = {
        **both,
        "group": group,
        "size": size,
        "causal": True,
        "sliding": 100 if everything else -1,
        "capped": everything,
        "block_m": tiling.rows,
        "blocks": tiling.blocks,
        "window_n": tiling.window,
        "size_block": next_power_of_2(size),
    }
    pointers = {
        **dict.fromkeys(("queries", "keys", "values", "out"), f"*{given}"),
        **dict.fromkeys(("cached_keys", "cached_values"), f"*{cache}"),
        **dict.fromkeys(("window_starts", "indices"), "*i64"),
        **dict.fromkeys(("parts", "part_sums", "sinks"), "*fp32"),
        "context_starts": "*i32",
    }
    found = {"window": one(_window_kernel, capability, pointers, constants, tiling.warps, 3)}
    if tiling.splits > 1:
        constants = {**both, "starts_block": next_power_of_2(slots + 1)}
        found["merge"] = one(_merge_kernel, capability, pointers, constants, 2, 3)
    return found


def one(
    kernel: object,
    capability: int,
    pointers: dict[str, str],
    constants: dict[str, object],
    warps: int,
    stages: int,
) -> dict[str, int]:
    """Bytes of shared memory, registers of a thread, and bytes of its stack (spilled ones)."""
    constants = dict(constants)
    if not constants["has_sinks"]:
        constants["sinks"] = None
    if constants["splits"] == 1:
        constants |= {"parts": None, "part_sums": None}
    signature, aligned = {}, {}
    for index, name in enumerate(kernel.arg_names):  # type: ignore[attr-defined]
        if name in constants:
            signature[name] = "constexpr"
            continue
        signature[name] = pointers.get(name, "fp32" if name in FLOATS else "i32")
        if name in pointers or SIXTEENS.search(name):
            aligned[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, aligned)
    target = GPUTarget("cuda", capability, 32)
    made = compile_kernel(source, target, {"num_warps": warps, "num_stages": stages})
    return {
        "shared": made.metadata.shared,
        "prefetched": made.asm["ptx"].count("cp.async.c"),  # copies that run during a step before
        **resources(made.asm["cubin"]),
    }


def main() -> None:
    """The first case of an Ada, an H100 and a B200; with the argument `every`, all of them."""
    report = {}
    for case in CASES if "every" in sys.argv else (CASES[3], CASES[4], CASES[8]):
        capability, given, cache, heads, kv_heads, size, longest, slots = case[:8]
        name = f"{capability}: {given} x {cache}, {heads}/{kv_heads} x {size}, {longest}, {slots}"
        report[name] = compiled(*case)
    print(json.dumps(report))


if __name__ == "__main__":
    main()

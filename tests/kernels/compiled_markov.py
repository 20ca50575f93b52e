"""Compiles the draft steps' kernel for an A100, an L40S, an H100 and a B200, which needs none of
them; prints what came out.

A process of its own, so that no other test can have triton interpreted.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from tempfile import NamedTemporaryFile

import torch
from triton import compile as compile_kernel
from triton import knobs
from triton import language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sglang_dspark.kernels.markov_sample import LARGE, Launch, _markov_kernel, depth_of

NAMES = _markov_kernel.arg_names
TYPES = {
    "*bf16": (torch.bfloat16, tl.bfloat16),
    "*fp16": (torch.float16, tl.float16),
    "*fp32": (torch.float32, tl.float32),
}
WEIGHTS = ("base", "w1", "w2", "logits", "from_hidden", "weight", "latents", "features")
POINTERS = {
    **dict.fromkeys(("anchors", "ids", "offset", "scratch", "tokens"), "*i64"),
    **dict.fromkeys(("temperatures", "states"), "*fp32"),
    **dict.fromkeys(("judge_weight", "judge_bias", "confidence"), "*fp32"),
}
SAMPLED = {"temperatures", "offset", "logits"}
GATED = {"from_hidden", "weight", "latents"}
JUDGED = {"features", "judge_weight", "judge_bias", "confidence"}
ALWAYS = {"base", "w1", "w2", "anchors", "scratch", "tokens"}
EVEN = {
    *("rank", "width", "depth", "base_stride", "base_step", "logits_stride", "logits_step"),
    *("hidden_stride", "hidden_step", "weight_stride", "feature_stride", "feature_step"),
}
WAYS: dict[str, set[str]] = {
    "vanilla, argmax": set(),
    "vanilla, sampled": SAMPLED,
    "gated, sampled": SAMPLED | GATED,
    "recurrent, all": SAMPLED | GATED | JUDGED | {"states", "ids"},
}


ONE = ("requests", "anchor_stride")  # what Triton takes for a constant in a batch of one request
ONES = (*ONE, "gamma", "stop", "key", "width", "rank", "depth")


def compiled(
    given: set[str],
    kind: str,
    capability: int,
    rows: int,
    ones: tuple[str, ...] = (),
    how: Launch = LARGE,
) -> dict[str, int]:
    dtype, step_type = TYPES[kind]
    pointers = {name: kind for name in WEIGHTS} | POINTERS
    constants: dict[str, object] = {
        "recurrent": "states" in given,
        "scattered": "ids" in given,
        "with_markov": True,
        "step_type": step_type,
        "interpreted": False,
        "rows": rows,
        "block": how.block,
        "ranks": depth_of(dtype),
    }
    constants |= {name: None for name in pointers if name not in given | ALWAYS}
    constants |= dict.fromkeys(ones, 1)
    signature = {name: pointers.get(name, "i32") for name in NAMES} | {"key": "i64"}
    signature |= dict.fromkeys(constants, "constexpr")
    even = [n for n in NAMES if signature[n].startswith("*") or n in EVEN - set(ones)]
    attributes = {(NAMES.index(name),): [["tt.divisibility", 16]] for name in even}
    source = ASTSource(_markov_kernel, signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": how.num_warps, "launch_cooperative_grid": True}
    made = compile_kernel(source, target=GPUTarget("cuda", capability, 32), options=options)
    ptx = made.asm["ptx"]
    return {
        "shared": made.metadata.shared,
        "arrivals": ptx.count("acq_rel.add"),
        "maxima": ptx.count(".max.s64"),
        "together": made.metadata.launch_cooperative_grid,
        "tensor": ptx.count("mma"),
        **resources(made.asm["cubin"]),
    }


def resources(code: bytes) -> dict[str, int]:
    """A thread's registers, and bytes of its stack, where what registers cannot hold lies."""
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {
        name: int(re.findall(rf"{word}:(\d+)", said)[0])
        for name, word in (("registers", "REG"), ("stack", "STACK"))
    }


def main() -> None:
    """On an H100 the most common way, for one request and many, and the largest; with the argument
    `every`, each way there, and the largest on the others, of other types."""
    sampled, largest = WAYS["vanilla, sampled"], WAYS["recurrent, all"]
    report = {"90: vanilla, 64 requests": compiled(sampled, "*bf16", 90, 64)}
    report["90: one of all"] = compiled(largest, "*bf16", 90, 16, ONES)
    if "every" in sys.argv:
        report |= {f"90: {name}": compiled(given, "*bf16", 90, 16) for name, given in WAYS.items()}
        report["90: vanilla, one request"] = compiled(sampled, "*bf16", 90, 16, ONE)
        report["80: all"] = compiled(largest, "*fp16", 80, 64)
        report["89: all"] = compiled(largest, "*bf16", 89, 64, how=Launch())
        report["100: all"] = compiled(largest, "*fp32", 100, 64)
    print(json.dumps(report))


if __name__ == "__main__":
    main()

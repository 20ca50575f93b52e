"""Every kernel against its reference, compiled on the device; in Triton's interpreter without one.

Admission, greedy acceptance and packing are compared bit for bit, drafts and sampled acceptance
where rounding does not decide; keys and values that a commit writes to a unit in the last place;
grouped products and expert layers with float64 by `calc_diff`.
Ends with status 1, after all comparisons, where one is off.
"""

from __future__ import annotations

import os
import sys

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

from dataclasses import replace
from typing import Any

from sglang_dspark.benchmarks import (
    commit_shapes,
    commit_write_shapes,
    greedy_shapes,
    markov_shapes,
)
from sglang_dspark.benchmarks.accept_shapes import on, steps
from sglang_dspark.benchmarks.experts import correctness
from sglang_dspark.benchmarks.grouped_shapes import KINDS, grouped_operands, grouped_shapes
from sglang_dspark.benchmarks.shapes import batches
from sglang_dspark.kernels.accept_block import accept_block_triton
from sglang_dspark.kernels.accept_greedy import (
    accept_greedy_torch,
    accept_greedy_triton,
    room_for,
)
from sglang_dspark.kernels.accept_sampled import Tiling, accept_triton
from sglang_dspark.kernels.admission import admit_torch, admit_triton
from sglang_dspark.kernels.commit_rows import pack_torch, pack_triton
from sglang_dspark.kernels.commit_write import why_not, write_torch, write_triton
from sglang_dspark.kernels.grouped_gemm import m_grouped_gemm_nt_contiguous
from sglang_dspark.kernels.grouped_layout import GroupedOperands
from sglang_dspark.kernels.grouped_reference import (
    calc_diff,
    m_grouped_gemm_nt_contiguous_reference,
)
from sglang_dspark.verify import accept_block, accept_sampled
from tests.kernels.accept_reference import reference, undecided
from tests.kernels.greedy_reference import different
from tools.gpu.kit.device import device_name, say

# Of sampled acceptance, by either rule. Three of four are another variant of the kernel, which
# takes seconds to compile; interpreted each step takes one.
STEPS = {"cuda": 24, "cpu": 12}
DRAFTED = {"cuda": 16, "cpu": 24}  # batches of drafts, for the same reason
ODD = {"cuda": 48, "cpu": 24}  # of greedy acceptance, of packing and of writing
SAMPLED: dict[str, tuple[Any, Any]] = {
    "accept": (accept_triton, accept_sampled),
    "accept_block": (accept_block_triton, accept_block),
}
MOST_DIFF = 1e-3
MOST_LAYER_DIFF = 5e-3  # activations rounded to FP8 on both sides, in another order


def main() -> int:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    say(device=device_name(), interpreted=device == "cpu")
    compared, different = admissions(device)
    say(admission={"batches": compared, "different": different})
    sampled = {name: accepted(device, STEPS[device], *each) for name, each in SAMPLED.items()}
    say(**sampled)
    greedy, packed = greedily(device, ODD[device]), packings(device, ODD[device])
    drafts = markov_shapes.parity_rows(DRAFTED[device], device)
    written = writings(device, ODD[device])
    say(greedy=greedy, commit=packed, commit_write=written, markov=drafts)
    products = grouped(device)
    say(products=products)
    layers = correctness(device)
    say(layers=layers)
    off = [f"admission {shape}" for shape in different]
    counted = {
        **sampled,
        "greedy": greedy,
        "commit": packed,
        "commit_write": written,
        "markov": drafts,
    }
    for name, found in counted.items():
        off += [f"{name}, {each}" for each in found["wrong"]]
    off += [name for name, diff in products.items() if not diff <= MOST_DIFF]
    off += [name for name, diff in layers.items() if not diff <= MOST_LAYER_DIFF]
    for name in off:
        print(f"parity: {name} is off", file=sys.stderr)
    return 1 if off else 0


def admissions(device: str) -> tuple[int, list[list[int]]]:
    """Batches of the shared generator, and [R, gamma] of those whose lengths differ."""
    count, different = 0, []
    for case in batches(device):
        count += 1
        if not torch.equal(admit_triton(*case), admit_torch(*case)):
            different.append(list(case.logits.shape))
    return count, different


def accepted(device: str, count: int, operator: Any, rule: Any) -> dict[str, Any]:
    """Requests of `count` odd steps, those that rounding decides, and those that are wrong."""
    arrivals = torch.zeros(16, dtype=torch.int32, device=device)
    how = Tiling() if device == "cuda" else Tiling(16, 256)  # interpreted, a program is slow
    requests, near, wrong = 0, 0, []
    for number, given in enumerate(steps(count, 0)):
        expected = reference(given, rule)
        undecided_here = undecided(given, expected, rule)
        found = operator(on(given, device), arrivals, how)
        same = found.accepted.cpu() == expected.accepted
        same &= found.bonus.cpu() == expected.bonus
        wrong += [f"step {number}, request {r}" for r in (~same & ~undecided_here).nonzero()[:, 0]]
        requests, near = requests + len(same), near + int(undecided_here.sum())
    return {"requests": requests, "undecided": near, "wrong": wrong}


def greedily(device: str, count: int) -> dict[str, Any]:
    """Requests of `count` odd steps, and outcomes that differ."""
    room = room_for(9, 9, torch.device(device))
    requests, wrong = 0, []
    for number, given in enumerate(greedy_shapes.steps(count, 0, device)):
        out = greedy_shapes.outputs(*given.window.shape, device)
        accept_greedy_triton(*given, out, room)
        wrong += [f"step {number}, {name}" for name in different(out, accept_greedy_torch(*given))]
        requests += len(out.accepted)
    return {"requests": requests, "wrong": wrong}


def packings(device: str, count: int) -> dict[str, Any]:
    """Rows of `count` odd steps, and the steps that are packed otherwise."""
    rows, wrong = 0, []
    for number, given in enumerate(commit_shapes.windows(count, 0, device)):
        found, expected = pack_triton(*given), pack_torch(*given)
        rows += given.rows
        if not all(torch.equal(*pair) for pair in zip(found, expected, strict=True)):
            wrong.append(f"step {number}")
    return {"rows": rows, "wrong": wrong}


def writings(device: str, count: int) -> dict[str, Any]:
    """Rows that `count` odd launches write, and those whose caches are others."""
    rows, wrong = 0, []
    for number, given in enumerate(commit_write_shapes.cases(count, 0, device)):
        if why_not(given.layers, given.cos_sin.shape[1]) is not None:
            continue  # FP8 on a device that has none
        expected = commit_write_shapes.copied(given)
        write_triton(*given)
        write_torch(*expected)
        rows += len(given.layers.keys) * int((given.slots > 0).sum())
        if not commit_write_shapes.difference(given, expected) <= commit_write_shapes.MOST:
            wrong.append(f"launch {number}")
    return {"rows": rows, "wrong": wrong}


def grouped(device: str) -> dict[str, float]:
    """calc_diff of a product of every kind and odd shape against float64."""
    report = {}
    for shape in grouped_shapes():
        for kind in KINDS:
            given = moved(grouped_operands(shape, kind), device)
            found = m_grouped_gemm_nt_contiguous(given)
            expected = m_grouped_gemm_nt_contiguous_reference(given)
            report[f"{kind}, {shape.name}"] = calc_diff(found, expected)
    return report


def moved(given: GroupedOperands, device: str) -> GroupedOperands:
    """The operands with all tensors on a device."""
    held = {k: v for k, v in vars(given).items() if isinstance(v, torch.Tensor)}
    tensors: dict[str, Any] = {name: each.to(device) for name, each in held.items()}
    return replace(given, **tensors)


if __name__ == "__main__":
    sys.exit(main())

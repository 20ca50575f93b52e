"""Every kernel against its reference, compiled on the device; in Triton's interpreter without one.

Admission, greedy acceptance and packing are compared bit for bit, drafts and sampled acceptance
where rounding does not decide; keys and values that a commit writes to a unit in the last place;
grouped products and expert layers with float64 by `calc_diff`.
Each kernel has a process of its own: on a device most of the time goes into compiling.
Ends with status 1, after all comparisons, where one is off or could not be made.
"""

from __future__ import annotations

import os
import sys
import traceback

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
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
STEPS = {"cuda": 16, "cpu": 12}
DRAFTED = {"cuda": 16, "cpu": 24}  # batches of drafts, for the same reason
ODD = {"cuda": 48, "cpu": 24}  # of greedy acceptance, of packing and of writing
SAMPLED: dict[str, tuple[Any, Any]] = {
    "accept": (accept_triton, accept_sampled),
    "accept_block": (accept_block_triton, accept_block),
}
# `calc_diff` at most; in layers activations are rounded to FP8 on both sides, in another order.
MOST = {"products": 1e-3, "layers": 5e-3}


PROCESSES = {"cuda": 9, "cpu": 2}  # to compile a variant of a kernel takes seconds of a core


def main() -> int:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    say(device=device_name(), interpreted=device == "cpu")
    whole = True
    with ProcessPoolExecutor(PROCESSES[device], get_context("spawn")) as pool:
        running = {pool.submit(PARTS[name], device): name for name in PARTS}
        for done in as_completed(running):
            name = running[done]
            if (error := done.exception()) is not None:
                reason = "".join(traceback.format_exception(error))
                print(f"parity: {name} failed\n{reason}", file=sys.stderr, flush=True)
                say(**{name: {"failed": str(error)}})
                whole = False
                continue
            found = done.result()
            say(**{name: found})
            for each in wrong(name, found):
                print(f"parity: {name}, {each} is off", file=sys.stderr, flush=True)
                whole = False
    return 0 if whole else 1


def wrong(name: str, found: dict[str, Any]) -> list[str]:
    """What is off in a part's findings."""
    if name in MOST:
        return [f"{each}: {diff}" for each, diff in found.items() if not diff <= MOST[name]]
    return list(found["wrong"])


def admissions(device: str) -> dict[str, Any]:
    """Batches of the shared generator, and [R, gamma] of those whose lengths differ."""
    count, wrong = 0, []
    for case in batches(device):
        count += 1
        if not torch.equal(admit_triton(*case), admit_torch(*case)):
            wrong.append(str(list(case.logits.shape)))
    return {"batches": count, "wrong": wrong}


def accepted(name: str, device: str) -> dict[str, Any]:
    """Requests of odd steps, those that rounding decides, and those that are wrong."""
    operator, rule = SAMPLED[name]
    arrivals = torch.zeros(16, dtype=torch.int32, device=device)
    how = Tiling() if device == "cuda" else Tiling(16, 256)  # interpreted, a program is slow
    requests, near, wrong = 0, 0, []
    for number, given in enumerate(steps(STEPS[device], 0)):
        expected = reference(given, rule)
        undecided_here = undecided(given, expected, rule)
        found = operator(on(given, device), arrivals, how)
        same = found.accepted.cpu() == expected.accepted
        same &= found.bonus.cpu() == expected.bonus
        wrong += [f"step {number}, request {r}" for r in (~same & ~undecided_here).nonzero()[:, 0]]
        requests, near = requests + len(same), near + int(undecided_here.sum())
    return {"requests": requests, "undecided": near, "wrong": wrong}


def greedily(device: str) -> dict[str, Any]:
    """Requests of odd steps, and outcomes that differ."""
    room = room_for(9, 9, torch.device(device))
    requests, wrong = 0, []
    for number, given in enumerate(greedy_shapes.steps(ODD[device], 0, device)):
        out = greedy_shapes.outputs(*given.window.shape, device)
        accept_greedy_triton(*given, out, room)
        wrong += [f"step {number}, {name}" for name in different(out, accept_greedy_torch(*given))]
        requests += len(out.accepted)
    return {"requests": requests, "wrong": wrong}


def packings(device: str) -> dict[str, Any]:
    """Rows of odd steps, and the steps that are packed otherwise."""
    rows, wrong = 0, []
    for number, given in enumerate(commit_shapes.windows(ODD[device], 0, device)):
        found, expected = pack_triton(*given), pack_torch(*given)
        rows += given.rows
        if not all(torch.equal(*pair) for pair in zip(found, expected, strict=True)):
            wrong.append(f"step {number}")
    return {"rows": rows, "wrong": wrong}


def writings(device: str) -> dict[str, Any]:
    """Rows that odd launches write, and those whose caches are others."""
    rows, wrong = 0, []
    for number, given in enumerate(commit_write_shapes.cases(ODD[device], 0, device)):
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


def drafted(device: str) -> dict[str, Any]:
    """Drafts of odd batches, those that rounding decides, and those that are wrong."""
    return markov_shapes.parity_rows(DRAFTED[device], device)


def moved(given: GroupedOperands, device: str) -> GroupedOperands:
    """The operands with all tensors on a device."""
    held = {k: v for k, v in vars(given).items() if isinstance(v, torch.Tensor)}
    tensors: dict[str, Any] = {name: each.to(device) for name, each in held.items()}
    return replace(given, **tensors)


PARTS: dict[str, Callable[[str], dict[str, Any]]] = {
    "admission": admissions,
    "accept": partial(accepted, "accept"),
    "accept_block": partial(accepted, "accept_block"),
    "greedy": greedily,
    "commit": packings,
    "commit_write": writings,
    "markov": drafted,
    "products": grouped,
    "layers": correctness,
}

if __name__ == "__main__":
    sys.exit(main())

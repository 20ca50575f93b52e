"""Compare kernels with their references: compiled on a device, else in Triton's interpreter.

`python -m tools.gpu.kit.parity [KERNEL...]` compares these kernels, or all. Admission, penalties
and greedy acceptance must be equal bitwise, drafts and sampled acceptance where rounding does not
decide. Keys and values that a commit writes may differ by a unit in the last place, attention of
verify windows by a tolerance of each type, estimated confidence by 1e-6. Grouped products and
expert layers are compared with float64 by `calc_diff`. Comparisons run in parallel processes
(`processes.py`), on a device the long ones in shares, because compiling dominates.
Ends with status 1, after all comparisons, if one is off or failed.
"""

from __future__ import annotations

import os
import sys
import traceback

import torch

if __name__ == "__main__" and not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported, and for spawned processes

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

from sglang_dspark.benchmarks import (
    commit_write_shapes,
    greedy_shapes,
    markov_shapes,
    window_shapes,
)
from sglang_dspark.benchmarks.accept_shapes import (
    bounds,
    on,
    rows_of,
    steps,
    with_any_cuts,
    with_lists,
)
from sglang_dspark.benchmarks.experts import correctness
from sglang_dspark.benchmarks.grouped_shapes import KINDS, grouped_operands, grouped_shapes
from sglang_dspark.benchmarks.shapes import batches
from sglang_dspark.drafter.draft_confidence import draft_confidence
from sglang_dspark.kernels.accept_block import accept_block_triton
from sglang_dspark.kernels.accept_greedy import (
    accept_greedy_torch,
    accept_greedy_triton,
    room_for,
)
from sglang_dspark.kernels.accept_listed import LISTS, accept_listed_triton
from sglang_dspark.kernels.accept_sampled import Outcome, Tiling, accept_triton
from sglang_dspark.kernels.accept_windows import Windows
from sglang_dspark.kernels.admission import admit_torch, admit_triton
from sglang_dspark.kernels.certainty import certainty_triton
from sglang_dspark.kernels.commit_write import why_not, write_torch, write_triton
from sglang_dspark.kernels.grouped_gemm import m_grouped_gemm_nt_contiguous
from sglang_dspark.kernels.grouped_layout import GroupedOperands
from sglang_dspark.kernels.grouped_reference import (
    calc_diff,
    m_grouped_gemm_nt_contiguous_reference,
)
from sglang_dspark.kernels.pass_rows import PassRows, rows_torch, rows_triton
from sglang_dspark.kernels.penalise import penalise_triton
from sglang_dspark.kernels.window_attention import attend_triton
from sglang_dspark.kernels.window_inputs import why_not as unsupported
from sglang_dspark.verify import accept_block, accept_sampled
from tests.kernels.accept_reference import reference, undecided
from tests.kernels.certainty_shapes import difference, drafts
from tests.kernels.greedy_reference import different
from tests.kernels.pass_row_shapes import passes
from tests.kernels.penalise_shapes import steps as penalised_steps
from tools.gpu.kit.device import device_name, say
from tools.gpu.kit.processes import run_together

# Steps of sampled acceptance, by either rule. Three of four need another variant of the kernel,
# which compiles for seconds; an interpreted step takes one second.
STEPS = {"cuda": 16, "cpu": 12}
DRAFTED = {"cuda": 16, "cpu": 24}  # batches of drafts, few for the same reason
ODD = {"cuda": 48, "cpu": 24}  # cases of all other operators
SAMPLED: dict[str, tuple[Any, Any]] = {
    "accept": (accept_triton, accept_sampled),
    "accept_block": (accept_block_triton, accept_block),
}
WHOLE_ROWS: dict[str, Any] = {"block": accept_block_triton, "token": accept_triton}
RULES: tuple[tuple[str, Any], ...] = (("block", accept_block), ("token", accept_sampled))
# An interpreted program is slow, so each has many requests.
TILING = {"cuda": Tiling(), "cpu": Tiling(16, 256)}
# Largest `calc_diff`; in layers both sides round activations to FP8, in another order.
MOST = {"products": 1e-3, "layers": 5e-3}
PROCESSES = {"cuda": 16, "cpu": 2}
SHARES = {
    "window_attention": 12,
    "accept": 4,
    "accept_block": 4,
    "accept_listed": 4,
    "markov": 4,
}  # on a device; other kernels have one share
MOST_S = 1800.0  # a stage that compares has its own limit

Job = Callable[[], dict[str, Any]]


def main() -> int:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    names = sys.argv[1:] or list(PARTS)
    if unknown := [name for name in names if name not in PARTS]:
        print(f"parity: no kernel {unknown[0]}; there are {', '.join(PARTS)}", file=sys.stderr)
        return 2
    say(device=device_name(), interpreted=device == "cpu")
    findings = Findings(names, device)
    for job, found in run_together(jobs(names, device), PROCESSES[device], MOST_S):
        findings.add(job, found)
    return 0 if findings.whole else 1


def jobs(names: Sequence[str], device: str) -> dict[str, Job]:
    """Return comparisons of these kernels by name, `accept 2/4` for a share."""
    made: dict[str, Job] = {}
    for name in names:
        shares = SHARES.get(name, 1) if device == "cuda" else 1
        for number in range(shares):
            job = f"{name} {number + 1}/{shares}"
            made[job] = partial(PARTS[name], device, (number, shares))
    return made


class Findings:
    """The shares of each comparison, which is printed when all of its shares have ended."""

    def __init__(self, names: Sequence[str], device: str):
        """Start without findings. names: of the kernels; device: `cuda` or `cpu`."""
        self.whole = True  # no comparison was off or failed so far
        self._left = {name: SHARES.get(name, 1) if device == "cuda" else 1 for name in names}
        self._found: dict[str, dict[str, Any]] = {name: {} for name in names}

    def add(self, job: str, found: dict[str, Any] | BaseException) -> None:
        """Add the result or the exception of a job of `jobs`."""
        name = job.split()[0]
        if isinstance(found, BaseException):
            reason = "".join(traceback.format_exception(found))
            print(f"parity: {job} failed\n{reason}", file=sys.stderr, flush=True)
            found = {"failed": [f"{job}: {found}"]}
        self._found[name] = merged(self._found[name], found)
        self._left[name] -= 1
        if self._left[name]:
            return
        say(**{name: self._found[name]})
        for each in wrong(name, self._found[name]):
            print(f"parity: {name}, {each} is off", file=sys.stderr, flush=True)
            self.whole = False
        self.whole &= "failed" not in self._found[name]


def merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Merge two shares' findings: counts and lists are added."""
    both = {**one, **other}
    return {
        key: one[key] + other[key] if key in one and key in other else both[key] for key in both
    }


def wrong(name: str, found: dict[str, Any]) -> list[str]:
    """List the mismatches in a part's findings."""
    if name in MOST:
        diffs = {each: diff for each, diff in found.items() if each != "failed"}
        return [f"{each}: {diff}" for each, diff in diffs.items() if not diff <= MOST[name]]
    return list(found.get("wrong", ()))


def shared(cases: Iterable[Any], share: tuple[int, int]) -> Iterable[tuple[int, Any]]:
    """Select every n-th case with its number. share: (index of the share from 0, n)."""
    first, every = share
    return islice(enumerate(cases), first, None, every)


def admissions(device: str, share: tuple[int, int]) -> dict[str, Any]:
    """Count batches of the shared generator; list [R, gamma] of those whose lengths differ."""
    count, wrong = 0, []
    for _, case in shared(batches(device), share):
        count += 1
        if not torch.equal(admit_triton(*case), admit_torch(*case)):
            wrong.append(str(list(case.logits.shape)))
    return {"batches": count, "wrong": wrong}


def accepted(name: str, device: str, share: tuple[int, int]) -> dict[str, Any]:
    """Count requests of irregular steps and those that rounding decides; list the wrong ones."""
    operator, rule = SAMPLED[name]
    arrivals = torch.zeros(16, dtype=torch.int32, device=device)
    requests, near, wrong = 0, 0, []
    for number, given in shared(steps(STEPS[device], 0), share):
        found = operator(on(given, device), arrivals, TILING[device])
        apart, undecided_here = off(given, found, rule)
        wrong += [f"step {number}, request {r}" for r in apart]
        requests, near = requests + len(given.drafts), near + undecided_here
    return {"requests": requests, "undecided": near, "wrong": wrong}


def on_lists(device: str, share: tuple[int, int]) -> dict[str, Any]:
    """Compare acceptance on lists as `accepted` does, by both rules in turn.

    Each request has a top-k, or any cuts and seeds: then lists are too short for some requests,
    which are accepted on whole rows."""
    requests, near, wrong = 0, 0, []
    for number, drawn in shared(steps(STEPS[device], 0), share):
        (rule, pure), how = RULES[number // 4 % 2], TILING[device]
        odd = number % 2 == 1
        given = with_any_cuts(drawn) if odd else with_lists(drawn, number)
        there, rows = on(given, device), rows_of(given)
        most, lists = (None, LISTS[:1]) if odd else (bounds(given)[0], LISTS)
        listed = accept_listed_triton(
            there, most=most, rows=rows, rule=rule, how=how, lists_of=lists
        )
        found = Outcome(listed.accepted, listed.bonus)
        if odd:
            WHOLE_ROWS[rule](replace(there, skipped=listed.complete), None, how, found)
        apart, undecided_here = off(given, found, pure)
        wrong += [f"step {number}, request {r}" for r in apart]
        requests, near = requests + len(given.drafts), near + undecided_here
    return {"requests": requests, "undecided": near, "wrong": wrong}


def off(given: Windows, found: Outcome, rule: Any) -> tuple[list[int], int]:
    """List the requests whose outcome is wrong, and count those that rounding decides."""
    expected = reference(given, rule)
    near = undecided(given, expected, rule)
    same = found.accepted.cpu() == expected.accepted
    same &= found.bonus.cpu() == expected.bonus
    return (~same & ~near).nonzero()[:, 0].tolist(), int(near.sum())


def greedily(device: str, share: tuple[int, int]) -> dict[str, Any]:
    """Count requests of irregular greedy steps; list the outcomes that differ."""
    room = room_for(9, 9, torch.device(device))
    requests, wrong = 0, []
    for number, given in shared(greedy_shapes.steps(ODD[device], 0, device), share):
        out = greedy_shapes.outputs(len(given.rows), given.width, device)
        accept_greedy_triton(*given[:4], out, room)
        wrong += [f"step {number}, {name}" for name in different(out, accept_greedy_torch(*given))]
        requests += len(out.accepted)
    return {"requests": requests, "wrong": wrong}


def indexed(device: str, share: tuple[int, int]) -> dict[str, Any]:
    """Count rows of irregular ragged passes; list the passes whose indices differ."""
    rows, wrong = 0, []
    for number, given in shared(passes(ODD[device]), share):
        tensors = [each.to(device) for each in given[:5]]
        found = rows_triton(*tensors, *given[5:])
        expected = rows_torch(*tensors, *given[5:])
        rows += given.tokens
        if not all(torch.equal(*pair) for pair in zip(flat(found), flat(expected), strict=True)):
            wrong.append(f"pass {number}")
    return {"rows": rows, "wrong": wrong}


def penalised(device: str, share: tuple[int, int]) -> dict[str, Any]:
    """Count logits of irregular penalised steps; list the steps whose logits differ."""
    logits, wrong = 0, []
    for number, given in shared(penalised_steps(ODD[device], 0, device), share):
        expected = given.expected()
        penalise_triton(*given)
        logits += expected.numel()
        if not torch.equal(given.logits.nan_to_num(7.0), expected.nan_to_num(7.0)):
            wrong.append(f"step {number}")
    return {"logits": logits, "wrong": wrong}


def estimated(device: str, share: tuple[int, int]) -> dict[str, Any]:
    """Count draft positions of irregular steps; list the steps whose probabilities differ."""
    positions, wrong = 0, []
    for number, (logits, temperatures) in shared(drafts(ODD[device], 0, device), share):
        how = TILING[device]
        found = certainty_triton(logits, temperatures, rows=how.requests, block=how.block)
        positions += found.numel()
        off = difference(found, draft_confidence(logits, temperatures))
        if not off <= 1e-6:
            wrong.append(f"step {number}: {off}")
    return {"positions": positions, "wrong": wrong}


def flat(rows: PassRows) -> list[torch.Tensor]:
    """List all tensors of an indexed pass."""
    return [*rows[:4], *rows.whole, *rows.capped]


def writings(device: str, share: tuple[int, int]) -> dict[str, Any]:
    """Count rows that irregular launches write; list the launches whose caches differ."""
    rows, wrong = 0, []
    for number, given in shared(commit_write_shapes.cases(ODD[device], 0, device), share):
        if why_not(given.layers, given.cos_sin.shape[1]) is not None:
            continue  # FP8 on a device without it
        expected = commit_write_shapes.copied(given)
        write_triton(*given)
        write_torch(*expected)
        rows += len(given.layers.keys) * int((given.slots > 0).sum())
        if not commit_write_shapes.difference(given, expected) <= commit_write_shapes.MOST:
            wrong.append(f"launch {number}")
    return {"rows": rows, "wrong": wrong}


def attended(device: str, share: tuple[int, int]) -> dict[str, Any]:
    """Count rows of irregular verify windows; list passes beyond their type's tolerance."""
    rows, wrong = 0, []
    for number, given in shared(window_shapes.cases(ODD[device], 0, device), share):
        if unsupported(given.windows, given.context) is not None:
            continue  # FP8 on a device without it
        found = given.output()
        attend_triton(*given, found)
        rows += len(found)
        off = window_shapes.difference(found, given.expected())
        if not off <= window_shapes.MOST[found.dtype]:
            wrong.append(f"pass {number}, {found.dtype}: {off}")
    return {"rows": rows, "wrong": wrong}


def grouped(device: str, share: tuple[int, int]) -> dict[str, float]:
    """Compute calc_diff to float64 of a product of every kind and irregular shape."""
    report = {}
    for _, shape in shared(grouped_shapes(), share):
        for kind in KINDS:
            given = moved(grouped_operands(shape, kind), device)
            found = m_grouped_gemm_nt_contiguous(given)
            expected = m_grouped_gemm_nt_contiguous_reference(given)
            report[f"{kind}, {shape.name}"] = calc_diff(found, expected)
    return report


def drafted(device: str, share: tuple[int, int]) -> dict[str, Any]:
    """Count drafts of irregular batches and those that rounding decides; list the wrong ones."""
    return markov_shapes.parity_rows(DRAFTED[device], device, share)


def layers(device: str, share: tuple[int, int]) -> dict[str, float]:
    """Compute calc_diff to float64 of a small layer of every kind."""
    return correctness(device, [kind for _, kind in shared(KINDS, share)])


def moved(given: GroupedOperands, device: str) -> GroupedOperands:
    """Copy the operands with all tensors on a device."""
    held = {k: v for k, v in vars(given).items() if isinstance(v, torch.Tensor)}
    tensors: dict[str, Any] = {name: each.to(device) for name, each in held.items()}
    return replace(given, **tensors)


PARTS: dict[str, Callable[[str, tuple[int, int]], dict[str, Any]]] = {
    "window_attention": attended,
    "pass_rows": indexed,
    "penalise": penalised,
    "certainty": estimated,
    "admission": admissions,
    "accept": partial(accepted, "accept"),
    "accept_block": partial(accepted, "accept_block"),
    "accept_listed": on_lists,
    "greedy": greedily,
    "commit_write": writings,
    "markov": drafted,
    "products": grouped,
    "layers": layers,
}

if __name__ == "__main__":
    sys.exit(main())

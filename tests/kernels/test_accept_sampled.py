"""Test the Triton accept rule: tokens of the pure rules of `verify/`, bounded memory.

Outcomes have the target's exact distribution; memory does not grow with the vocabulary.

Parity skips requests whose outcome changes in the reference itself when uniforms, top-p or
min-p move by 1e-5, or temperatures by 1e-6 of themselves: rounding may decide there.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from sglang_dspark.benchmarks.accept_shapes import step, steps
from sglang_dspark.kernels.accept_sampled import accept_triton
from sglang_dspark.kernels.accept_windows import Windows
from tests.kernels.accept_reference import reference, undecided
from tests.kernels.processes import EVERY, ROOT, output_of

ALARM = 1e-4
FEW, MANY = 8, 250  # steps of parity; each takes about a second


def asked(*arguments: str) -> dict:
    """The report of the interpreter's process; the arguments say which."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.interpreted_accept", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def test_interpreted_kernel_emits_the_tokens_of_the_pure_rules(count: int) -> None:
    report = asked("parity", str(count))
    assert report["wrong"] == []
    assert report["requests"] >= 2000
    assert report["undecided"] < report["requests"] / 100
    assert min(report["kept"], report["rejected"]) > 500
    assert report["arrivals"] == 0  # the counters are ready for the next launch


def test_exact_boundaries_and_bytes() -> None:
    report = asked("known")
    assert report["wrong"] == []
    narrow, wide = report["bytes"]
    assert narrow == wide == 4 * (8 * 8 * 8 + 2 * 8 + 4)  # 8 float64 a row; 2 int64 and a counter


@pytest.mark.slow
def test_emitted_tokens_follow_the_target() -> None:
    found = asked("distribution")
    assert set(found) == {"uncut", "cut"}
    assert min(min(each.values()) for each in found.values()) > ALARM, found


@EVERY
def test_kernel_compiles_without_a_device(every: tuple[str, ...]) -> None:
    report = json.loads(output_of("tests.kernels.compiled_accept", *every))
    assert {name.split(":")[0] for name in report} == ({"80", "90", "100"} if every else {"90"})
    assert all(each["code"] > 0 for each in report.values())
    assert all(each["atomics"] == 1 for each in report.values())  # a program arrives once
    assert max(each["shared"] for each in report.values()) <= 48 * 1024


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_compiled_kernel_emits_the_tokens_of_the_pure_rules() -> None:
    for given, there in zip(steps(MANY, 0), steps(MANY, 0, "cuda"), strict=True):
        expected, found = reference(given), accept_triton(there)
        near = undecided(given, expected)
        assert bool(((found.accepted.cpu() == expected.accepted) | near).all())
        assert bool(((found.bonus.cpu() == expected.bonus) | near).all())


def test_benchmark_says_what_it_needs() -> None:
    printed = output_of("sglang_dspark.benchmarks.accept")
    if torch.cuda.is_available():
        assert json.loads(printed.splitlines()[0])["op"] == "accept"
    else:
        assert "no CUDA device" in printed


def test_mistakes_are_named() -> None:
    given = step(torch.Generator().manual_seed(0), 3, 2, 5, turn=15)

    def refused(message: str, **changes: torch.Tensor | None) -> None:
        with pytest.raises(ValueError, match=message):
            accept_triton(replace(given, **changes))

    refused("drafts must be", drafts=given.drafts[0])
    refused(r"logits must be \[9, 5\]", logits=given.logits[1:])
    refused("logits must be .* float32 or bfloat16", logits=given.logits.double())
    refused("accept_uniforms must be .* float64", accept_uniforms=given.accept_uniforms.float())
    refused("top_p must be", top_p=torch.ones(2))
    refused("drafts must be contiguous", drafts=torch.zeros(2, 3, dtype=torch.int64).T)
    refused("come together", draft_temperatures=None)
    refused("come together", seeded=torch.ones(3, dtype=torch.bool))
    with pytest.raises(ValueError, match="arrivals"):
        accept_triton(given, torch.zeros(2, dtype=torch.int32))


def test_an_empty_batch_emits_nothing() -> None:
    nothing = torch.zeros(0, dtype=torch.float64)
    given = Windows(
        drafts=torch.zeros(0, 3, dtype=torch.int64),
        lengths=torch.zeros(0, dtype=torch.int32),
        logits=torch.zeros(0, 5),
        temperatures=torch.zeros(0),
        accept_uniforms=nothing.view(0, 3),
        bonus_uniforms=nothing,
    )
    assert [len(each) for each in accept_triton(given)] == [0, 0]

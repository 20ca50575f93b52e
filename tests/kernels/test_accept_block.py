"""Test the Triton block rule: tokens of the pure rules of `verify/`, bounded memory.

Whole strings have plain decoding's distribution; memory does not grow with the vocabulary. Parity
skips the requests that `test_accept_sampled.py` skips.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from sglang_dspark.benchmarks.accept_shapes import step, steps
from sglang_dspark.kernels.accept_block import accept_block_triton
from sglang_dspark.kernels.accept_windows import Windows
from sglang_dspark.verify.block import accept_block
from tests.kernels.accept_reference import reference, undecided
from tests.kernels.processes import EVERY, output_of

ALARM = 1e-4
FEW, MANY = 8, 200  # odd steps of parity, besides eight large ones


def asked(*arguments: str) -> dict:
    """The report of the interpreter's process; the arguments say which."""
    return json.loads(output_of("tests.kernels.interpreted_block", *arguments))


@pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def test_interpreted_kernels_emit_the_tokens_of_the_pure_rules(count: int) -> None:
    report = asked("parity", str(count))
    assert report["wrong"] == []
    assert report["requests"] >= 2000
    assert report["whole"] >= 1000  # judged by block
    assert report["apart"] >= 100  # where the rule token by token would have told otherwise
    assert report["undecided"] < report["requests"] / 100
    assert min(report["kept"], report["rejected"]) > 500
    assert report["arrivals"] == 0  # the counters are ready for the next launch


def test_outcomes_known_by_hand_and_bytes() -> None:
    report = asked("known")
    assert report["wrong"] == []
    narrow, wide = report["bytes"]
    # 8 float64 a row, 3 a draft; 2 int64 and a counter.
    assert narrow == wide == 4 * (8 * 8 * 8 + 7 * 3 * 8 + 2 * 8 + 4)


@pytest.mark.slow
def test_strings_follow_plain_decodings_distribution() -> None:
    found = asked("distribution")
    assert set(found) == {"uncut", "cut"}
    assert min(found.values()) > ALARM, found


@EVERY
def test_kernels_compile_without_a_device(every: tuple[str, ...]) -> None:
    report = json.loads(output_of("tests.kernels.compiled_block", *every))
    assert {name.split(":")[0] for name in report} == ({"80", "90", "100"} if every else {"90"})
    assert all(each["code"] > 0 for each in report.values())
    assert all(
        each["atomics"] == ("keep" in name)  # a program of the second launch arrives once
        for name, each in report.items()
    )
    assert max(each["shared"] for each in report.values()) <= 48 * 1024


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_compiled_kernels_emit_the_tokens_of_the_pure_rules() -> None:
    for given, there in zip(steps(MANY, 0), steps(MANY, 0, "cuda"), strict=True):
        expected, found = reference(given, accept_block), accept_block_triton(there)
        near = undecided(given, expected, accept_block)
        assert bool(((found.accepted.cpu() == expected.accepted) | near).all())
        assert bool(((found.bonus.cpu() == expected.bonus) | near).all())


@pytest.mark.parametrize("turn", [15, 4])  # drafts of logits, of an argmax
def test_mistakes_are_named(turn: int) -> None:
    given = step(torch.Generator().manual_seed(0), 3, 2, 5, turn)
    with pytest.raises(ValueError, match=r"logits must be \[9, 5\]"):
        accept_block_triton(replace(given, logits=given.logits[1:]))
    with pytest.raises(ValueError, match="arrivals"):
        accept_block_triton(given, torch.zeros(2, dtype=torch.int32))


def test_an_empty_batch_emits_nothing() -> None:
    nothing = torch.zeros(0, dtype=torch.float64)
    given = Windows(
        drafts=torch.zeros(0, 3, dtype=torch.int64),
        lengths=torch.zeros(0, dtype=torch.int32),
        logits=torch.zeros(0, 5),
        temperatures=torch.zeros(0),
        accept_uniforms=nothing.view(0, 3),
        bonus_uniforms=nothing,
        draft_logits=torch.zeros(0, 3, 5),
        draft_temperatures=torch.zeros(0),
    )
    assert [len(each) for each in accept_block_triton(given)] == [0, 0]

"""The accept rules on lists: tokens of the pure rules of `verify/`, plain decoding's distribution
of whole strings, memory of lists alone.

Parity skips what `test_accept_sampled.py` skips.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from sglang_dspark.benchmarks.accept_shapes import bounds, step, steps, with_lists
from sglang_dspark.kernels.accept_listed import LISTS, accept_listed_triton, capacity_of
from sglang_dspark.verify.block import accept_block
from tests.kernels.accept_reference import reference, undecided
from tests.kernels.processes import EVERY, output_of

ALARM = 1e-4
FEW, MANY = 8, 250  # odd steps of parity, besides six large ones


def asked(*arguments: str) -> dict[str, Any]:
    """The report of the interpreter's process; the arguments say which."""
    report: dict[str, Any] = json.loads(output_of("tests.kernels.interpreted_listed", *arguments))
    return report


@pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def test_interpreted_kernels_emit_the_tokens_of_the_pure_rules(count: int) -> None:
    report = asked("parity", str(count))
    assert report["wrong"] == []
    assert report["requests"] >= 1600
    assert report["apart"] >= 50  # where the other rule would have told otherwise
    assert report["undecided"] < report["requests"] / 100
    assert min(report["kept"], report["rejected"], report["tied"]) > 500


@pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def test_incomplete_lists_are_judged_on_whole_rows(count: int) -> None:
    """Any cut or none, seeds, greedy requests: every request has one outcome, and the right one."""
    report = asked("incomplete", str(count))
    assert report["wrong"] == []
    assert report["undecided"] < report["requests"] / 50
    assert min(report["incomplete"], report["complete"], report["seeded"]) > count / 2


def test_equal_tokens_and_bytes() -> None:
    report = asked("known")
    assert report["wrong"] == []
    for vocab, found in report["bytes"].items():
        # Of 32 rows 8 bytes a token of capacity and 64; lengths, ends, outcomes.
        assert found == 32 * (8 * min(capacity_of(LISTS[0]), int(vocab)) + 64) + 144


@pytest.mark.slow
def test_strings_follow_plain_decodings_distribution() -> None:
    report = asked("strings")
    assert min(report["cut"], report["loose"]) > ALARM


@EVERY
def test_kernels_compile_without_a_device(every: tuple[str, ...]) -> None:
    report = json.loads(output_of("tests.kernels.compiled_listed", *every))
    assert {name.split(":")[0] for name in report} == ({"80", "90", "100"} if every else {"90"})
    assert all(each["code"] > 0 for each in report.values())
    assert max(each["shared"] for each in report.values()) <= 48 * 1024


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_compiled_kernels_emit_the_tokens_of_the_pure_rules() -> None:
    for i, (here, there) in enumerate(zip(steps(MANY, 0), steps(MANY, 0, "cuda"), strict=True)):
        given = with_lists(here, i)
        assert given.top_k is not None
        expected = reference(given, accept_block)
        moved = replace(there, top_k=given.top_k.cuda(), seeded=None, seeds=None, anchors=None)
        most, rows = bounds(given)
        found = accept_listed_triton(moved, most=most, rows=rows, rule="block")
        near = undecided(given, expected, accept_block)
        assert bool(((found.accepted.cpu() == expected.accepted) | near).all())
        assert bool(((found.bonus.cpu() == expected.bonus) | near).all())


@pytest.mark.parametrize(
    ("changed", "options", "message"),
    [
        ({"skipped": torch.ones(3).bool()}, {}, "leave skipped out"),
        ({}, {"rule": "chain"}, "found 'chain'"),
        ({"logits": torch.zeros(8, 5)}, {}, r"logits must be \[9, 5\]"),
    ],
)
def test_mistakes_are_named(changed: dict[str, Any], options: dict[str, Any], message: str) -> None:
    given = with_lists(step(torch.Generator().manual_seed(0), 3, 2, 5, turn=0), 1)
    usual = {"most": 5, "rows": 9, "rule": "block"}
    with pytest.raises(ValueError, match=message):
        accept_listed_triton(replace(given, **changed), **(usual | options))


def test_no_requests_are_no_launch() -> None:
    given = with_lists(step(torch.Generator().manual_seed(0), 1, 2, 5, turn=0), 1)
    none = {name: part[:0] for name, part in vars(given).items() if part is not None}
    found = accept_listed_triton(replace(given, **none), most=5, rows=0, rule="block")
    assert found.accepted.shape == found.bonus.shape == (0,)

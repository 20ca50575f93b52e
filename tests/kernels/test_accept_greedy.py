"""Greedy acceptance by Triton: the outcomes of its reference and of SGLang's rule, on odd steps."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from sglang_dspark.benchmarks.greedy_shapes import outputs, step, steps
from sglang_dspark.kernels.accept_greedy import (
    accept_greedy_torch,
    accept_greedy_triton,
    parts_of,
    room_for,
    why_not,
)
from tests.kernels.processes import output_of

# One process: the module computes its results once, slowly.
pytestmark = pytest.mark.xdist_group("accept-greedy")

pytest.importorskip("sglang")

FEW, MANY = 100, 400  # steps, of 5 requests on average


@pytest.fixture(scope="module", params=[FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def report(request: pytest.FixtureRequest) -> dict[str, Any]:
    printed = output_of("tests.kernels.interpreted_greedy", str(request.param))
    found: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return {**found, "steps": request.param}


def test_interpreted_kernel_equals_torch_and_upstream(report: dict[str, Any]) -> None:
    parity = report["parity"]
    assert parity["wrong"] == []
    assert parity["requests"] >= 4.8 * report["steps"]
    assert min(parity["kept"], parity["cut"]) > 150
    assert parity["parts"] == [1, 2, 4], "rows are searched whole and in parts"
    assert parity["arrivals"] == 0  # the counters are ready for the next launch


def test_outcomes_known_by_hand(report: dict[str, Any]) -> None:
    known = report["known"]
    assert known["accepted"] == [2, 1, 0]
    assert known["bonus"] == [0, 0, 0]  # nothing to choose from: the first; inf twice: the lower
    assert known["emitted"] == [3, 2, 1]
    assert known["new_lens"] == [7, 52, 8]
    assert known["dropped"] == [0, 0, 0]
    assert known["tokens"] == [[1, 2, 0], [0, 0, 0], [0, 0, 0]]
    assert known["bytes"] == 0, "a launch in a graph allocates nothing"


def test_kernel_compiles_without_a_device() -> None:
    found = json.loads(output_of("tests.kernels.compiled_greedy"))
    assert {name.split(":")[0] for name in found} == {"80", "90", "100"}
    assert all(each["code"] > 0 for each in found.values())
    assert all(each["atomics"] == 1 for each in found.values())  # a program arrives once
    assert max(each["shared"] for each in found.values()) <= 48 * 1024


def test_rows_are_cut_where_programs_are_few() -> None:
    assert parts_of(8, 151_936) == 32  # each part has 4,096 tokens or more
    assert parts_of(8 * 256, 151_936) == 1
    assert parts_of(8, 4096) == 1


def test_unsupported_arguments_are_named() -> None:
    given = step(torch.Generator().manual_seed(0), 3, 4, 17, turn=0)
    out, room = outputs(3, 5), room_for(3, 5, torch.device("cpu"))
    assert why_not(*given[:3], out, room) is None
    assert "logits must be" in str(why_not(*given[:2], given.logits.double(), out, room))
    assert "as many rows of logits" in str(why_not(*given[:2], given.logits[:-1], out, room))
    assert "int64" in str(why_not(given.ids.int(), *given[1:3], out, room))
    assert "rows [3]" in str(why_not(given.ids, given.rows[:2], given.logits, out, room))
    small = room_for(2, 5, torch.device("cpu"))
    assert "room for (2, 5)" in str(why_not(*given[:3], out, small))
    narrow = out._replace(accepted=out.accepted.int())
    assert "outputs must be" in str(why_not(*given[:3], narrow, room))
    with pytest.raises(ValueError, match="accept_greedy: room"):
        accept_greedy_triton(*given[:4], out, small)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_compiled_kernel_equals_torch() -> None:
    room = room_for(16, 12, torch.device("cuda"))
    for given in steps(FEW, device="cuda"):
        out = outputs(len(given.rows), given.width, "cuda")
        accept_greedy_triton(*given[:4], out, room)
        for found, expected in zip(out[:5], accept_greedy_torch(*given)[:5], strict=True):
            assert torch.equal(found, expected)


def test_benchmark_says_what_it_needs() -> None:
    printed = output_of("sglang_dspark.benchmarks.greedy")
    if torch.cuda.is_available():
        assert json.loads(printed.splitlines()[0])["op"] == "accept_greedy"
    else:
        assert "no CUDA device" in printed

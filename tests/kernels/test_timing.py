"""Timing of operators: on a faked device every candidate yields a row, with a time or a reason."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from sglang_dspark.benchmarks import accept, commit, greedy
from sglang_dspark.benchmarks.bandwidth import copy_triton
from tests.kernels.processes import output_of

OURS_OF = {
    "accept": {
        "ours, token rule",
        "ours, block rule",
        "ours on lists, token rule",
        "ours on lists, block rule",
    },
    "commit": {"ours"},
    "markov": {"ours"},
    "accept_greedy": {"ours"},
    "admission": {"ours"},
    "pass_rows": {"ours"},
    "penalise": {"ours"},
    "certainty": {"ours"},
    "window_attention": {"ours"},
}


@pytest.fixture(scope="module")
def faked() -> dict[str, Any]:
    """Rows of the benchmarks on a faked H200 that takes a millisecond for everything."""
    pytest.importorskip("sglang")
    found: dict[str, Any] = json.loads(output_of("tests.kernels.faked_timing").splitlines()[-1])
    return found


def test_every_implementation_has_a_row(faked: dict[str, Any]) -> None:
    ours: dict[str, set[str]] = {}
    for row in faked["rows"]:
        if row["op"] == "broken":
            continue
        assert row["us"] == 1000, row
        if row["implementation"].startswith("ours"):
            ours.setdefault(row["op"], set()).add(row["implementation"])
    assert ours == OURS_OF
    cases = {(row["op"], row["case"]) for row in faked["rows"]}
    assert {cut.name for cut in accept.CUTS} == {case for op, case in cases if op == "accept"}


def test_eager_times_and_memory_are_those_asked_for(faked: dict[str, Any]) -> None:
    eager = {row["op"] for row in faked["rows"] if "eager_us" in row}
    assert eager == {"accept", "admission", "certainty", "commit", "pass_rows", "penalise"}
    assert {row["op"] for row in faked["rows"] if "bytes" in row} == {"accept"}


def test_peers_of_a_cut(faked: dict[str, Any]) -> None:
    """SGLang's blockwise rule knows no cuts; a selection of k tokens is the floor of lists."""
    peers = {
        cut: {
            r["implementation"] for r in faked["rows"] if r["op"] == "accept" and r["case"] == cut
        }
        - OURS_OF["accept"]
        for cut in ("none", "top-k 50", "top-p 0.9")
    }
    assert peers == {
        "none": {"SGLang AcceptSampling", "SGLang BlockwiseRejection"},
        "top-k 50": {"SGLang AcceptSampling", "torch.topk"},
        "top-p 0.9": {"SGLang AcceptSampling", "torch.topk"},
    }


def test_a_peer_without_a_time_says_why(faked: dict[str, Any]) -> None:
    """One that waits for the device is not captured at all: the attempt could spoil the process."""
    reasons = {r["implementation"]: r for r in faked["rows"] if r["op"] == "broken"}
    missing, waits = reasons["SGLang missing"], reasons["torch waits"]
    assert missing["us"] is None
    assert missing["reason"] == "ModuleNotFoundError: No module named 'flashinfer'"
    assert waits["us"] is None
    assert "synchronizing" in waits["reason"]
    assert faked["forbidden"] == "default", "synchronisation stays forbidden"


def test_kernels_compiled_on_narrow_layers_are_those_that_are_timed(faked: dict[str, Any]) -> None:
    found = faked["experts"]
    assert found["cases"] == 2
    assert found["ahead"] >= 3
    assert found["more"] == 0
    assert {row["op"] for row in found["rows"]} == {"experts layer", "gate-up product"}
    assert {row["ours_us"] for row in found["rows"]} == {1000}


def test_shares_compile_every_candidate_once(faked: dict[str, Any]) -> None:
    assert sum(faked["shares"]) == 2 * 2  # two implementations of 1 and of 16 requests
    assert max(faked["shares"]) <= 2


def test_a_fault_of_ours_fails_the_stage_and_a_late_end_goes_on(faked: dict[str, Any]) -> None:
    assert faked["statuses"] == {"a peer is missing": 0, "ours fails": 1, "no time": 75}


def test_bandwidth_counts_what_is_read_and_written(faked: dict[str, Any]) -> None:
    assert faked["bandwidth"] == 2 * 2**20 / 1e-3


def test_the_copy_copies_all_and_no_more() -> None:
    assert json.loads(output_of("tests.kernels.interpreted_copy")) == []
    with pytest.raises(ValueError, match="not as many"):
        copy_triton(torch.zeros(3, dtype=torch.int32), torch.zeros(2, dtype=torch.int32))
    with pytest.raises(ValueError, match="contiguous int32"):
        copy_triton(torch.zeros(3), torch.zeros(3))


def test_the_blockwise_peer_judges_the_step_that_ours_does() -> None:
    """It falls back to torch on a CPU. SGLang's other rule has no build without a GPU."""
    pytest.importorskip("sglang")
    plain = accept.windows(3, 4, 40, "cpu")
    assert plain.logits.shape == (15, 40)
    bonus = accept.blockwise_rejection(accept.cut_by(plain, accept.Cut("none")))()
    assert isinstance(bonus, torch.Tensor)
    assert bonus.shape == (3,)
    assert 0 <= int(bonus.min()) <= int(bonus.max()) < 40
    with pytest.raises(ValueError, match="supports no cuts"):
        accept.blockwise_rejection(accept.cut_by(plain, accept.Cut("k", top_k=2)))


def test_a_cut_is_one_of_every_request_and_leaves_the_logits_where_they_are() -> None:
    plain = accept.windows(3, 4, 40, "cpu")
    cut = accept.cut_by(plain, accept.Cut("both", 0.6, 20, 0.95))
    assert cut.top_k is not None
    assert cut.top_p is not None
    assert cut.top_k.tolist() == [20] * 3
    assert cut.top_p.tolist() == pytest.approx([0.95] * 3)
    assert cut.temperatures.tolist() == pytest.approx([0.6] * 3)
    assert cut.logits.data_ptr() == plain.logits.data_ptr()
    assert plain.top_k is None


def test_drafts_are_drawn_near_the_target() -> None:
    given = accept.windows(64, 7, 4096, "cpu")
    assert given.draft_logits is not None
    p = given.logits.view(64, 8, -1)[:, :7].softmax(-1)
    q = given.draft_logits.softmax(-1)
    assert 0.3 < float(torch.minimum(p, q).sum(-1).mean()) < 0.9
    step = greedy.step(64, 8, 512, "cpu")
    agreed = step.ids[1:] == step.logits.argmax(-1)[:-1]
    assert 0.6 < float(agreed.float().mean()) < 0.9
    verified = (len(step.ids) - 64) / (64 * 7)
    assert abs(verified - greedy.SHARE) < 0.05


def test_steps_of_the_commit_verify_the_share_that_is_said() -> None:
    made = commit.stage(16, 7, (96, 48, 2, 4, 16), "cpu")
    assert len(made.hidden) == 16 + round(commit.SHARE * 16 * 7)

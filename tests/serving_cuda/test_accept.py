"""The accept rule of a GPU's steps: the operator where Triton runs, else torch, the same tokens."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("sglang")

from sglang_dspark.serving.cuda.accept import StepAccept
from sglang_dspark.serving.step.accept import accept
from tests.kernels.processes import output_of
from tests.serving.test_step_accept import GAMMA, batch, spread


def test_the_operator_emits_the_tokens_of_torch() -> None:
    report = json.loads(output_of("tests.serving_cuda.interpreted_accept").splitlines()[-1])
    by_block, by_token = report["rules"]["block"], report["rules"]["token"]
    for found in (by_block, by_token):
        assert len(found["different"]) == 4
        assert not any(found["different"].values()), found["different"]
        assert found["torch"] == 0
    # Each rule has its own operator.
    assert by_block["ran"] == {"accept_block_triton": 4, "accept_triton": 0}
    assert by_token["ran"] == {"accept_block_triton": 0, "accept_triton": 4}
    # What the operators refuse is done in torch, and said once.
    refused = report["refused"]
    assert refused["torch"] == 2
    assert len(refused["told"]) == 1
    assert "accepted in torch: accept: logits must be" in refused["told"][0]


def test_without_triton_torch_accepts() -> None:
    """A CPU has no Triton unless interpreted: a step there is one of `step.accept`."""
    window, lens, rows, block, info = batch(30, torch.Generator().manual_seed(3))
    step = (window, lens, spread(rows, lens, GAMMA + 1), block, info, torch.arange(30), None)
    torch.manual_seed(1)
    found = StepAccept()(*step)
    torch.manual_seed(1)
    expected = accept(*step)
    assert torch.equal(found.accepted, expected.accepted)
    assert torch.equal(found.bonus, expected.bonus)


@pytest.mark.parametrize("requests", [1, 256, 257, 1000])
def test_counters_are_enough_for_every_request(requests: int) -> None:
    """The operators write one for each: one too few is written past the end."""
    accept_step = StepAccept()
    counters = accept_step._counters(requests, torch.device("cpu"))
    assert len(counters) >= max(256, requests)
    assert counters.dtype == torch.int32
    assert not counters.any()
    for fewer in (requests - 1, len(counters)):
        assert accept_step._counters(fewer, torch.device("cpu")) is counters


def test_a_graph_accepts_as_upstreams_does() -> None:
    report = json.loads(output_of("tests.serving_cuda.interpreted_graph_accept").splitlines()[-1])
    assert report["different"] == []
    assert report["ran"] == 40
    assert report["kept"] > 100
    # Where upstream does something in between its rule stays, and that is said once.
    assert report["by_upstream"]
    reasons = ("simulated", "tensor-parallel ranks agree", "SGLANG_OPT_DSV41")
    for told, reason in zip(report["told"], reasons, strict=True):
        assert len(told) == 1
        assert reason in told[0]

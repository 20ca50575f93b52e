"""The accept rule of a GPU's steps: the operator where Triton runs, else torch, the same tokens."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

pytest.importorskip("sglang")

from sglang_dspark.backends.cuda.accept import StepAccept, seeded, windows
from sglang_dspark.step.accept import accept
from sglang_dspark.step.rules import Cuts
from sglang_dspark.step.seeds import Seeds
from tests.kernels.processes import output_of
from tests.step.test_step_accept import GAMMA, batch, spread


def test_the_operator_emits_the_tokens_of_torch() -> None:
    report = json.loads(output_of("tests.backends.cuda.interpreted_accept").splitlines()[-1])
    by_block, by_token = report["rules"]["block"], report["rules"]["token"]
    for found in (by_block, by_token):
        assert len(found["different"]) == 5
        assert not any(found["different"].values()), found["different"]
        assert found["torch"] == 0
    # Each rule has its own operator; lists come first where requests have cuts, and suffice where
    # all have a top-k and none a seed.
    assert by_block["ran"] == {
        "accept_listed_triton": 4, "accept_block_triton": 4, "accept_triton": 0
    }  # fmt: skip
    assert by_token["ran"] == {
        "accept_listed_triton": 4, "accept_block_triton": 0, "accept_triton": 4
    }  # fmt: skip
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
    found = StepAccept()(*step, cuts=Cuts(top_k=True), rows=int(lens.sum()))
    torch.manual_seed(1)
    expected = accept(*step)
    assert torch.equal(found.accepted, expected.accepted)
    assert torch.equal(found.bonus, expected.bonus)


@pytest.mark.parametrize("cut", [True, False])
@pytest.mark.parametrize("greedy_draft", [False, True])
def test_the_operators_are_given_every_setting_of_a_step(cut: bool, greedy_draft: bool) -> None:
    """Cuts of all kinds where a sampled request has one, drafts' logits unless argmax."""
    requests, generator = 6, torch.Generator().manual_seed(3)
    ids, lens, rows, block, info = batch(requests, generator)
    info.is_any_greedy, block.greedy_draft = not cut, greedy_draft
    logits, anchors = spread(rows, lens, GAMMA + 1), torch.arange(10, 16).int()
    seeds = Seeds(torch.tensor([1, 4]), torch.tensor([7, -9]))
    found = windows(ids, lens, logits, block, info, cut=cut)
    found = replace(
        found, **seeded(StepAccept()._zeros(requests, anchors.device), requests, anchors, seeds)
    )
    assert torch.equal(found.drafts, ids[:, 1:])
    assert found.drafts.data_ptr() % 16 == 0
    assert found.logits is logits
    assert found.lengths.tolist() == (lens - 1).tolist()
    assert torch.equal(found.temperatures, info.temperatures.view(-1))
    for given, value in (
        (found.top_k, info.top_ks), (found.top_p, info.top_ps), (found.min_p, info.min_ps),
    ):  # fmt: skip
        assert (given is None) == (not cut)
        assert given is None or torch.equal(given, value)
    assert found.draft_logits is (None if greedy_draft else block.corrected_logits)
    assert (found.draft_temperatures is None) == greedy_draft
    assert greedy_draft or torch.equal(found.draft_temperatures, block.temperatures)
    assert found.greedy.tolist() == (block.greedy_mask & (not cut)).tolist()
    assert found.seeded.tolist() == [False, True, False, False, True, False]
    assert found.seeds[[1, 4]].tolist() == [7, -9]
    assert (found.anchors.tolist(), found.anchors.dtype) == (anchors.tolist(), torch.int64)
    assert found.accept_uniforms.shape == (requests, GAMMA)
    assert found.bonus_uniforms.shape == (requests,)


@pytest.mark.parametrize("requests", [1, 256, 257, 1000])
def test_buffers_are_enough_for_every_request(requests: int) -> None:
    """The operators write one for each: one too few is written past the end."""
    accept_step = StepAccept()
    buffers = accept_step._zeros(requests, torch.device("cpu"))
    assert {len(each) for each in buffers} == {max(256, 2 * requests)}
    assert [each.dtype for each in buffers] == [torch.int32, torch.bool, torch.int64]
    assert not any(bool(each.any()) for each in buffers)
    for fewer in (requests - 1, len(buffers.arrivals)):
        assert accept_step._zeros(fewer, torch.device("cpu")) is buffers


def test_a_step_without_seeds_marks_no_request() -> None:
    """After a step with seeds, whose flags are not left in the buffers."""
    buffers = StepAccept()._zeros(3, torch.device("cpu"))
    anchors = torch.arange(3)
    first = seeded(buffers, 3, anchors, Seeds(torch.tensor([2]), torch.tensor([8])))
    assert first["seeded"].tolist() == [False, False, True]
    then = seeded(buffers, 3, anchors, None)
    assert not then["seeded"].any()
    assert not then["seeds"].any()

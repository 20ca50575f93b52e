"""CUDA's side of the step under the overlap loop: what it plans, verifies and learns."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from tests.integration.serving import Served
from tests.rehearsal.conftest import Rehearsed
from tests.rehearsal.on_cpu import GAMMA, pass_seconds

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("rehearsal")]

TOKENS = 48
PROMPTS = [[5 + (7 * i + 3 * j) % 200 for j in range(3 + 5 * i)] for i in range(8)]
GREEDY = {"max_new_tokens": TOKENS, "sampling_params": {"ignore_eos": True}}


@pytest.mark.parametrize("users", [1, 4, 8])
def test_greedy_answers_are_the_plain_servers(
    plain: Served, rehearsed: Rehearsed, users: int
) -> None:
    expected = plain.generate_all(PROMPTS, users, **GREEDY)
    got = rehearsed.server.generate_all(PROMPTS, users, **GREEDY)
    assert [each["output_ids"] for each in got] == [each["output_ids"] for each in expected]
    metas = [each["meta_info"] for each in got]
    accepted = sum(TOKENS - 1 - meta["spec_verify_ct"] for meta in metas)
    assert accepted > TOKENS, "too few drafts were accepted: nothing was tested"


def test_plans_know_the_step_before_the_last(rehearsed: Rehearsed) -> None:
    """Nothing of the step that computes; the first after a prefill finds all others handed out."""
    before = len(rehearsed.steps())
    rehearsed.server.generate(PROMPTS[0], **GREEDY)
    steps = [step for step in rehearsed.steps()[before:] if not step["repeated"]]
    lags = Counter(step["step"] - step["last_landed"] for step in steps)
    assert set(lags) <= {1, 2}, lags
    assert lags[1] <= 1
    assert lags[2] >= 8


def test_the_profile_finds_the_planted_staircase(rehearsed: Rehearsed) -> None:
    table = rehearsed.table()
    for tokens, seconds in zip(table["knots"], table["seconds"], strict=True):
        assert seconds == pytest.approx(pass_seconds(tokens), rel=0.02)


def test_a_pause_leaves_the_drafts_cache_as_if_there_were_none(
    rehearsed: Rehearsed, slow_drafts: Rehearsed
) -> None:
    """Target features go into it in every step, those without drafts too."""
    steps = len(slow_drafts.steps())
    for server in (slow_drafts, rehearsed):
        server.server.generate(PROMPTS[3], **GREEDY)
    skipped = [step for step in slow_drafts.steps()[steps:] if not step["speculates"]]
    assert len(skipped) > TOKENS // 2
    paused, never = slow_drafts.context(), rehearsed.context()
    for name, found in paused.items():
        common = min(found.shape[1], never[name].shape[1])
        assert common >= len(PROMPTS[3]) + TOKENS - 2 * GAMMA
        torch.testing.assert_close(found[:, :common], never[name][:, :common], atol=1e-5, rtol=1e-4)


def test_a_draft_that_does_not_pay_is_skipped(plain: Served, slow_drafts: Rehearsed) -> None:
    expected = plain.generate_all(PROMPTS, 2, **GREEDY)
    got = slow_drafts.server.generate_all(PROMPTS, 2, **GREEDY)
    assert [each["output_ids"] for each in got] == [each["output_ids"] for each in expected]
    late = slow_drafts.steps()[-60:]
    assert sum(not step["speculates"] for step in late) > 45

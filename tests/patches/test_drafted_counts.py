"""Drafts in an answer's meta_info: those that were verified, however many a step had."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers import tokenizer_manager

from sglang_dspark.patches.step import drafted_counts
from tests.patches.hooked import put_in


@pytest.mark.parametrize(
    ("lengths", "proposed"),
    [
        ([], 40),  # 10 whole windows of gamma 4
        ([0, 0, 0, 0, 0, 10], 40),
        ([0, 4, 3, 0, 0, 3], 15),
        ([0, 4, 3], 15),  # three steps without a ragged layout
        ([0, 9, 1], 1),
        ([0, 10], None),
    ],
)
def test_only_verified_drafts_are_proposed(
    monkeypatch: pytest.MonkeyPatch, lengths: list[int], proposed: int | None
) -> None:
    spec = SimpleNamespace(speculative_num_draft_tokens=5)
    monkeypatch.setattr(tokenizer_manager, "get_spec", lambda: spec)
    put_in(monkeypatch, drafted_counts.SEAMS)
    manager: Any = object.__new__(tokenizer_manager.TokenizerManager)
    accepted = 1 if proposed else 0
    output: Any = SimpleNamespace(
        spec_verify_ct=[10],
        spec_num_correct_drafts=[accepted],
        completion_tokens=[12],
        spec_correct_drafts_histogram=[[9, 1]],
        spec_cap_lens_histogram=[lengths],
    )
    meta: dict[str, Any] = {}
    manager._calculate_spec_decoding_metrics(meta, output, 0)
    assert meta.get("spec_num_proposed_drafts") == proposed
    assert meta.get("spec_accept_rate") == (accepted / proposed if proposed else None)
    assert meta["spec_verify_ct"] == 10


@pytest.mark.parametrize("logs", [True, False])
@pytest.mark.parametrize(
    ("accepted", "tokens", "rate"),
    [(12, 10 + 15, 12 / 15), (12, 10 + 40, 12 / 40), (0, 10, 0.0), (0, 0, 0.0)],
)
def test_the_reported_rate_is_of_verified_drafts(
    monkeypatch: pytest.MonkeyPatch, accepted: int, tokens: int, rate: float, logs: bool
) -> None:
    """Ten steps of gamma 4; upstream divides by 40, and resets its counters where it logs."""
    monkeypatch.setattr(
        drafted_counts.upstream, "get_spec", lambda: SimpleNamespace(speculative_num_draft_tokens=5)
    )
    reporter: Any = SimpleNamespace(
        spec_num_correct_drafts=accepted, spec_num_forward_ct=10, spec_num_cap_tokens=tokens
    )
    reported: list[float] = []

    def report(reporter: Any, *given: Any) -> None:
        if logs:
            reported.append(reporter.spec_num_correct_drafts / (reporter.spec_num_forward_ct * 4))
            reporter.spec_num_correct_drafts = reporter.spec_num_forward_ct = 0

    drafted_counts.report_drafted(report, reporter, False)
    assert reported == pytest.approx([rate] * logs)
    assert reporter.spec_num_correct_drafts == (0 if logs else accepted)

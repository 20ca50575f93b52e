"""Timing of the sequential loop: plausible, and without a trace on what it times."""

from __future__ import annotations

import time
from typing import Any

import pytest

from sglang_dspark.errors import DSparkError
from sglang_dspark.evaluation.analyses.overhead import direct_share, engine_share
from sglang_dspark.evaluation.engine import DecodeSettings, ReferenceEngine
from tests.evaluation.conftest import Pair


def _engine(pair: Pair, tokens: int) -> ReferenceEngine:
    return ReferenceEngine(
        pair.target, pair.drafter, DecodeSettings(max_new_tokens=tokens, batch=3)
    )


@pytest.mark.parametrize("head", [True, False])
def test_share_in_the_engine(
    pair: Pair, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch, head: bool
) -> None:
    if not head:
        monkeypatch.setitem(pair.drafter._modules, "confidence_head", None)
    engine = _engine(pair, 60)
    before = engine.run(prompts[:3])
    found = engine_share(engine, pair.drafter, prompts)
    assert found.batch == 3
    assert found.rounds >= 2
    for part in (found.wall, found.thread_cpu):
        assert 0 < part.loop_s < part.round_s
        assert 0 < part.share < 1
    assert "draft" not in vars(pair.drafter), "the stopwatches are gone"
    assert engine.run(prompts[:3]) == before


def test_too_few_full_rounds_are_refused(pair: Pair, prompts: list[list[int]]) -> None:
    with pytest.raises(DSparkError, match="raise --max-new-tokens"):
        engine_share(_engine(pair, 4), pair.drafter, prompts)
    assert "draft" not in vars(pair.drafter)


def test_a_planted_cost_of_the_loop_is_found(pair: Pair) -> None:
    # A tiny model's own loop costs less than a busy machine's noise: make it 20 ms slower.
    planted, draft = 0.02, pair.drafter.draft

    def slower(*args: Any, **kwargs: Any) -> Any:
        until = time.thread_time() + planted
        while time.thread_time() < until:
            pass
        return draft(*args, **kwargs)

    object.__setattr__(pair.drafter, "draft", slower)  # shadows the method on this object
    try:
        found = direct_share(pair.target, pair.drafter, batch=2, context=9, repeats=30)
    finally:
        object.__delattr__(pair.drafter, "draft")
    assert found.pairs == 30
    for part in (found.wall, found.thread_cpu):
        assert 0.5 * planted < part.loop_s < part.round_s
        assert part.share_low <= part.share <= part.share_high
    assert found.thread_cpu.loop_s < 4 * planted  # threads that wait for one another spin

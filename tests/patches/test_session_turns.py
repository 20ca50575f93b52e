"""Test the end of a streaming session's turn: written slots count, and the row's generation."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_dspark.patches.step import session_generations
from sglang_dspark.patches.upstream_fixes import session_turns

ROW = 2


def turn(*, lent: bool = True) -> tuple[Any, Any]:
    """A session whose turn has 20 tokens, 19 of them written, and room for 32; its slot."""
    slot = SimpleNamespace(kv=SimpleNamespace(kv_committed_len=19, req_pool_idx=ROW))
    pool = SimpleNamespace(req_generation=torch.zeros(4, dtype=torch.int64))
    sessions = SimpleNamespace(
        borrowed_slot=lambda req: slot if lent else None,
        cache=SimpleNamespace(req_to_token_pool=pool),
    )
    return sessions, slot


def upstream(kept: bool) -> Any:
    def finished(sessions: Any, req: Any) -> bool:
        slot = sessions.borrowed_slot(req)
        if kept and slot is not None:
            slot.kv.kv_committed_len = 20
        return kept

    return finished


@pytest.mark.parametrize(("in_order", "committed"), [(True, 19), (False, 20)])
def test_what_is_not_written_is_no_context(
    monkeypatch: pytest.MonkeyPatch, in_order: bool, committed: int
) -> None:
    monkeypatch.setattr(session_turns, "_in_order", lambda: in_order)
    sessions, slot = turn()
    assert session_turns.end_turn(upstream(True), sessions, None) is True
    assert slot.kv.kv_committed_len == committed


@pytest.mark.parametrize(
    ("kept", "lent", "generation"), [(True, True, 1), (False, True, 0), (False, False, 0)]
)
def test_the_next_turn_is_another_generation(kept: bool, lent: bool, generation: int) -> None:
    """An aborted turn frees its row, which advances the generation by itself."""
    sessions, _ = turn(lent=lent)
    assert session_generations.advance_generation(upstream(kept), sessions, None) is kept
    found = sessions.cache.req_to_token_pool.req_generation.tolist()
    assert found == [0, 0, generation, 0]

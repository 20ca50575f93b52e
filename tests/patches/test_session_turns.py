"""Test the end of a streaming session's turn: written slots count, and the row's generation."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.runtime_context import get_context

from sglang_dspark.patches import registry
from sglang_dspark.patches.step import session_generations
from sglang_dspark.patches.upstream_fixes import session_turns

ROW = 2


class Theirs:
    """Upstream's sessions with one turn of 20 tokens, 19 of them written, and room for 32."""

    def __init__(self, *, lent: bool = True, kept: bool = True) -> None:
        kv = SimpleNamespace(kv_committed_len=19, req_pool_idx=ROW)
        self.slot, self.kept = (SimpleNamespace(kv=kv) if lent else None), kept
        pool = SimpleNamespace(req_generation=torch.zeros(4, dtype=torch.int64))
        self.cache = SimpleNamespace(req_to_token_pool=pool)

    def borrowed_slot(self, req: Any) -> Any:
        return self.slot

    def try_cache_finished_req(self, req: Any) -> bool:
        if self.kept and self.slot is not None:
            self.slot.kv.kv_committed_len = 20
        return self.kept


@pytest.mark.parametrize(("in_order", "committed"), [(True, 19), (False, 20)])
def test_what_is_not_written_is_no_context(in_order: bool, committed: int) -> None:
    sessions: Any = registry.derive(Theirs, session_turns.StreamingSession)()
    with get_context().override_server_args(disable_overlap_schedule=in_order):
        assert sessions.try_cache_finished_req(None) is True
    assert sessions.slot.kv.kv_committed_len == committed


@pytest.mark.parametrize(
    ("kept", "lent", "generation"), [(True, True, 1), (False, True, 0), (False, False, 0)]
)
def test_the_next_turn_is_another_generation(kept: bool, lent: bool, generation: int) -> None:
    """An aborted turn frees its row, which advances the generation by itself."""
    made: Any = registry.derive(Theirs, session_generations.StreamingSession)
    sessions = made(lent=lent, kept=kept)
    assert sessions.try_cache_finished_req(None) is kept
    found = sessions.cache.req_to_token_pool.req_generation.tolist()
    assert found == [0, 0, generation, 0]

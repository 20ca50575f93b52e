"""Reasoning tokens of an answer: those a client gets, however many tokens a step brought."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.scheduler_components import batch_result_processor as upstreams

from sglang_dspark.patches.upstream_fixes import reasoning_count
from tests.patches.hooked import put_in
from tests.patches.test_first_stop import request

THINK_END = 7
TOKENS = [3, 4, 5, 4, THINK_END, 3, 5, 4, 3]


def processor_of(**config: Any) -> Any:
    processor = object.__new__(upstreams.SchedulerBatchResultProcessor)
    object.__setattr__(processor, "model_config", SimpleNamespace(**config))  # it is frozen
    return processor


def counted(size: int, most: int, start: list[int] | None = None, end: int = THINK_END) -> int:
    """The count of an answer of `most` tokens at `size` tokens a step, by SGLang's processor."""
    processor = processor_of(think_end_ids=[end], self_opened_think_start_ids=start)
    req = request(max_new_tokens=most)
    req.require_reasoning = start is None
    at = 0
    while not req.finished():
        fresh = TOKENS[at : at + size]
        at += size
        req.output_ids.extend(fresh)
        processor._maybe_update_reasoning_tokens(req, fresh)
        req.update_finish_state(len(fresh))
        processor._handle_finish_state_updated_req(req, None, None, 0, None)
    assert len(req.output_ids_through_stop) == most
    return int(req.reasoning_tokens)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("most", range(1, 9))
def test_no_token_behind_the_end_is_counted(
    monkeypatch: pytest.MonkeyPatch, size: int, most: int
) -> None:
    # What follows the count there needs a whole scheduler.
    monkeypatch.setattr(
        upstreams.SchedulerBatchResultProcessor, "_handle_finish_state_updated_req", lambda *_: None
    )
    put_in(monkeypatch, reasoning_count.SEAMS)
    assert counted(size, most) == min(most, 5)
    assert counted(size, most, end=100) == most
    assert counted(size, most, start=[3, 4]) == (min(most, 5) if most > 1 else 0)
    assert counted(size, most, start=[4]) == 0


def test_a_prefills_token_is_counted_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    put_in(monkeypatch, reasoning_count.SEAMS)
    processor = processor_of(think_end_ids=[THINK_END])
    req = request()
    req.require_reasoning = True
    processor._maybe_update_reasoning_tokens(req, 3)
    assert req.reasoning_tokens == 1

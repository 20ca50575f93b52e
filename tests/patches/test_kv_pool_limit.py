"""Test the length limit of an answer in a KV pool: speculation keeps the slots of a step free."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.mem_cache import allocation_sizing
from sglang.srt.runtime_context import get_context

from sglang_dspark.patches.upstream_fixes.kv_pool_limit import keep_room, widen_row

RESERVE = 10


@pytest.fixture
def reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocation_sizing, "get_alloc_reserve_per_decode", lambda: RESERVE)


def allowed(prompt: int, asked: int, *, page: int = 1, plain: bool = False, least: int = 0) -> Any:
    scheduler = SimpleNamespace(
        spec_algorithm=SimpleNamespace(is_none=lambda: plain),
        max_total_num_tokens=100,
        page_size=page,
    )
    sampling = SimpleNamespace(max_new_tokens=asked, min_new_tokens=least)
    keep_room(
        None, scheduler, SimpleNamespace(sampling_params=sampling, origin_input_ids=[0] * prompt)
    )
    return sampling


@pytest.mark.parametrize(
    ("prompt", "asked", "page", "most"),
    [(40, 5, 1, 5), (40, 59, 1, 50), (89, 10, 1, 1), (95, 4, 1, 1), (40, 59, 8, 38), (40, 0, 1, 0)],
)
@pytest.mark.usefixtures("reserve")
def test_a_steps_room_is_left(prompt: int, asked: int, page: int, most: int) -> None:
    assert allowed(prompt, asked, page=page).max_new_tokens == most


@pytest.mark.usefixtures("reserve")
def test_plain_decoding_is_left_alone() -> None:
    assert allowed(40, 59, plain=True).max_new_tokens == 59


@pytest.mark.usefixtures("reserve")
def test_no_answer_must_be_longer_than_it_may() -> None:
    assert allowed(40, 59, least=55).min_new_tokens == 50


@pytest.mark.parametrize("gamma", [1, 7, 8, 16])
@pytest.mark.parametrize("page", [1, 16])
def test_a_row_holds_a_steps_slots_at_the_contexts_end(gamma: int, page: int) -> None:
    """The last step starts two tokens in front of the last one of plain decoding, at most."""
    drafts = {"speculative_algorithm": "DSPARK", "speculative_num_draft_tokens": gamma + 1}
    with get_context().override_server_args(page_size=page, **drafts):
        theirs = allocation_sizing.get_req_to_token_extra_context_len()
        ours = widen_row(theirs)
        reserve = allocation_sizing.get_alloc_reserve_per_decode()
    assert reserve == 2 * (gamma + 1)
    context = 1000
    last = context - 2  # tokens of prompt and answer together
    assert last - 2 + reserve + page - 1 <= context + ours
    assert ours == theirs or page == 1


def test_a_plain_servers_row_stays_as_it_is() -> None:
    with get_context().override_server_args(page_size=1):
        theirs = allocation_sizing.get_req_to_token_extra_context_len()
        assert widen_row(theirs) == theirs

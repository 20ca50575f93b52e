"""How long an answer may be in a KV pool: a step's room is left where the server speculates."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache import allocation_sizing

from sglang_dspark.serving.pool_end import keep_room

RESERVE = 10


@pytest.fixture(autouse=True)
def reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocation_sizing, "get_alloc_reserve_per_decode", lambda: RESERVE)


def allowed(
    prompt: int,
    asked: int,
    *,
    page: int = 1,
    plain: bool = False,
    least: int = 0,
    columns: int = 1000,
) -> Any:
    table = SimpleNamespace(req_to_token=torch.zeros(3, columns))
    scheduler = SimpleNamespace(
        spec_algorithm=SimpleNamespace(is_none=lambda: plain),
        max_total_num_tokens=100,
        page_size=page,
        req_to_token_pool=table,
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
def test_a_steps_room_is_left(prompt: int, asked: int, page: int, most: int) -> None:
    assert allowed(prompt, asked, page=page).max_new_tokens == most


def test_plain_decoding_is_left_alone() -> None:
    assert allowed(40, 59, plain=True).max_new_tokens == 59


def test_no_answer_must_be_longer_than_it_may() -> None:
    assert allowed(40, 59, least=55).min_new_tokens == 50


def test_a_steps_slots_stay_in_the_requests_row() -> None:
    """The last step starts in front of the answer's last token, and reserves from there."""
    kept = allowed(40, 59, columns=80).max_new_tokens
    assert 40 + kept - 2 + RESERVE == 80  # one more would be written to the next request's row
    assert allowed(40, 20, columns=80).max_new_tokens == 20

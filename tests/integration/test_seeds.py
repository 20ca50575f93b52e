"""A request's seed decides its tokens: plain or DSPARK, alone or among others."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.prompts import PROMPTS
from tests.integration.serving import Served

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("demo-pair")]

TOKENS = 32
SETTINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 20},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.05},
)


def seeded(server: Served, users: int, seeds: range) -> list[dict[str, Any]]:
    """One answer a seed, settings in turn, `users` at a time."""

    def ask(i: int) -> dict[str, Any]:
        sampling = SETTINGS[i % len(SETTINGS)] | {"sampling_seed": seeds[i], "ignore_eos": True}
        return server.generate(PROMPTS[i % 4], TOKENS, sampling_params=sampling)

    return server.each(ask, range(len(seeds)), users)


def tokens(answers: list[dict[str, Any]]) -> list[list[int]]:
    return [answer["output_ids"] for answer in answers]


def test_same_seed_same_tokens_in_any_company(plain: Served, dspark_ragged: Served) -> None:
    seeds = range(1000, 1008)
    alone = seeded(dspark_ragged, 1, seeds)
    together = seeded(dspark_ragged, 8, seeds)
    assert tokens(together) == tokens(alone)
    assert tokens(seeded(plain, 4, seeds)) == tokens(alone), "drafts changed a seeded answer"
    accepted = sum(answer["meta_info"]["spec_num_correct_drafts"] for answer in alone + together)
    assert accepted > 0, "no draft was accepted: nothing was tested"


def test_other_seeds_and_no_seed_give_other_tokens(dspark_ragged: Served) -> None:
    assert len({tuple(t) for t in tokens(seeded(dspark_ragged, 4, range(4, 8)))}) == 4
    free = {"temperature": 1.0, "ignore_eos": True}
    drawn = [dspark_ragged.generate(PROMPTS[0], TOKENS, sampling_params=free) for _ in range(3)]
    assert len({tuple(t) for t in tokens(drawn)}) == 3


def test_openai_seed(dspark_ragged: Served) -> None:
    body = {"model": "default", "prompt": PROMPTS[1], "max_tokens": 24, "temperature": 1.0}
    texts = [
        dspark_ragged.request("POST", "/v1/completions", json={**body, "seed": seed}).json()
        for seed in (5, 5, 6)
    ]
    first, second, other = (text["choices"][0]["text"] for text in texts)
    assert first == second != other

"""CUDA's side of the step obeys penalties, min_new_tokens and seeds, as the plain server does."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.serving import Served
from tests.integration.test_logit_processors import counted
from tests.rehearsal.conftest import Rehearsed
from tests.rehearsal.test_overlap_steps import PROMPTS

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("rehearsal")]

TOKENS = 48
PENALTIES: tuple[dict[str, Any], ...] = (
    {"frequency_penalty": 0.8},
    {"presence_penalty": 0.7, "repetition_penalty": 1.15},
    {"repetition_penalty": 1.4, "logit_bias": {"62": 3.0, "107": 2.0}},
    {},
)
SEEDED: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0},
    {"temperature": 0.8, "top_k": 20},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 1.0, "frequency_penalty": 0.5},
)


def answers(
    server: Served, settings: tuple[dict[str, Any], ...], users: int, **common: Any
) -> list[dict[str, Any]]:
    """One answer a prompt, settings in turn, `users` at a time."""

    def ask(i: int) -> dict[str, Any]:
        sampling = {"ignore_eos": True} | settings[i % len(settings)] | common
        if "seeds" in sampling:
            sampling["sampling_seed"] = sampling.pop("seeds") + i
        return server.generate(PROMPTS[i], TOKENS, sampling_params=sampling)

    return server.each(ask, range(len(PROMPTS)), users)


def tokens(found: list[dict[str, Any]]) -> list[list[int]]:
    return [answer["output_ids"] for answer in found]


def accepted(found: list[dict[str, Any]]) -> int:
    return sum(answer["meta_info"]["spec_num_correct_drafts"] for answer in found)


@pytest.mark.parametrize("users", [1, 4, 8])
def test_penalised_answers_are_the_plain_servers(
    plain: Served, rehearsed: Rehearsed, users: int
) -> None:
    before = len(rehearsed.launches())
    got = answers(rehearsed.server, PENALTIES, users)
    assert tokens(got) == tokens(answers(plain, PENALTIES, users))
    free = answers(rehearsed.server, ({},), users)
    changed = sum(a != b for a, b in zip(tokens(got), tokens(free), strict=True))
    assert changed >= 5, "the penalties change nothing here"
    assert accepted(got) > TOKENS, "too few drafts were accepted: nothing was tested"
    assert [each for each in rehearsed.launches()[before:] if each["reads"]] == []


def test_a_processor_sees_the_answer_as_under_the_plain_overlap_loop(
    plain: Served, rehearsed: Rehearsed
) -> None:
    """Without its last token, where no prefill comes between; then it has no drafts."""
    for prompt in PROMPTS[:4]:
        got = rehearsed.server.generate(prompt, TOKENS, **counted())
        wanted = plain.generate(prompt, TOKENS, **counted(behind=1))
        assert got["output_ids"] == wanted["output_ids"]
        assert accepted([got]) == 0


def test_no_stop_token_comes_before_the_minimum(plain: Served, rehearsed: Rehearsed) -> None:
    free = tokens(answers(rehearsed.server, ({},), 4))
    stops = sorted({text[4] for text in free})
    settings = ({"min_new_tokens": 20, "stop_token_ids": stops, "ignore_eos": False},)
    got = tokens(answers(rehearsed.server, settings, 4))
    assert got == tokens(answers(plain, settings, 4))
    assert any(20 <= len(text) < TOKENS for text in got), "no stop token ended an answer"
    assert all(not set(text[:19]) & set(stops) for text in got)


def test_the_same_seed_gives_the_same_tokens_in_any_company(
    plain: Served, rehearsed: Rehearsed
) -> None:
    before = len(rehearsed.launches())
    alone = answers(rehearsed.server, SEEDED, 1, seeds=1000)
    together = answers(rehearsed.server, SEEDED, 8, seeds=1000)
    assert tokens(together) == tokens(alone)
    assert tokens(answers(plain, SEEDED, 4, seeds=1000)) == tokens(alone)
    assert accepted(alone) > TOKENS, "too few drafts were accepted: nothing was tested"
    assert [each for each in rehearsed.launches()[before:] if each["reads"]] == []
    others = answers(rehearsed.server, SEEDED, 8, seeds=2000)
    assert all(a != b for a, b in zip(tokens(others), tokens(alone), strict=True))

"""Penalties, served: DSPARK's greedy answers under them are the plain server's."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.serving import Served
from tests.integration.test_features import PROMPT
from tests.integration.test_greedy_equal import NEAR_TIE, first_difference, logit_gap

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("demo-pair")]

TOKENS = 32
SETTINGS: list[dict[str, Any]] = [
    {"frequency_penalty": 0.8},
    {"presence_penalty": 0.7, "repetition_penalty": 1.15},
    {"presence_penalty": 1.0, "repetition_penalty": 0.8},  # their order matters most below 1
    {"min_new_tokens": 24, "stop_token_ids": [28, 30]},  # full stop and comma
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: "+".join(settings))
def test_penalised_answers_are_the_plain_servers(
    plain: Served, dspark_ragged: Served, settings: dict[str, Any]
) -> None:
    free = dspark_ragged.generate(PROMPT, max_new_tokens=TOKENS)["output_ids"]
    got = dspark_ragged.generate(PROMPT, max_new_tokens=TOKENS, sampling_params=settings)[
        "output_ids"
    ]
    wanted = plain.generate(PROMPT, max_new_tokens=TOKENS, sampling_params=settings)["output_ids"]
    assert got != free, "the penalty changes nothing here"
    at = first_difference(wanted, got)
    if at is not None:
        pair = (wanted[at], got[at])
        gap = logit_gap(plain, PROMPT, wanted[:at], pair)
        assert gap < NEAR_TIE, f"{settings}: token {at} is {got[at]}, not {wanted[at]} ({gap})"
    assert "penalties by what is listed" not in dspark_ragged.log

"""Sampled answers of the rehearsed step have the plain server's distribution, token for token.

The statistics and their power are those of tests/integration/test_scheduled_distribution.py.
"""

from __future__ import annotations

import math

import pytest

from tests.integration.serving import Served
from tests.integration.test_scheduled_distribution import (
    ALPHA,
    Cut,
    evidence,
    rank_p_value,
    read_back,
)
from tests.integration.test_scheduling import windows
from tests.rehearsal.conftest import Rehearsed

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("rehearsal")]

TOKENS = 48
PROMPTS = [[5 + (11 * i + 3 * j) % 200 for j in range(4 + i % 9)] for i in range(48)]
CUTS = {
    "lists of kept tokens": Cut(top_k=20, top_p=0.95),
    "our rule": Cut(top_k=2000, top_p=0.9, min_p=0.2),
}


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_what_is_drawn_has_plain_decodings_distribution(
    plain: Served, rehearsed: Rehearsed, cut: Cut
) -> None:
    before = len(rehearsed.launches())
    answers = rehearsed.server.generate_all(
        PROMPTS, 4, max_new_tokens=TOKENS, sampling_params=cut.sampling()
    )
    assert [each for each in rehearsed.launches()[before:] if each["reads"]] == []
    counts = windows(answers)  # steps that verified 0 .. gamma + 1 tokens
    steps = sum(counts)
    verified = sum(tokens * count for tokens, count in enumerate(counts)) - steps
    accepted = len(answers) * (TOKENS - 1) - steps
    assert sum(counts[2:-1]) > 50, "windows of all lengths, or nothing is ragged"
    assert accepted > 300
    assert verified - accepted > 300, "drafts must be rejected too, or nothing is tested"
    drawn = []
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        drawn += read_back(plain, prompt, answer["output_ids"], cut)
    assert evidence(drawn) < math.log(1 / ALPHA)
    assert rank_p_value(drawn) > ALPHA

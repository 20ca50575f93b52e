"""The GPU kit's comparison of greedy answers: partings, near ties, and rows that show nothing."""

from __future__ import annotations

import math

import pytest
import torch

from sglang_dspark.errors import DSparkError
from tools.gpu.kit.attending import (
    ANSWER_TOKENS,
    PROMPT_TOKENS,
    REQUESTS,
    Answers,
    Margin,
    Parting,
    judged,
    margin,
    near_tie,
    partings,
    passes,
    requests_of,
)

LENGTHS = [4, 4]
HALF = torch.bfloat16
FAIR = Answers([[1, 2, 3, 4], [5, 6, 7, 8]], steps=3, accepted=3, verified=5)
PARTED = Parting(request=1, position=2, plain=7, scheduled=9)


def test_an_answer_parts_at_its_first_other_token() -> None:
    plain = [[1, 2, 3, 4], [5, 6, 7, 8], [5, 6]]
    assert partings(plain, [[1, 2, 3, 4], [5, 6, 9, 0], [4, 6]], [4, 4, 2]) == [
        PARTED,
        Parting(request=2, position=0, plain=5, scheduled=4),
    ]


def test_equal_answers_part_nowhere() -> None:
    assert partings(FAIR.ids, FAIR.ids, LENGTHS) == []


@pytest.mark.parametrize("short", ["plain", "scheduled"])
def test_a_missing_token_is_wrong_even_where_it_is_missing_twice(short: str) -> None:
    cut = [[1, 2, 3, 4], [5, 6, 7]]
    given = (cut, cut) if short == "plain" else (FAIR.ids, cut)
    with pytest.raises(DSparkError, match=f"request 1: the {short} server answered 3 of 4 tokens"):
        partings(*given, LENGTHS)


def test_a_server_that_answers_fewer_requests_is_not_compared() -> None:
    with pytest.raises(ValueError, match="shorter"):
        partings(FAIR.ids, FAIR.ids[:1], LENGTHS)


def test_a_margin_is_that_of_the_logits_and_knows_their_size() -> None:
    entries = [[-3.0, 9, None], [-2.5, 7, None], [-14.0, 0, None]]  # token 0 has logit zero
    assert margin(PARTED, entries) == Margin(value=0.5, logit=11.5)


@pytest.mark.parametrize(
    ("logit", "dtype", "spacing"),
    [
        (8.0, HALF, 2.0**-4),
        (15.9, HALF, 2.0**-4),
        (-16.0, HALF, 2.0**-3),
        (11.0, torch.float32, 2.0**-20),
    ],
)
def test_a_near_tie_is_eight_spacings_of_the_dtype(
    logit: float, dtype: torch.dtype, spacing: float
) -> None:
    value = torch.tensor(abs(logit), dtype=dtype)
    above = torch.nextafter(value, torch.tensor(math.inf, dtype=dtype))
    assert float(above - value) == spacing
    assert near_tie(logit, dtype) == 8 * spacing


def test_a_margin_within_the_tolerance_is_a_near_tie() -> None:
    row = judged(LENGTHS, FAIR, [PARTED], [Margin(value=0.5, logit=11.5)], HALF)
    assert row == {
        "requests": 2,
        "tokens": 8,
        "compared": 6,
        "equal": 1,
        "near_ties": 1,
        "largest_margin": 0.5,
        "tau": 2.0,
        "accepted": 3,
        "rejected": 2,
    }


@pytest.mark.parametrize(("value", "dtype"), [(0.51, HALF), (math.nan, HALF), (0.5, torch.float32)])
def test_any_other_margin_fails_with_one_line(value: float, dtype: torch.dtype) -> None:
    row = judged(LENGTHS, FAIR, [PARTED], [Margin(value=value, logit=11.5)], dtype)
    assert (row["equal"], row["near_ties"]) == (1, 0)
    assert row["failed"].startswith(
        "1 of 2 answers are not plain decoding's: request 1 has token 9 in place of 7 at position 2"
    )
    assert "\n" not in row["failed"]


def test_one_near_tie_does_not_hide_another_parting() -> None:
    parted = [Parting(0, 0, 1, 3), PARTED]
    row = judged(LENGTHS, FAIR, parted, [Margin(0.1, 11.0), Margin(2.0, 11.0)], HALF)
    assert (row["near_ties"], row["compared"], row["largest_margin"]) == (1, 2, 2.0)
    assert row["failed"].startswith("1 of 2 answers")


@pytest.mark.parametrize(
    ("accepted", "verified", "line"),
    [(0, 5, "no draft was accepted"), (0, 0, "no draft was accepted"), (5, 5, "no draft was reje")],
)
def test_a_load_without_accepted_and_rejected_drafts_shows_nothing(
    accepted: int, verified: int, line: str
) -> None:
    found = Answers(FAIR.ids, steps=3, accepted=accepted, verified=verified)
    assert judged(LENGTHS, found, [], [], HALF)["failed"].startswith(line)


@pytest.mark.parametrize(("users", "count"), [(1, REQUESTS), (3, 9), (48, 48)])
def test_requests_vary_in_length_and_are_the_same_each_time(users: int, count: int) -> None:
    prompts, lengths = requests_of(users, 512)
    assert (prompts, lengths) == requests_of(users, 512)
    assert len(prompts) == len(lengths) == count
    for sizes, (fewest, most) in (
        ([len(prompt) for prompt in prompts], PROMPT_TOKENS),
        (lengths, ANSWER_TOKENS),
    ):
        assert len(set(sizes)) > 4
        assert fewest <= min(sizes) <= max(sizes) <= most
    assert {token for prompt in prompts for token in prompt} <= set(range(4, 512))


def test_a_load_without_drafts_proves_nothing_and_fails_nothing() -> None:
    right = {"requests": 8, "equal": 7, "near_ties": 1}
    idle = {**right, "failed": "no draft was accepted, so nothing is shown"}
    wrong = {"requests": 8, "equal": 7, "near_ties": 0, "failed": "1 of 8 answers"}
    assert passes([right, idle])
    assert not passes([idle, idle])
    assert not passes([right, wrong])
    assert not passes([right, {"attending": 8, "failed": "no answer"}])
    assert not passes([])

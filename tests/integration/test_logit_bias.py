"""logit_bias, served: what it forbids never comes, and answers are the plain server's."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.comparing import SAMPLING, Question, ask_all, equal_answers
from tests.integration.serving import Served
from tests.integration.test_features import PROMPT

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("demo-pair")]

TOKENS = 32
HOT = {"temperature": 2.0, "sampling_seed": 31}
HOT_CUT = {"temperature": 2.0, "top_k": 50, "top_p": 0.9, "sampling_seed": 32}


def ids_of(server: Served, text: str) -> list[int]:
    body = {"prompt": text, "add_special_tokens": False}
    return list(server.request("POST", "/tokenize", json=body).json()["tokens"])


def usual_tokens(server: Served) -> list[int]:
    """Return the set of tokens of the prompt's greedy answer."""
    return sorted(set(server.generate(PROMPT, TOKENS)["output_ids"]))


def test_forbidden_tokens_do_not_come(plain: Served, dspark_ragged: Served) -> None:
    forbidden = usual_tokens(dspark_ragged)[::2]
    bias = {"logit_bias": {str(token): -100.0 for token in forbidden}}
    questions = [Question(PROMPT, each | bias, TOKENS) for each in (*SAMPLING, HOT)]
    for answer in equal_answers(plain, dspark_ragged, questions, concurrency=5):
        assert not set(answer["output_ids"]) & set(forbidden)


@pytest.mark.slow
def test_favoured_tokens_come(plain: Served, dspark_ragged: Served) -> None:
    favoured = ids_of(plain, " the cat and the dog of a number")
    bias = {"logit_bias": {str(token): 6.0 for token in favoured}}
    questions = [Question(PROMPT, each | bias, TOKENS) for each in (*SAMPLING, HOT, HOT_CUT)]
    answers = equal_answers(plain, dspark_ragged, questions, concurrency=6)
    free = ask_all(dspark_ragged, [question._replace(sampling=HOT) for question in questions], 6)
    assert _share(answers, favoured) > 2 * _share(free, favoured)


def _share(answers: list[dict[str, Any]], tokens: list[int]) -> float:
    drawn = [token for answer in answers for token in answer["output_ids"]]
    return sum(token in tokens for token in drawn) / len(drawn)


@pytest.mark.slow
def test_unseeded_answers_avoid_what_is_forbidden(dspark_ragged: Served) -> None:
    forbidden = usual_tokens(dspark_ragged)
    hot = {"temperature": 1.0}
    bias = {"logit_bias": {str(token): -100.0 for token in forbidden}}
    questions = [Question(PROMPT, hot | bias, TOKENS), Question(PROMPT, hot, TOKENS)] * 8
    answers = ask_all(dspark_ragged, questions, 8)
    assert _share(answers[::2], forbidden) == 0.0
    # A twentieth is a dozen tokens of 256: none of them among the others is no accident.
    assert _share(answers[1::2], forbidden) > 0.05, "these tokens are rare even without a bias"


def test_openai_logit_bias(plain: Served, dspark_ragged: Served) -> None:
    bias = {str(token): -100 for token in usual_tokens(plain)}
    body = {"model": "default", "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0.0}
    path = "/v1/completions"
    texts = [
        server.request("POST", path, json={**body, **extra}).json()["choices"][0]["text"]
        for server in (plain, dspark_ragged)
        for extra in ({}, {"logit_bias": bias})
    ]
    assert texts[:2] == texts[2:]
    assert texts[0] != texts[1]

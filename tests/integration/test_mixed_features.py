"""Requests of every kind in one batch, served: each answer is what the request gets alone."""

from __future__ import annotations

import json

import pytest

from tests.integration.comparing import Question, equal_answers
from tests.integration.prompts import PROMPTS
from tests.integration.serving import Served
from tests.integration.test_features import PROMPT
from tests.integration.test_grammar import FUNCTION, PERSON, SCHEMA

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("demo-pair")]

LOGPROBS = {"return_logprob": True, "top_logprobs_num": 2}
GREEDY, SEEDED = {"temperature": 0.0}, {"temperature": 1.0, "sampling_seed": 51}
QUESTIONS = (
    Question(PROMPTS[0], GREEDY),
    Question(PROMPT, GREEDY | {"regex": FUNCTION}),
    Question(PROMPTS[1], SEEDED),
    Question(PERSON, SEEDED | {"json_schema": json.dumps(SCHEMA)}, 64),
    Question(PROMPTS[2], SEEDED | {"logit_bias": {"28": -100.0, "30": 3.0}}),
    Question(PROMPTS[3], GREEDY | {"n": 2}),
    Question(PROMPTS[4], SEEDED | {"top_p": 0.8}, 40, LOGPROBS),
    Question(PROMPTS[5], GREEDY | {"frequency_penalty": 0.6, "min_new_tokens": 20}),
    Question(PROMPTS[24], GREEDY, 40, LOGPROBS),
    Question(PROMPTS[6], SEEDED | {"top_k": 10, "n": 2}, 20),
    Question(PROMPT, SEEDED | {"regex": FUNCTION, "presence_penalty": 0.4}, 40, LOGPROBS),
    Question(PROMPTS[33], GREEDY | {"logit_bias": {"28": 2.0}}),
)


def test_each_answer_is_the_one_it_gets_alone(plain: Served, dspark_ragged: Served) -> None:
    equal_answers(plain, dspark_ragged, QUESTIONS, concurrency=len(QUESTIONS))

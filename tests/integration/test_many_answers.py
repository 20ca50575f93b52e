"""Several answers to one prompt (n > 1), served: as many as asked for, each as if asked alone."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.comparing import SAMPLING, Question, equal_answers
from tests.integration.prompts import PROMPTS
from tests.integration.serving import Served
from tests.integration.test_features import PROMPT

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("demo-pair")]

N = 3
TOKENS = 24
LONG = 80  # of 24 tokens, two unseeded answers to this prompt are the same once in a thousand pairs


def tokens(answers: list[dict[str, Any]]) -> list[list[int]]:
    return [answer["output_ids"] for answer in answers]


def test_n_answers_are_the_plain_servers(plain: Served, dspark_ragged: Served) -> None:
    """Greedy ones are all the single answer; seeded ones too, as all of them have that seed."""
    questions = [Question(PROMPT, each | {"n": N}, TOKENS) for each in SAMPLING]
    answers = equal_answers(plain, dspark_ragged, questions, concurrency=len(questions))
    assert len(answers) == N * len(questions)
    for i, question in enumerate(questions):
        alone = question._replace(sampling=question.sampling | {"n": 1}).ask(dspark_ragged)
        assert tokens(answers[N * i : N * (i + 1)]) == [alone["output_ids"]] * N
    assert len({answer["meta_info"]["id"] for answer in answers}) == len(answers)


def test_unseeded_answers_differ(dspark_ragged: Served) -> None:
    sampling = {"temperature": 1.0, "n": N, "ignore_eos": True}
    answers = Question(PROMPT, sampling, LONG).ask(dspark_ragged)
    assert len({tuple(each) for each in tokens(answers)}) == N
    assert [len(each) for each in tokens(answers)] == [LONG] * N


def test_n_answers_to_each_of_several_prompts(plain: Served, dspark_ragged: Served) -> None:
    """Answers come prompt by prompt."""
    prompts = list(PROMPTS[:2])
    sampling = {"temperature": 0.0, "max_new_tokens": TOKENS, "n": 2}
    got, wanted = (
        server.request("POST", "/generate", json={"text": prompts, "sampling_params": sampling})
        for server in (dspark_ragged, plain)
    )
    assert tokens(got.json()) == tokens(wanted.json())
    alone = [dspark_ragged.generate(prompt, TOKENS)["output_ids"] for prompt in prompts]
    assert tokens(got.json()) == [alone[0], alone[0], alone[1], alone[1]]


def chat(server: Served, **fields: Any) -> dict[str, Any]:
    turns = [{"role": "user", "content": "Write a Python function that adds two numbers."}]
    body = {"model": "default", "messages": turns, "max_tokens": TOKENS, "n": N, **fields}
    return dict(server.request("POST", "/v1/chat/completions", json=body).json())


@pytest.mark.parametrize("fields", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 5}])
def test_openai_choices(plain: Served, dspark_ragged: Served, fields: dict[str, Any]) -> None:
    got, wanted = chat(dspark_ragged, **fields), chat(plain, **fields)
    assert [choice["index"] for choice in got["choices"]] == list(range(N))
    assert got["choices"] == wanted["choices"]
    assert got["usage"]["completion_tokens"] == wanted["usage"]["completion_tokens"] == N * TOKENS


def test_openai_choices_without_a_seed_differ(dspark_ragged: Served) -> None:
    choices = chat(dspark_ragged, temperature=1.0, max_tokens=LONG, ignore_eos=True)["choices"]
    assert len({choice["message"]["content"] for choice in choices}) == N

"""Test served log-probabilities of sampled tokens: those of the target, for any drafts.

SGLang returns log softmax(logits / T) before any cut. On the plain server a probability below
float32's range has a logarithm of -3.4e38, under DSPARK its true one: below FLOOR both count alike.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.integration.comparing import SAMPLING, Question, ask_all, equal_answers
from tests.integration.prompts import PROMPTS
from tests.integration.serving import Served
from tests.integration.test_features import PROMPT
from tests.integration.test_greedy_equal import accepted_drafts
from tests.integration.test_scheduled_distribution import tokens_of
from tests.integration.test_scheduling import windows

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("demo-pair")]

TOKENS = 32
TOLERANCE = 1e-4
FLOOR = -80.0
ASKED = {"return_logprob": True, "top_logprobs_num": 3, "token_ids_logprob": [5, 198, 2000]}
LISTS = ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs")
SETTINGS: tuple[dict[str, Any], ...] = (
    *SAMPLING,
    {"temperature": 0.7, "sampling_seed": 41},
    {"temperature": 1.5, "sampling_seed": 42},
    {"temperature": 1.2, "top_k": 30, "top_p": 0.9, "sampling_seed": 43},
    {"temperature": 1.0, "sampling_seed": 44, "logit_bias": {"28": 3.0, "198": -100.0}},
    {"temperature": 1.0, "sampling_seed": 45, "regex": r"(yes|no|maybe)( [a-z]+){6,12}\."},
)


def numbers(answer: dict[str, Any], name: str) -> tuple[NDArray[np.float64], list[Any]]:
    """The values of a list of log-probabilities [TOKENS, entries], and their tokens."""
    rows = answer["meta_info"][name]
    if name == "output_token_logprobs":
        rows = [[row] for row in rows]
    values = np.array([[entry[0] for entry in row] for row in rows])
    return np.maximum(values, FLOOR), [[entry[1] for entry in row] for row in rows]


def test_seeded_logprobs_are_the_plain_servers(plain: Served, dspark_ragged: Served) -> None:
    """All settings run at once, so that one batch has ragged windows of several requests."""
    questions = [Question(PROMPTS[i], each, TOKENS, ASKED) for i, each in enumerate(SETTINGS)]
    got = equal_answers(plain, dspark_ragged, questions, concurrency=len(questions))
    assert sum(steps > 0 for steps in windows(got)[1:]) >= 3, "windows of one length"
    for setting, ours, theirs in zip(SETTINGS, got, ask_all(plain, questions, 4), strict=True):
        for name in LISTS:
            (a, tokens_a), (b, tokens_b) = numbers(ours, name), numbers(theirs, name)
            assert a.shape == b.shape
            assert len(a) == len(ours["output_ids"])
            assert np.abs(a - b).max() < TOLERANCE, f"{setting}, {name}"
            seen = a > FLOOR  # which of the impossible comes first means nothing
            assert (np.where(seen, tokens_a, 0) == np.where(seen, tokens_b, 0)).all()


def test_unseeded_logprobs_are_what_the_target_reads(plain: Served, dspark_ragged: Served) -> None:
    """The plain server reads each answer as a prompt."""
    cuts = ({}, {"top_p": 0.8}, {"top_k": 10}, {"min_p": 0.1})
    questions = [
        Question(prompt, {"temperature": 1.0} | cut, TOKENS, {"return_logprob": True})
        for prompt, cut in zip((PROMPT, *PROMPTS[4:11]), cuts * 2, strict=True)
    ]
    answers = ask_all(dspark_ragged, questions, len(questions))
    assert accepted_drafts(answers)[0] > 0
    for question, answer in zip(questions, answers, strict=True):
        prompt, tokens = tokens_of(plain, question.prompt), answer["output_ids"]
        told = plain.generate(
            [*prompt, *tokens], max_new_tokens=1, return_logprob=True, logprob_start_len=0
        )["meta_info"]["input_token_logprobs"]
        assert [entry[1] for entry in told] == [*prompt, *tokens]
        returned, drawn = numbers(answer, "output_token_logprobs")
        assert [token for (token,) in drawn] == tokens
        read = np.array([entry[0] for entry in told[len(prompt) :]])
        assert np.abs(returned[:, 0] - read).max() < TOLERANCE

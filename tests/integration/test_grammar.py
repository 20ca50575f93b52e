"""Constrained answers, served: regex, JSON schema, EBNF and tags hold, as without drafts.

Each verified row is masked by the grammar behind the drafts in front of it. A draft that breaks the
grammar has probability 0 there, and what was drafted behind the grammar's end is dropped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jsonschema
import pytest

from tests.integration.comparing import SAMPLING, Question, equal_answers, flat
from tests.integration.prompts import chat_template
from tests.integration.serving import Served

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("demo-pair")]

CODE = chat_template("Write a Python function that adds two numbers.")
PERSON = chat_template("Describe a person as JSON, with name, age and tags.")
FIXED = "```python\ndef add_two_numbers(num1, num2):\n    return num1 + num2\n"
FUNCTION = r"```python\ndef [a-z_]{1,16}\([a-z0-9, ]{1,16}\):\n    return [a-z0-9_ +]{1,24}\n"
LIST = r"(- [a-z]{1,8} costs [0-9]{1,4}\n){3}done"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
TAG = {
    "type": "structural_tag",
    "format": {
        "type": "tag",
        "begin": "```json\n",
        "content": {"type": "json_schema", "json_schema": SCHEMA},
        "end": "\n```",
    },
}


def is_person(text: str) -> bool:
    # Where a schema limits a string's length, xgrammar's strings may hold a tab as it is.
    jsonschema.validate(json.loads(text, strict=False), SCHEMA)
    return True


class Grammar(NamedTuple):
    """A constraint of /generate, and whether an answer that has ended fulfils it."""

    prompt: str
    constraint: dict[str, str]
    fulfilled: Callable[[str], Any]


GRAMMARS = {
    "fixed": Grammar(CODE, {"regex": re.escape(FIXED)}, re.compile(re.escape(FIXED)).fullmatch),
    "regex": Grammar(CODE, {"regex": FUNCTION}, re.compile(FUNCTION).fullmatch),
    "json_schema": Grammar(PERSON, {"json_schema": json.dumps(SCHEMA)}, is_person),
    "ebnf": Grammar(
        chat_template("Repeat this three times: - tea costs 2"),
        {
            "ebnf": 'root ::= item item item "done"\n'
            'item ::= "- " [a-z]{1,8} " costs " [0-9]{1,4} "\\n"'
        },
        re.compile(LIST).fullmatch,
    ),
    "structural_tag": Grammar(
        PERSON,
        {"structural_tag": json.dumps(TAG)},
        lambda text: is_person(text.removeprefix("```json\n").removesuffix("\n```")),
    ),
}


@pytest.mark.parametrize("name", GRAMMARS)
def test_constrained_answers_are_the_plain_servers(
    plain: Served, dspark_ragged: Served, name: str
) -> None:
    grammar = GRAMMARS[name]
    questions = [Question(grammar.prompt, each | grammar.constraint, 96) for each in SAMPLING]
    for answer in equal_answers(plain, dspark_ragged, questions, concurrency=4):
        assert answer["meta_info"]["finish_reason"]["type"] == "stop", answer["text"]
        assert grammar.fulfilled(answer["text"]), answer["text"]


def test_unseeded_answers_fulfil_their_grammar(dspark_ragged: Served) -> None:
    """Half the batch is free to say what it likes."""
    grammar = GRAMMARS["json_schema"]
    hot = {"temperature": 1.2}
    questions = [Question(grammar.prompt, hot | grammar.constraint, 160), Question(CODE, hot)] * 4
    answers = flat(dspark_ragged.each(lambda each: each.ask(dspark_ragged), questions, 8))
    assert len({answer["text"] for answer in answers[::2]}) > 1
    for answer in answers[::2]:
        if answer["meta_info"]["finish_reason"]["type"] == "stop":
            assert is_person(answer["text"])
        else:
            assert answer["text"].startswith("{")


COMBINED: tuple[dict[str, Any], ...] = (
    {"frequency_penalty": 0.5, "repetition_penalty": 1.1},
    {"logit_bias": {"28": 4.0, "725": -100.0}},
    {"min_new_tokens": 12},
    {"stop": ["return"]},
)


@pytest.mark.parametrize("setting", COMBINED, ids="+".join)
def test_grammar_beside_other_settings(
    plain: Served, dspark_ragged: Served, setting: dict[str, Any]
) -> None:
    constraint = {"regex": r"```python\ndef [a-z_]{1,16}\([^)]{1,40}\):\n    return [^\n]{1,40}\n"}
    questions = [Question(CODE, each | constraint | setting, 48) for each in SAMPLING[:3]]
    equal_answers(plain, dspark_ragged, questions, concurrency=3)


def test_openai_response_format(plain: Served, dspark_ragged: Served) -> None:
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": "Describe a person: name, age and tags."}],
        "max_tokens": 96,
        "temperature": 0.0,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "person", "schema": SCHEMA},
        },
    }
    texts = []
    for server in (plain, dspark_ragged):
        answer = server.request("POST", "/v1/chat/completions", json=body).json()
        texts.append(answer["choices"][0]["message"]["content"])
    assert texts[0] == texts[1]
    assert is_person(texts[1])


@pytest.mark.parametrize("bad", [{"regex": "("}, {"json_schema": "{"}, {"ebnf": "root ::= ("}])
def test_a_grammar_that_is_none_is_refused(dspark_ragged: Served, bad: dict[str, str]) -> None:
    answer = dspark_ragged.request(
        "POST", "/generate", json={"text": "x", "sampling_params": {"max_new_tokens": 4, **bad}}
    )
    assert answer.status_code == 400, answer.text[:300]
    assert "compile" in answer.text
    assert dspark_ragged.generate("Once", max_new_tokens=4)["meta_info"]["completion_tokens"] == 4

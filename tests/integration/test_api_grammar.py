"""Texts and tool calls forced by grammar on the demo pair, answered as plain decoding does."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

import pytest

from tests.integration.api_clients import APIS, Answer, Asked
from tests.integration.serving import Served

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("demo-pair")]

FORCED: dict[str, Any] = {
    "calls": [{"name": "ping", "arguments": {}}, {"name": "add", "arguments": {"a": 1}}],
    "emoji": {"text": "Café 😀👩‍👧 ok 東京 👍🏽."},
    "markers": {"text": "</think> <tool_call> [TOOL_CALLS] a < b"},
}
STREAMED = (False, True)
WITH_SCHEMA = ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/generate")


WITH_TOOLS = ("/v1/chat/completions", "/v1/responses")  # that have strict tools


def tool(**values: list[Any]) -> dict[str, Any]:
    """Return the schema of a tool whose arguments all have one of these values."""
    properties = {name: {"enum": allowed} for name, allowed in values.items()}
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


TOOLS = {
    "ping": tool(host=["example.org", "a } ] b"]),
    "weather": tool(city=["Oslo", "東京 😀"], days=[3, 14]),
}


class Called(NamedTuple):
    """An API, whether it streams, and which tool must be called: "required" is any."""

    api: str
    stream: bool
    choice: str

    def ask(self, server: Served) -> Answer:
        """Ask for a call that the target, left alone, would not make."""
        asked = Asked("What is the weather in Oslo?", limit=200, tools=TOOLS, choice=self.choice)
        return APIS[self.api](server, asked, self.stream)


class Case(NamedTuple):
    """An API, whether it streams, and a text of `FORCED`."""

    api: str
    stream: bool
    text: str

    def ask(self, server: Served) -> Answer:
        """Ask for the one value that the schema admits, whose text the prompt repeats."""
        value = FORCED[self.text]
        prompt = f"Repeat this JSON: {json.dumps(value, ensure_ascii=False)}"
        asked = Asked(prompt, limit=160, schema={"const": value})
        return APIS[self.api](server, asked, self.stream)


def chosen(logprobs: Any) -> list[tuple[Any, float]]:
    """Return the answer's tokens with their logprobs, from either form of the APIs.

    Top logprobs are skipped: all tokens but one are masked, and their order is arbitrary.
    """
    if not logprobs:
        return []
    if isinstance(logprobs[0], dict):
        return [(each["token"], each["logprob"]) for each in logprobs]
    return [(token, value) for value, token, _ in logprobs[0]]


CASES = [Case(*cell) for cell in product(WITH_SCHEMA, STREAMED, FORCED)]
CALLED = [Called(*cell) for cell in product(WITH_TOOLS, STREAMED, ("required", *TOOLS))]
# Two of three texts or tools, others for each API and way of streaming.
SLOW = {cell for turn, cell in enumerate((*CASES, *CALLED)) if turn % 3 != turn // 3 % 3}


def marked(cells: Sequence[Case | Called]) -> list[Any]:
    return [pytest.param(c, marks=pytest.mark.slow) if c in SLOW else c for c in cells]


@pytest.fixture(scope="module")
def wanted(plain: Served, request: pytest.FixtureRequest) -> dict[Case | Called, Answer]:
    skipped = set() if request.config.getoption("--slow") else SLOW
    return {cell: cell.ask(plain) for cell in (*CASES, *CALLED) if cell not in skipped}


@pytest.mark.parametrize("case", marked(CASES), ids=lambda case: "-".join(map(str, case)))
def test_forced_answers_are_the_plain_servers(
    wanted: dict[Case | Called, Answer], dspark_ragged: Served, case: Case
) -> None:
    got, plain = case.ask(dspark_ragged), wanted[case]
    assert json.loads(got.text) == FORCED[case.text]
    assert got.text == plain.text
    assert got.end == plain.end
    assert got.usage == plain.usage
    if case == Case("/v1/chat/completions", True, "emoji"):
        # Upstream sends no logprobs of a chunk that ends inside a character: one token a chunk
        # loses more of them than a window.
        assert len(got.logprobs) >= len(plain.logprobs)
        return
    theirs = chosen(plain.logprobs)
    assert [token for token, _ in chosen(got.logprobs)] == [token for token, _ in theirs]
    for (_, ours), (_, wanted_value) in zip(chosen(got.logprobs), theirs, strict=True):
        assert ours == pytest.approx(wanted_value, abs=1e-3)


@pytest.mark.parametrize("case", marked(CALLED), ids=lambda case: "-".join(map(str, case)))
def test_forced_calls_are_the_plain_servers(
    wanted: dict[Case | Called, Answer], dspark_ragged: Served, case: Called
) -> None:
    got, plain = case.ask(dspark_ragged), wanted[case]
    assert got.calls  # SGLang lets a named choice call another tool (docs/apis.md)
    for name, arguments in got.calls:
        found, allowed = json.loads(arguments), TOOLS[name]["properties"]
        assert set(found) == set(allowed)
        assert all(value in allowed[key]["enum"] for key, value in found.items())
    assert got.calls == plain.calls
    assert (got.text, got.reasoning) == (plain.text, plain.reasoning)
    assert (got.end, got.usage) == (plain.end, plain.usage)

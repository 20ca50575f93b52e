"""Seven APIs, streamed and not, 12 texts: a DSPARK server answers as a plain one.

The scripted target (`scripted_models.py`) says each text to the end of its prompt, and its drafter
is always right. A window of 48 tokens holds what a client's parser gets one token at a time
from a plain server: two tool calls, the end of one and text, `</think>` and an answer.
"""

from __future__ import annotations

import math
from itertools import product
from typing import Any, NamedTuple

import pytest

from tests.integration import scripted_models
from tests.integration.api_clients import APIS, Answer, Asked, model_name
from tests.integration.scripted_models import GAMMA, ScriptedPair, start_token
from tests.integration.serving import DSPARK_FLAGS, Served, ServerPool

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("api-matrix")]

TOOLS: dict[str, Any] = {
    "ping": {"type": "object", "properties": {}},
    "weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    },
}
PING = '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>'
WEATHER = (
    '<tool_call>\n{"name": "weather", "arguments": {"city": "a \\"b\\" }} {", "days": 3}}\n'
    "</tool_call>"
)
AFTER_END = " This is behind the end of an answer.</think><tool_call>"


class Script(NamedTuple):
    """A text that the target says, and how it is asked for it."""

    text: str
    tools: bool = False
    stop: tuple[str, ...] = ()
    limit: int = 256


SCRIPTS = {
    "text": Script("It ends here, in the middle of a window of tokens."),
    "two_calls": Script(f"{PING}\n{PING}", tools=True),
    "text_call": Script(f"One moment, please. {WEATHER}", tools=True),
    "call_text": Script(f"{PING}\nThat was all, 1 < 2.", tools=True),
    "think_answer": Script("<think>\nShort.\n</think>\n\nForty-two, I think."),
    "think_calls": Script(f"<think>\nI call both.\n</think>\n\n{WEATHER}\n{PING}", tools=True),
    "think_marker": Script(f"<think>\nThe tag {PING} is it.\n</think>\n\nYes.", tools=True),
    "think_cut": Script("<think>\nThis goes on for longer than the limit says", limit=9),
    "stop_middle": Script("One, two, three, four, five, six.", stop=("x.", " fo")),
    "stop_in_think": Script("<think>\nWait, stop here.\n</think>\n\nNo.", stop=("stop",)),
    "emoji": Script("Café 😀👩‍👧 ok 東京 👍🏽."),
    "emoji_cut": Script("Yes 😀👩‍👧.", limit=4),
}
PARSERS = ("--tool-call-parser", "hermes", "--reasoning-parser", "qwen3")


def asked_for(name: str) -> Asked:
    script = SCRIPTS[name]
    tools = TOOLS if script.tools else {}
    thinks = script.text.startswith("<think>")
    return Asked(f"Say {start_token(name)}", script.limit, list(script.stop), tools, thinks)


class Case(NamedTuple):
    """A cell of the matrix."""

    api: str
    stream: bool
    script: str

    def ask(self, server: Served) -> Answer:
        return APIS[self.api](server, asked_for(self.script), self.stream)

    def __str__(self) -> str:
        return f"{self.api} {'stream' if self.stream else 'whole'} {self.script}"


CASES = [Case(*cell) for cell in product(APIS, (False, True), SCRIPTS)]
# What SGLang 0.5.23 refuses in these APIs: path, fields beside model and prompt, status, message.
REFUSED: tuple[tuple[str, dict[str, Any], int, str], ...] = (
    (
        "/v1/responses",
        {"stream": True, "include": ["message.output_text.logprobs"], "top_logprobs": 1},
        400,
        "logprobs are not supported in streaming mode",
    ),
    ("/v1/responses", {"previous_response_id": "resp_1"}, 400, "--enable-response-store"),
    ("/v1/responses", {"background": True}, 400, "--enable-response-store"),
    (
        "/v1/messages",
        {
            "tools": [{"type": "web_search_20250305", "name": "web_search"}],
            "tool_choice": {"type": "any"},
        },
        400,
        "requires at least one custom tool",
    ),
    ("/v1/messages/batches", {}, 404, "Not Found"),
    ("/api/embed", {}, 404, "Not Found"),
    ("/api/pull", {}, 404, "Not Found"),
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> ScriptedPair:
    texts = {name: script.text for name, script in SCRIPTS.items()}
    return scripted_models.build(tmp_path_factory.mktemp("scripted"), texts, AFTER_END)


@pytest.fixture(scope="module")
def windowed(pool: ServerPool, pair: ScriptedPair) -> Served:
    """The scripted target, all drafts verified."""
    config = pool.folder / "scripted.yaml"
    config.write_text("schedule: {mode: static}\n")
    flags = (*DSPARK_FLAGS, str(pair.drafter), "--dspark-config", str(config))
    return pool.start("scripted-dspark", pair.target, *flags, *PARSERS)


@pytest.fixture(scope="module")
def wanted(pool: ServerPool, pair: ScriptedPair) -> dict[Case, Answer]:
    """Answers of the scripted target without speculation, asked for all at once.

    A machine with two cores runs one server at a time, and to change is slow.
    """
    plain = pool.start("scripted-plain", pair.target, *PARSERS)
    return {case: case.ask(plain) for case in CASES}


@pytest.fixture(scope="module")
def answers(windowed: Served) -> dict[Case, Answer]:
    """Answers of the server that drafts, in the same order, as usage counts cached tokens."""
    return {case: case.ask(windowed) for case in CASES}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_answers_are_the_plain_servers(
    wanted: dict[Case, Answer], answers: dict[Case, Answer], case: Case
) -> None:
    got, plain = answers[case], wanted[case]
    assert got.text == plain.text
    assert got.reasoning == plain.reasoning
    assert got.calls == plain.calls
    assert got.end == plain.end
    assert got.usage == plain.usage
    assert got.logprobs == plain.logprobs


def test_windows_hold_many_tokens(windowed: Served) -> None:
    for name in ("two_calls", "call_text", "think_calls", "emoji"):
        meta = windowed.generate(asked_for(name).prompt, 256)["meta_info"]
        steps = math.ceil((meta["completion_tokens"] - 1) / (GAMMA + 1))
        assert meta["spec_verify_ct"] == steps, name


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_refusals(windowed: Served, number: int) -> None:
    path, fields, status, message = REFUSED[number]
    prompt = asked_for("text").prompt
    body = {
        "model": model_name(windowed),
        "input": prompt,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": 8,
        "max_output_tokens": 8,
        **fields,
    }
    answer = windowed.request("POST", path, json=body)
    assert answer.status_code == status, answer.text[:300]
    assert message in answer.text


@pytest.mark.parametrize("fields", [{"format": "json"}, {"tools": [{"type": "function"}]}])
def test_ollama_ignores_these_fields(windowed: Served, fields: dict[str, Any]) -> None:
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": asked_for("two_calls").prompt}],
        "options": {"temperature": 0},
        "stream": False,
        **fields,
    }
    answer = windowed.request("POST", "/api/chat", json=body)
    assert answer.status_code == 200, answer.text[:300]
    assert answer.json()["message"]["content"] == SCRIPTS["two_calls"].text

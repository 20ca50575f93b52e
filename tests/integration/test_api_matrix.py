"""Six APIs, streamed and not, 12 texts: a DSPARK server answers as a plain one.

The scripted target (`scripted_models.py`) says each text to the end of its prompt, and its drafter
is always right. A window of 16 tokens holds what a client's parser gets one token at a time
from a plain server: two tool calls, the end of one and text, `</think>` and an answer.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest

from tests.integration import scripted_models
from tests.integration.api_clients import APIS, Answer, Asked
from tests.integration.scripted_models import GAMMA, ScriptedPair, start_token
from tests.integration.serving import DSPARK_FLAGS, Served, ServerPool

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("api-matrix")]

NO_TOOLS: dict[str, Any] = {}
TOOLS = {
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
    "stop_middle": Script("One, two, three, four, five, six.", stop=(" fo", "x.")),
    "stop_in_think": Script("<think>\nWait, stop here.\n</think>\n\nNo.", stop=("stop",)),
    "emoji": Script("Café 😀👩‍👧 ok 東京 👍🏽."),
    "emoji_cut": Script("Yes 😀👩‍👧.", limit=4),
}
WINDOWED = 6  # tokens a step, at least: windows hold what the scripts' names say


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> ScriptedPair:
    texts = {name: script.text for name, script in SCRIPTS.items()}
    return scripted_models.build(tmp_path_factory.mktemp("scripted"), texts, AFTER_END)


PARSERS = ("--tool-call-parser", "hermes", "--reasoning-parser", "qwen3")


@pytest.fixture(scope="module")
def one_by_one(pool: ServerPool, pair: ScriptedPair) -> Served:
    """The scripted target without speculation."""
    return pool.start("scripted-plain", pair.target, *PARSERS)


@pytest.fixture(scope="module")
def windowed(pool: ServerPool, pair: ScriptedPair) -> Served:
    """The scripted target, all drafts verified."""
    config = pool.folder / "scripted.yaml"
    config.write_text("schedule: {mode: static}\n")
    flags = (*DSPARK_FLAGS, str(pair.drafter), "--dspark-config", str(config))
    return pool.start("scripted-dspark", pair.target, *flags, *PARSERS)


def asked_for(name: str) -> Asked:
    script = SCRIPTS[name]
    tools = TOOLS if script.tools else NO_TOOLS
    return Asked(f"Say {start_token(name)}", script.limit, list(script.stop), tools)


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("api", APIS)
def test_answers_are_the_plain_servers(
    one_by_one: Served, windowed: Served, api: str, stream: bool, name: str
) -> None:
    wanted = APIS[api](one_by_one, asked_for(name), stream)
    got = APIS[api](windowed, asked_for(name), stream)
    assert got.text == wanted.text
    assert got.reasoning == wanted.reasoning
    assert got.calls == wanted.calls
    assert got.end == wanted.end
    assert got.usage == wanted.usage
    assert got.logprobs == wanted.logprobs

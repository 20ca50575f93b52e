"""Tool calls and reasoning in verify windows: each of SGLang's parsers, every sequence of windows.

Calls, reasoning and text are those of plain decoding, which sends one token a chunk.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.function_call.function_call_parser import FunctionCallParser
from sglang.srt.function_call.iquest_q1_detector import IQuestQ1Detector
from sglang.srt.function_call.json_array_parser import JsonArrayParser
from sglang.srt.parser.reasoning_parser import ReasoningParser

from sglang_dspark.patches.upstream_fixes.stream_pieces import pieces
from tests.patches.parser_windows import (
    Stream,
    all_windows,
    reasoning_parser,
    token_by_token,
    tokens,
    tool_parser,
)
from tests.patches.tool_call_texts import ONE_CALL, REASONING, THOUGHT, TWO_CALLS

Call = tuple[str, dict[str, Any]]
WEATHER: Call = ("weather", {"city": "Paris x", "days": 3})
PING: Call = ("ping", {})
SAO: Call = ("weather", {"city": "São Paulo", "days": 3})
ADD: Call = ("add", {"a": [1, {"b": "x }}"}]})
BEHIND = "\nDone."
# Parsers that lose the text behind a call, in plain decoding too.
LOST_BOTH = {"deepseekv32", "deepseekv4", "deepseekv41", "gigachat35", "interns1", "kimi_k3"}
LOST_BOTH |= {"mimo", "qwen25", "trinity"}
LOST_STREAMED = {*LOST_BOTH, "minicpm5", "minimax-m2"}
LOST_UNSTREAMED = {*LOST_BOTH, "cohere_command4", "deepseekv3", "deepseekv31", "dots", "gemma4"}
LOST_UNSTREAMED |= {"glm45", "hermes", "hunyuan", "kimi_k2", "lfm2", "ling3", "poolside_v1"}
LOST_UNSTREAMED |= {"qwen3_coder"}


def call(named: Call, key: str = "arguments") -> str:
    return json.dumps({"name": named[0], key: named[1]}, ensure_ascii=False)


def tagged(named: Call) -> str:
    return f"<tool_call>\n{call(named)}\n</tool_call>"


AS_TEXT = "minimax-append-think"
PYTHON = "<|python_tag|>"
# Parser, text, the calls in it, the text beside them.
FORMS: dict[str, tuple[str, str, list[Call], str]] = {
    "llama3 bare": ("llama3", call(PING, "parameters"), [PING], ""),
    "llama3 text": ("llama3", f"Sure. {PYTHON}{call(SAO, 'parameters')}", [SAO], "Sure."),
    "llama3 two": (
        "llama3",
        f"{PYTHON}{call(PING, 'parameters')};{call(ADD, 'parameters')}",
        [PING, ADD],
        "",
    ),
    "mistral": ("mistral", f"Hello! [TOOL_CALLS] [{call(ADD)}]", [ADD], "Hello!"),
    "hermes": ("hermes", f"Hi {tagged(SAO)}\n{tagged(ADD)}", [SAO, ADD], "Hi"),
    "hermes none": ("hermes", "No tool here, 1 < 2.", [], "No tool here, 1 < 2."),
    "qwen25": ("qwen25", f"Hi {tagged(SAO)}\n{tagged(ADD)}", [SAO, ADD], "Hi"),
}
# Reasoning and tool-call parser of a model, and what its format has between the two.
MODELS: dict[tuple[str, str], str] = {
    ("qwen3", "hermes"): "\n\n",
    ("qwen3", "qwen25"): "\n\n",
    ("qwen3", "qwen3_coder"): "\n\n",
    ("deepseek-v3", "deepseekv31"): "",
    ("deepseek-v4", "deepseekv4"): "\n\n",
    ("glm45", "glm47"): "\n",
    ("kimi_k2", "kimi_k2"): "",
    ("minimax-m3", "minimax-m3"): "\n",
    ("nemotron_3", "qwen3_coder"): "\n",
    ("granite_thinking_parser", "hermes"): "\n",
    ("mimo", "mimo"): "\n",
    ("deepseek-r1", "step3"): "\n",
    ("iquest_q1", "iquest_q1"): "\n",
    ("gemma4", "gemma4"): "",
    ("mistral", "mistral"): "",
}


def tool_stream(parser: str) -> Stream:
    return Stream(tools=tool_parser(parser))


def in_windows(stream: Stream, text: str) -> tuple[str, list[Call], str]:
    """Return the one answer that all sequences of windows give."""
    answers: list[Any] = []
    for ended in all_windows(stream, text, pieces):
        if (answer := ended.answer()) not in answers:
            answers.append(answer)
    assert len(answers) == 1, answers
    return answers[0]


def words(text: str) -> str:
    return " ".join(text.split())


def test_tokens_are_a_models() -> None:
    text = '<tool_call>\n{"name": "ping"}}\n</tool_call><｜DSML｜invoke>'
    found = tokens(text)
    assert {"<tool_call>", '{"', '"}}\n', "</tool_call>", "｜DSML｜"} <= set(found)


@pytest.mark.parametrize("parser", [*TWO_CALLS, *ONE_CALL])
def test_calls_and_text_are_those_of_plain_decoding(parser: str) -> None:
    """The last window may hold all: both calls, or a call's end and the text behind it."""
    text = TWO_CALLS.get(parser) or ONE_CALL[parser]
    wanted = [WEATHER, PING] if parser in TWO_CALLS else [WEATHER]
    behind = "" if parser == "gigachat3" else BEHIND
    plain = token_by_token(tool_stream(parser), text + behind).answer()
    got = in_windows(tool_stream(parser), text + behind)
    assert got == plain
    assert got[1] == wanted
    before = "Hi " if "Hi" in text else ""
    after = "" if parser in LOST_STREAMED else behind
    assert words(got[2]) == words(before + after)


@pytest.mark.parametrize("case", FORMS)
def test_other_forms_of_a_format(case: str) -> None:
    parser, text, calls, normal = FORMS[case]
    _, found, given = in_windows(tool_stream(parser), text)
    assert (found, words(given)) == (calls, normal)
    by_character = tool_stream(parser)
    for character in text:
        by_character.feed(character)
    by_character.end()
    assert by_character.answer()[1] == calls


def test_the_page_lists_what_parsers_lose() -> None:
    lost = set()
    for parser, text in (TWO_CALLS | ONE_CALL).items():
        normal, found = tool_parser(parser).parse_non_stream(text + BEHIND)
        if found and "Done" not in normal:
            lost.add(parser)
    assert lost == LOST_UNSTREAMED
    page = (Path(__file__).parents[2] / "docs" / "apis.md").read_text()
    rows = {row.split("|")[1].split(":")[0].strip(): row for row in page.splitlines() if "|" in row}
    for title, parsers in (
        ("unstreamed, text behind a call is lost", LOST_UNSTREAMED),
        ("streamed, text behind a call is lost", LOST_STREAMED),
    ):
        assert {name for name in tool_names() if f"`{name}`" in rows[title]} == parsers


def tool_names() -> list[str]:
    return list(FunctionCallParser.ToolCallParserEnum)


@pytest.mark.parametrize("parser", REASONING)
def test_reasoning_is_that_of_plain_decoding(parser: str) -> None:
    text = REASONING[parser]
    got = in_windows(Stream(reasoning_parser(parser)), text)
    assert got == token_by_token(Stream(reasoning_parser(parser)), text).answer()
    assert (got[0], got[2].strip()) == (THOUGHT, "Yes.")


def test_one_parser_sends_reasoning_as_text() -> None:
    got = in_windows(Stream(reasoning_parser(AS_TEXT)), f"{THOUGHT}</think>Yes.")
    assert got == ("", [], f"<think>{THOUGHT}</think>Yes.")


def test_a_call_in_reasoning_ends_it_as_in_plain_decoding() -> None:
    text = "<think>\nA tag <tool_call>x</tool_call> here.\n</think>\n\nYes."
    for parser in ("qwen3", "glm45", "deepseek-v3", "nemotron_3", "interns1"):
        plain = token_by_token(Stream(reasoning_parser(parser)), text).answer()
        assert in_windows(Stream(reasoning_parser(parser)), text) == plain
        assert "</tool_call> here." in plain[2]


@pytest.mark.parametrize("parsers", MODELS, ids="+".join)
def test_reasoning_then_two_calls_in_a_window(parsers: tuple[str, str]) -> None:
    thinks, calls = parsers
    text = REASONING[thinks].partition("Yes.")[0].rstrip() + MODELS[parsers]
    text += TWO_CALLS[calls].removeprefix("Hi ")
    stream = Stream(reasoning_parser(thinks, calling=True), tool_parser(calls))
    thoughts, found, normal = in_windows(stream, text)
    assert (thoughts, found, normal.strip()) == (THOUGHT, [WEATHER, PING], "")


def test_all_parsers_are_tested() -> None:
    known = FunctionCallParser.ToolCallParserEnum
    assert {known[name] for name in (*TWO_CALLS, *ONE_CALL)} == set(known.values())
    reasoning = ReasoningParser.DetectorMap
    assert {reasoning[name] for name in (*REASONING, AS_TEXT)} == set(reasoning.values())


@pytest.mark.parametrize("calls", [[SAO, PING], [SAO]], ids=["required", "named"])
def test_forced_calls_are_an_array(calls: list[Call]) -> None:
    """`tool_choice` of `required` or a function: a grammar forces a JSON array."""
    array = [{"name": name, "parameters": arguments} for name, arguments in calls]
    text = json.dumps(array, indent=2, ensure_ascii=False)
    for parser in (JsonArrayParser(), IQuestQ1Detector().get_required_tool_parser("required")):
        assert in_windows(Stream(tools=parser), text) == ("", calls, "")

"""Streamed tool calls: the same calls and text however the answer is cut into chunks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise
from typing import Any

import pytest
from sglang.srt.entrypoints.openai.protocol import Function, Tool
from sglang.srt.function_call.core_types import StreamingParseResult
from sglang.srt.function_call.function_call_parser import FunctionCallParser

from sglang_dspark.patches.upstream_fixes import tool_call_pieces
from sglang_dspark.patches.upstream_fixes.tool_call_pieces import pieces
from tests.patches.hooked import put_in

TOOLS = [Tool(type="function", function=Function(name=name)) for name in ("ping", "weather", "add")]
Call = tuple[str, dict[str, Any]]
PING: Call = ("ping", {})
WEATHER: Call = ("weather", {"city": "São Paulo", "days": 3})
ADD: Call = ("add", {"a": [1, {"b": "x }}"}]})


def call(named: Call, field: str = "arguments") -> str:
    return json.dumps({"name": named[0], field: named[1]}, ensure_ascii=False)


def tagged(named: Call) -> str:
    return f"<tool_call>\n{call(named)}\n</tool_call>"


PYTHON = "<|python_tag|>"
# Parser, text, the calls in it, the normal text without spaces at its ends.
CASES: dict[str, tuple[str, str, list[Any], str]] = {
    "llama3 bare": ("llama3", call(PING, "parameters"), [PING], ""),
    "llama3 tag": ("llama3", PYTHON + call(WEATHER, "parameters"), [WEATHER], ""),
    "llama3 text": ("llama3", f"Sure. {PYTHON}{call(PING, 'parameters')}", [PING], "Sure."),
    "llama3 two": (
        "llama3",
        f"{PYTHON}{call(PING, 'parameters')};{call(ADD, 'parameters')}",
        [PING, ADD],
        "",
    ),
    "mistral": ("mistral", f"[TOOL_CALLS] [{call(PING)}]", [PING], ""),
    "mistral text": ("mistral", f"Hello! [TOOL_CALLS] [{call(ADD)}]", [ADD], "Hello!"),
    "hermes": ("hermes", tagged(WEATHER), [WEATHER], ""),
    "hermes two": ("hermes", f"Hi {tagged(PING)}\n{tagged(ADD)}", [PING, ADD], "Hi"),
    "hermes none": ("hermes", "No tool here, 1 < 2.", [], "No tool here, 1 < 2."),
    "qwen25": ("qwen25", tagged(WEATHER), [WEATHER], ""),
    "qwen25 two": ("qwen25", f"Hi {tagged(PING)}\n{tagged(ADD)}", [PING, ADD], "Hi"),
}


def cuttings(tokens: Sequence[str]) -> Iterator[list[str]]:
    """Chunks of 1, 2, 3 ... tokens, every way to cut the text in two, and many in three."""
    count = len(tokens)
    for size in range(1, count + 1):
        yield ["".join(tokens[at : at + size]) for at in range(0, count, size)]
    some = range(1, count, 1 + count // 16)
    for cuts in [*combinations(range(1, count), 1), *combinations(some, 2)]:
        edges = [0, *cuts, count]
        yield ["".join(tokens[a:b]) for a, b in pairwise(edges)]


def parsed(parser: str, chunks: Sequence[str]) -> tuple[list[Any], str]:
    """Names and arguments, and the normal text, as a client puts them together."""
    calls: dict[int, list[str]] = {}
    text = ""
    server = FunctionCallParser(TOOLS, parser)
    for chunk in [*chunks, None]:
        normal, found = (
            server.parse_stream_end() if chunk is None else server.parse_stream_chunk(chunk)
        )
        text += normal
        for each in found:
            name, arguments = calls.get(each.tool_index, ["", ""])
            calls[each.tool_index] = [name + (each.name or ""), arguments + each.parameters]
    return [(name, json.loads(given or "null")) for name, given in calls.values()], text.strip()


@pytest.mark.parametrize("case", CASES)
def test_calls_do_not_depend_on_the_chunks(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    put_in(monkeypatch, tool_call_pieces.SEAMS)
    parser, text, calls, normal = CASES[case]
    for chunks in [list(text), *cuttings(pieces(text))]:
        assert parsed(parser, chunks) == (calls, normal), chunks


def test_pieces_keep_markers_and_lose_nothing() -> None:
    text = 'São 1 <|python_tag|> [TOOL_CALLS]\n</tool_call>{"a_b": "<"}'
    found = pieces(text)
    assert "".join(found) == text
    assert {"<|python_tag|>", "[TOOL_CALLS]", "</tool_call>", "São", "a_b", "<"} <= set(found)
    assert pieces("") == [""]


def test_other_parsers_get_whole_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    put_in(monkeypatch, tool_call_pieces.SEAMS)
    parser = FunctionCallParser(TOOLS, "pythonic")
    seen: list[str] = []

    def note(text: str, tools: Any) -> StreamingParseResult:
        seen.append(text)
        return StreamingParseResult()

    monkeypatch.setattr(parser.detector, "parse_streaming_increment", note)
    parser.parse_stream_chunk("[ping()]")
    assert seen == ["[ping()]"]

"""Streamed tool calls and reasoning: the same however the answer is cut into chunks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from itertools import chain, combinations, pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt import runtime_context
from sglang.srt.entrypoints.openai.protocol import Function, Tool
from sglang.srt.function_call.function_call_parser import FunctionCallParser
from sglang.srt.parser.reasoning_parser import ReasoningParser

from sglang_dspark.patches.upstream_fixes import stream_pieces
from sglang_dspark.patches.upstream_fixes.stream_pieces import chat_content, pieces
from tests.patches.tool_call_texts import ONE_CALL, TWO_CALLS

NO_FIELDS: dict[str, Any] = {"type": "object", "properties": {}}
FIELDS = NO_FIELDS | {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = [
    Tool(type="function", function=Function(name=name, parameters=fields))
    for name, fields in (("ping", NO_FIELDS), ("weather", FIELDS), ("add", NO_FIELDS))
]
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
    for chunk in [*chain.from_iterable(map(pieces, chunks)), None]:
        normal, found = (
            server.parse_stream_end() if chunk is None else server.parse_stream_chunk(chunk)
        )
        text += normal
        for each in found:
            name, arguments = calls.get(each.tool_index, ["", ""])
            calls[each.tool_index] = [name + (each.name or ""), arguments + each.parameters]
    return [(name, json.loads(given or "{}")) for name, given in calls.values()], text.strip()


@pytest.mark.parametrize("case", CASES)
def test_calls_do_not_depend_on_the_chunks(case: str) -> None:
    parser, text, calls, normal = CASES[case]
    for chunks in [list(text), *cuttings(pieces(text))]:
        assert parsed(parser, chunks) == (calls, normal), chunks


@pytest.mark.parametrize("parser", [*TWO_CALLS, *ONE_CALL])
def test_every_parser_gets_all_calls_of_a_window(parser: str) -> None:
    """Upstream's own are wrong for larger chunks in 13 of these 30 formats."""
    text = TWO_CALLS.get(parser) or ONE_CALL[parser]
    calls = [("weather", {"city": "Paris x", "days": 3}), ("ping", {})]
    calls = calls[: 2 if parser in TWO_CALLS else 1]
    normal = "Hi" if "Hi" in text else ""
    for chunks in cuttings(pieces(text)):
        assert parsed(parser, chunks) == (calls, normal), chunks


_CALLING = "<think>\nA tag <tool_call>x</tool_call> here.\n</think>\n\nYes."
REASONING = dict.fromkeys(("qwen3", "glm45", "deepseek-v3", "nemotron_3", "interns1"), _CALLING) | {
    "cohere_command4": "<|START_THINKING|>So.<|END_THINKING|><|START_TEXT|>Yes.<|END_TEXT|>",
}


@pytest.mark.parametrize("parser", REASONING)
def test_reasoning_does_not_depend_on_the_chunks(parser: str) -> None:
    text = REASONING[parser]

    def thought(chunks: Sequence[str]) -> tuple[str, str]:
        server = ReasoningParser(parser, True, True)
        found = [server.parse_stream_chunk(piece) for chunk in chunks for piece in pieces(chunk)]
        found.append(server.parse_stream_end())
        return "".join(a or "" for a, _ in found), "".join(b or "" for _, b in found)

    tokens = pieces(text)
    one_by_one = thought(tokens)
    for chunks in cuttings(tokens):
        assert thought(chunks) == one_by_one, chunks


def test_pieces_keep_markers_and_lose_nothing() -> None:
    text = 'São 1 <|python_tag|> [TOOL_CALLS]\n</tool_call>{"a_b": "<"}'
    found = pieces(text)
    assert "".join(found) == text
    assert {"<|python_tag|>", "[TOOL_CALLS]", "</tool_call>", "São", "a_b", "<"} <= set(found)
    assert pieces("") == [""]
    assert pieces(" words, and more.") == [" words, and more."]


class Handler(SimpleNamespace):
    """The part of upstream's handlers that the hooks call."""

    reasoning_parser = "qwen3"
    encoding: Any = None

    def _tool_call_parsing_active(self, request: Any) -> bool:
        return False

    def _encoding_output(self) -> Any:
        return self.encoding


REQUEST = SimpleNamespace(
    separate_reasoning=True,
    tools=(),
    _response_parser_grammar_start=None,
    _response_parser_tool_grammar=False,
)
TEXT = "old\n<a>b"
NEW = ["\n", "<a>", "b"]


@pytest.fixture(params=[False, True], ids=["all text", "new text"])
def incremental(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Set if a chunk of upstream's has only the new text, which is a server argument."""
    serving = SimpleNamespace(incremental_streaming_output=request.param)
    monkeypatch.setattr(runtime_context, "get_serving", lambda: serving)
    return bool(request.param)


def collected(stream: AsyncIterator[Any]) -> list[Any]:
    async def collect() -> list[Any]:
        return [each async for each in stream]

    return asyncio.run(collect())


def chat_calls(handler: Any, text: str) -> list[dict[str, Any]]:
    """Return the arguments with which the hook calls upstream's function for a last chunk."""

    async def original(self: Any, **named: Any) -> AsyncIterator[dict[str, Any]]:
        yield named

    named = {
        "content": {"text": text, "meta_info": {}},
        "request": REQUEST,
        "index": 0,
        "stream_offsets": {0: 3},
        "choice_logprobs": {"content": [1]},
        "finish_reason_type": "stop",
    }
    return collected(chat_content(original, handler, **named))


def test_chat_gets_a_chunk_in_pieces(incremental: bool) -> None:
    got = chat_calls(Handler(), TEXT[3:] if incremental else TEXT)
    texts = NEW if incremental else ["old\n", "old\n<a>", TEXT]
    assert [each["content"]["text"] for each in got] == texts
    assert [each["choice_logprobs"] for each in got] == [{"content": [1]}, None, None]
    assert [each["finish_reason_type"] for each in got] == [None, None, "stop"]


@pytest.mark.parametrize("handler", [Handler(reasoning_parser=None), Handler(encoding=object())])
def test_chat_gets_whole_chunks_where_no_text_is_parsed(handler: Any, incremental: bool) -> None:
    assert [each["content"]["text"] for each in chat_calls(handler, TEXT)] == [TEXT]


def test_responses_get_a_chunk_in_pieces(incremental: bool) -> None:
    async def original(
        self: Any, request: Any, sampling: Any, generator: Any, *given: Any, **named: Any
    ) -> AsyncIterator[Any]:
        async for chunk in generator:
            yield chunk["text"], chunk["meta_info"]["finish_reason"]

    async def generator() -> AsyncIterator[Any]:
        yield {"text": "old", "meta_info": {"finish_reason": None}}
        text = TEXT[3:] if incremental else TEXT
        last = {"text": text, "meta_info": {"finish_reason": "stop"}}
        yield SimpleNamespace(last_output=last)
        yield SimpleNamespace(last_output=None)

    hooked = stream_pieces.response_events(original, Handler(), REQUEST, {}, generator(), "name")
    texts = NEW if incremental else ["old\n", "old\n<a>", TEXT]
    ends = [None, None, "stop"]
    assert collected(hooked) == [("old", None), *zip(texts, ends, strict=True)]

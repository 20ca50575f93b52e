"""Chunks of a stream in pieces, and the hooks that hand them to SGLang's handlers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt import runtime_context

from sglang_dspark.patches.upstream_fixes import stream_pieces
from sglang_dspark.patches.upstream_fixes.stream_pieces import chat_content, pieces


def test_pieces_keep_markers_and_lose_nothing() -> None:
    text = 'São 1 <|python_tag|> [TOOL_CALLS]\n</tool_call>{"a_b": "<"}}\n'
    found = pieces(text)
    assert "".join(found) == text
    assert {"<|python_tag|>", "[TOOL_CALLS]", "</tool_call>", "São", "a_b", "<"} <= set(found)
    assert found[-2:] == ["}", "}\n"]
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

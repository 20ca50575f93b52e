"""The stop reason of /v1/messages: the request's stop sequence where one ended the answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.entrypoints.anthropic import serving as upstreams
from sglang.srt.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from sglang.srt.entrypoints.openai.protocol import ChatCompletionResponse

from sglang_dspark.patches.upstream_fixes import answer_stops
from tests.patches.hooked import put_in

USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


class Chat:
    """A chat handler that answers "Hi" and ends for the given reason."""

    supports_inline_system = True
    tokenizer_manager = SimpleNamespace(create_abort_task=lambda _: None)

    def __init__(self, reason: str, matched: str | int | None):
        self.end = {"finish_reason": reason, "matched_stop": matched}

    def _validate_request(self, request: Any) -> None:
        return None

    def _convert_to_internal_request(self, request: Any, _: Any) -> tuple[Any, Any]:
        return SimpleNamespace(), request

    async def _handle_non_streaming_request(self, *_: Any) -> ChatCompletionResponse:
        message = {"role": "assistant", "content": "Hi"}
        choice = {"index": 0, "message": message, **self.end}
        given = {"id": "1", "model": "demo", "choices": [choice], "usage": USAGE}
        return ChatCompletionResponse.model_validate(given)

    async def _generate_chat_stream(self, *_: Any) -> AsyncIterator[str]:
        for content, end in (("Hi", {}), ("", self.end)):
            choice = {"index": 0, "delta": {"role": "assistant", "content": content}, **end}
            chunk = {"id": "1", "created": 1, "model": "demo", "choices": [choice]}
            yield f"data: {json.dumps(chunk)}\n\n"
        yield "data: [DONE]\n\n"


def ending(chat: Chat, *, stream: bool, stops: list[str] | None) -> tuple[Any, Any]:
    """Stop reason and stop sequence of an answer."""

    async def ask() -> dict[str, Any]:
        request = AnthropicMessagesRequest(
            model="demo",
            max_tokens=9,
            messages=[{"role": "user", "content": "x"}],  # type: ignore[list-item]
            stop_sequences=stops,
            stream=stream,
        )
        serving = upstreams.AnthropicServing(chat)  # type: ignore[arg-type]
        answer: Any = await serving.handle_messages(request, None)  # type: ignore[arg-type]
        if not stream:
            return dict(json.loads(answer.body))
        frames = [frame async for frame in answer.body_iterator]
        assert [frame.split("\n")[0] for frame in frames][-1] == "event: message_stop"
        (delta,) = [frame for frame in frames if frame.startswith("event: message_delta\n")]
        return dict(json.loads(delta.split("data: ")[1])["delta"])

    found = asyncio.run(ask())
    return found.get("stop_reason"), found.get("stop_sequence")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("reason", "matched", "stops", "wanted"),
    [
        ("stop", "\n", ["x", "\n"], ("stop_sequence", "\n")),
        ("stop", 2, ["\n"], ("end_turn", None)),
        ("stop", "<|im_end|>", ["\n"], ("end_turn", None)),
        ("stop", None, None, ("end_turn", None)),
        ("length", None, ["\n"], ("max_tokens", None)),
        ("tool_calls", "\n", ["\n"], ("tool_use", None)),
    ],
)
def test_the_stop_sequence_is_reported(
    monkeypatch: pytest.MonkeyPatch,
    stream: bool,
    reason: str,
    matched: str | int | None,
    stops: list[str] | None,
    wanted: tuple[str, str | None],
) -> None:
    put_in(monkeypatch, answer_stops.SEAMS[:1])
    assert ending(Chat(reason, matched), stream=stream, stops=stops) == wanted

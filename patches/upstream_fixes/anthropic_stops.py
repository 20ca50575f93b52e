"""Report in `/v1/messages` which of the request's stop sequences ended the answer.

Upstream (sglang/srt/entrypoints/anthropic/serving.py) maps the finish reason "stop" to
"end_turn" and drops `matched_stop`, in which the chat handler names the stop.
"""

from __future__ import annotations

import copy
import json
from collections.abc import AsyncIterator
from typing import Any

from sglang_dspark.patches.seam import Seam, Upstream

DELTA = "event: message_delta\n"


class AnthropicServing(Upstream):
    """Upstream's handler of `/v1/messages`, with the stop reason `stop_sequence`."""

    async def _handle_non_streaming(
        self, chat_request: Any, anthropic_request: Any, raw_request: Any
    ) -> Any:
        stops = anthropic_request.stop_sequences or ()

        def convert(response: Any) -> Any:
            result = self._convert_response(response)
            matched = response.choices[0].matched_stop if response.choices else None
            if result.stop_reason == "end_turn" and matched in stops:
                result.stop_reason, result.stop_sequence = "stop_sequence", matched
            return result

        watched = copy.copy(self)
        watched._convert_response = convert
        return await super(AnthropicServing, watched)._handle_non_streaming(
            chat_request, anthropic_request, raw_request
        )

    async def _generate_anthropic_stream(
        self, adapted_request: Any, processed_request: Any, anthropic_request: Any, raw_request: Any
    ) -> AsyncIterator[str]:
        stops = anthropic_request.stop_sequences or ()
        watched = copy.copy(self)
        watched.openai_serving_chat = chat = _WatchedChat(self.openai_serving_chat)
        async for frame in super(AnthropicServing, watched)._generate_anthropic_stream(
            adapted_request, processed_request, anthropic_request, raw_request
        ):
            if frame.startswith(DELTA) and chat.matched in stops:
                yield _with_stop(frame, chat.matched)
            else:
                yield frame


class _WatchedChat:
    """Wrap the chat handler: its stream puts its last `matched_stop` into `matched`."""

    def __init__(self, chat: Any):
        self._chat = chat
        self.matched: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._chat, name)

    async def _generate_chat_stream(self, *given: Any) -> AsyncIterator[str]:
        async for line in self._chat._generate_chat_stream(*given):
            if '"matched_stop":' in line:  # few lines are parsed twice
                for choice in json.loads(line.removeprefix("data: ")).get("choices") or ():
                    self.matched = choice.get("matched_stop") or self.matched
            yield line


def _with_stop(frame: str, matched: str) -> str:
    head, _, data = frame.partition("data: ")
    event = json.loads(data)
    if event["delta"].get("stop_reason") == "end_turn":
        event["delta"] |= {"stop_reason": "stop_sequence", "stop_sequence": matched}
    return f"{head}data: {json.dumps(event)}\n\n"


SEAMS = (
    Seam(
        name="anthropic-stop",
        target="sglang.srt.entrypoints.anthropic.serving.AnthropicServing",
        kind="subclass",
        hook=AnthropicServing,
        why="upstream reports end_turn for an answer that one of its stop_sequences ended",
        issue="sgl-project/sglang#33153",
        drop_when="upstream's /v1/messages reports stop_sequence and the sequence that matched",
    ),
)

"""Server-sent events into timed chunks of tokens, for the three streamed interfaces.

Time is passed in, never taken here, so that the asynchronous client, the locust user and the tests
read streams alike. An OpenAI chunk's tokens are counted by the running usage, `/generate` sends the
whole answer so far in every event.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from sglang_dspark.loadtest.client.bodies import Api
from sglang_dspark.loadtest.client.metrics import Chunk, SpecStats

OnChunk = Callable[[Chunk], None]


class SseDecoder:
    """Bytes in, the data of whole events out, wherever the bytes were cut."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[str] = []

    def feed(self, piece: bytes) -> list[str]:
        """Data of the events that `piece` completes; several `data:` lines join by newline."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        done: list[str] = []
        for raw in lines:
            line = raw.removesuffix(b"\r").decode(errors="replace")
            if not line and self._data:
                done.append("\n".join(self._data))
                self._data = []
            elif line.startswith("data:"):
                self._data.append(line[len("data:") :].removeprefix(" "))
        return done


class Answer:
    """What has come of one streamed answer so far."""

    def __init__(self, on_chunk: OnChunk | None = None) -> None:
        self.chunks: list[Chunk] = []
        self.tokens = 0
        self.prompt_tokens = 0
        self.finish_reason = ""
        self.spec: SpecStats | None = None
        self.meta: dict[str, Any] = {}
        self._on_chunk = on_chunk
        self._text_length = 0
        self._counted: dict[int, int] = {}  # tokens so far of each of several answers (`n`)

    def add(self, api: Api, event: Mapping[str, Any], at: float) -> None:
        """Take in one event. at: seconds since the request was sent."""
        if api == "generate":
            self.native(event, at)
        else:
            self.openai(event, at)

    def openai(self, event: Mapping[str, Any], at: float) -> None:
        """An event of the completions or chat interface."""
        details = (event.get("sglext") or {}).get("spec_tokens_details")
        if details is not None:
            several = details if isinstance(details, list) else [details]  # of `n` answers
            self.spec = SpecStats.total(SpecStats.from_details(each) for each in several)
        usage = event.get("usage") or {}
        self.prompt_tokens = usage.get("prompt_tokens") or self.prompt_tokens
        for choice in event.get("choices", ()):
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
            ids = tuple(choice.get("token_ids") or ())
            total = usage.get("completion_tokens")
            index = choice.get("index", 0)
            new = len(ids) if total is None else total - self._counted.get(index, 0)
            self._counted[index] = self._counted.get(index, 0) + new
            if new > 0 or text:
                self._append(at, text, new, ids)

    def native(self, event: Mapping[str, Any], at: float) -> None:
        """An event of `/generate`."""
        meta = event["meta_info"]
        self.meta = dict(meta)
        self.prompt_tokens = meta.get("prompt_tokens", 0)
        self.finish_reason = (meta.get("finish_reason") or {}).get("type", "")
        self.spec = SpecStats.from_details(meta) if "spec_verify_ct" in meta else None
        ids = event["output_ids"][self.tokens :]
        text = event["text"][self._text_length :]
        self._text_length += len(text)
        if ids or text:
            self._append(at, text, len(ids), tuple(ids))

    def _append(self, at: float, text: str, tokens: int, ids: tuple[int, ...]) -> None:
        self.tokens += tokens
        chunk = Chunk(at, text, tokens, ids)
        self.chunks.append(chunk)
        if self._on_chunk is not None:
            self._on_chunk(chunk)


def refusal(text: str) -> str:
    """The reason in a server's error body, on one line of at most 300 characters."""
    try:
        body = json.loads(text)
        error = body.get("error", body)
        reason = error.get("message", text) if isinstance(error, dict) else str(error)
    except (ValueError, AttributeError):
        reason = text
    return " ".join(str(reason).split())[:300]

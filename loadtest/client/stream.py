"""Parse server-sent events into timed chunks of tokens, for the three streamed interfaces.

The caller passes the time in, so that the asynchronous client, the locust user and the tests read
streams alike. An OpenAI chunk's tokens are counted by the running usage; `/generate` sends the
whole answer so far in every event. If the usage is sent only at the end, as OpenAI does, its tokens
are spread over the chunks with text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sglang_dspark.errors import DSparkError
from sglang_dspark.loadtest.client.bodies import Api
from sglang_dspark.loadtest.client.metrics import Chunk, SpecStats
from sglang_dspark.loadtest.client.records import Outcome

OnChunk = Callable[[Chunk], None]
END = "[DONE]"
# A text loops if its last half repeats one piece: least repeats, shortest tail, checked length.
_LEAST_TIMES, _LEAST_TAIL, _MOST_TAIL = 4, 8, 1024
_TEXTS = ("content", "reasoning_content", "reasoning")  # of a chat delta


class ReportedError(DSparkError):
    """An error that the server reports within its stream; the text is the server's reason."""


class MalformedEventError(DSparkError):
    """An event that is not JSON or lacks a field of its interface."""


@dataclass(frozen=True)
class SseEvent:
    """One server-sent event. name: of its `event:` line, "" without one."""

    name: str
    data: str


class SseDecoder:
    """Decoder of bytes, cut anywhere, into whole events."""

    def __init__(self) -> None:
        self._rest = b""
        self._name = ""
        self._data: list[str] = []

    def feed(self, piece: bytes) -> list[SseEvent]:
        """Return the events that `piece` completes; several `data:` lines join by newline."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        done: list[SseEvent] = []
        for raw in lines:
            line = raw.removesuffix(b"\r").decode(errors="replace")
            if line.startswith("data:"):
                self._data.append(line[len("data:") :].removeprefix(" "))
                if self._data == [END]:  # some servers close without the empty line after it
                    done.append(SseEvent(self._name, END))
                    self._data = []
            elif line.startswith("event:"):
                self._name = line[len("event:") :].strip()
            elif not line:
                if self._data:
                    done.append(SseEvent(self._name, "\n".join(self._data)))
                self._name, self._data = "", []
        return done


class Answer:
    """The part of one streamed answer received so far."""

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
        self._unfinished: set[int] = set()  # of these answers, those without a finish reason
        self._uncounted = False  # whether a chunk of text lacked its count of tokens
        self._reported = 0  # tokens by the last usage received
        self._final = 0  # tokens by the last usage received in its own chunk

    def add(self, api: Api, event: Mapping[str, Any], at: float) -> None:
        """Add one event. at: seconds since the request was sent."""
        if api == "generate":
            self.native(event, at)
        else:
            self.openai(event, at)

    def openai(self, event: Mapping[str, Any], at: float) -> None:
        """Add an event of the completions or chat interface."""
        details = (event.get("sglext") or {}).get("spec_tokens_details")
        if details is not None:
            several = details if isinstance(details, list) else [details]  # of `n` answers
            self.spec = SpecStats.total(SpecStats.from_details(each) for each in several)
        usage = event.get("usage") or {}
        total = usage.get("completion_tokens")
        self.prompt_tokens = usage.get("prompt_tokens") or self.prompt_tokens
        self._reported = total or self._reported
        if not event.get("choices"):
            self._final = total or self._final
        for choice in event.get("choices") or ():
            index = choice.get("index", 0)
            self._end_of(index, choice.get("finish_reason") or "")
            text = choice.get("text") or _said(choice.get("delta") or {})
            ids = tuple(choice.get("token_ids") or ())
            new = len(ids) if total is None else total - self._counted.get(index, 0)
            self._counted[index] = self._counted.get(index, 0) + new
            self._uncounted |= bool(text) and not total and not ids
            if new > 0 or text:
                self._append(at, text, new, ids)

    def native(self, event: Mapping[str, Any], at: float) -> None:
        """Add an event of `/generate`."""
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

    def close(self) -> tuple[Outcome, str]:
        """End the answer: return its outcome and, unless "ok", the reason in one line.

        A usage sent only at the end, or one that differs there from the running one, is first
        spread over the chunks of text: one token for each, the rest by the length of their text.
        """
        total = self._final or (self._reported if self._uncounted else 0)
        chunks = [chunk for chunk in self.chunks if chunk.text]
        if chunks and total and (self._uncounted or total != self.tokens):
            counts = spread(total, [len(chunk.text) for chunk in chunks])
            self.chunks = [replace(c, tokens=n) for c, n in zip(chunks, counts, strict=True)]
            self.tokens = total
        if self.finish_reason == "abort":
            return "error", refusal(json.dumps(self.meta.get("finish_reason", "aborted")))
        if not self.chunks:
            return "empty", f"no token (finish reason {self.finish_reason or 'unknown'})"
        if not self.finish_reason or self._unfinished:
            return "cut", "the stream ended without a finish_reason"
        if self.tokens == 0:
            return "malformed", (
                "the server counts no tokens in its stream: it sends neither `usage` "
                "(stream_options.include_usage) nor `token_ids`"
            )
        return "ok", ""

    @property
    def loops(self) -> bool:
        """Return whether the text so far ends in repetitions of one short piece."""
        return loops("".join(chunk.text for chunk in self.chunks))

    def _end_of(self, index: int, reason: str) -> None:
        """Record the finish reason of one of several answers, "" while it runs."""
        if reason:
            self.finish_reason = reason
            self._unfinished.discard(index)
        elif index not in self._counted:
            self._unfinished.add(index)

    def _append(self, at: float, text: str, tokens: int, ids: tuple[int, ...]) -> None:
        self.tokens += tokens
        chunk = Chunk(at, text, tokens, ids)
        self.chunks.append(chunk)
        if self._on_chunk is not None:
            self._on_chunk(chunk)


class AnswerReader:
    """Reads one answer from the bytes of its stream."""

    def __init__(self, api: Api, answer: Answer):
        self._api, self._answer, self._decoder = api, answer, SseDecoder()

    def feed(self, piece: bytes, at: float) -> bool:
        """Add the events that `piece` completes; return whether the stream's end mark was read.

        at: seconds since the request was sent. Raises ReportedError for an error that the server
        sends as an event, MalformedEventError for an event that cannot be read.
        """
        for event in self._decoder.feed(piece):
            if event.data.strip() == END:
                return True
            try:
                self._add(event, at)
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                shown = " ".join(event.data.split())[:60]
                reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
                raise MalformedEventError(f"cannot read the event {shown!r} ({reason})") from None
        return False

    def _add(self, event: SseEvent, at: float) -> None:
        if event.name == "error":
            raise ReportedError(refusal(event.data))
        value = json.loads(event.data)
        bare = "choices" not in value and "meta_info" not in value
        # SGLang and vLLM send `error`, older servers the message alone; null is no error.
        if value.get("error") or (bare and isinstance(value.get("message"), str)):
            raise ReportedError(refusal(event.data))
        self._answer.add(self._api, value, at)


def spread(tokens: int, lengths: Sequence[int]) -> list[int]:
    """Spread `tokens` over chunks of text by their lengths in characters; the counts add up.

    Each chunk gets at least one if there are enough: a server without speculation sends just one.
    """
    each = 1 if tokens >= len(lengths) else 0
    left, whole = tokens - each * len(lengths), sum(lengths)
    counts, before, given = [], 0, 0
    for length in lengths:
        before += length
        upto = round(left * before / whole)
        counts.append(each + upto - given)
        given = upto
    return counts


def loops(text: str) -> bool:
    """Return whether the last half of a text is one piece repeated at least four times."""
    tail = text[len(text) // 2 :][-_MOST_TAIL:]
    if len(tail) < _LEAST_TAIL:
        return False
    return any(
        tail[-1] == tail[-1 - period] and tail.startswith(tail[period:])
        for period in range(1, len(tail) // _LEAST_TIMES + 1)
    )


def refusal(text: str) -> str:
    """Extract the reason from a server's error body: one line of at most 300 characters."""
    try:
        body = json.loads(text)
        error = body.get("error") or body
        reason = error.get("message", text) if isinstance(error, dict) else str(error)
    except (ValueError, AttributeError):
        reason = text
    return " ".join(str(reason).split())[:300]


def _said(delta: Mapping[str, Any]) -> str:
    """Return the text of a chat delta, reasoning included, which consists of tokens as well."""
    return next((text for name in _TEXTS if isinstance(text := delta.get(name), str) and text), "")

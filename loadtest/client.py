"""Asynchronous client of an SGLang server that keeps the time and the tokens of each chunk.

Three ways in: OpenAI completions and chat completions, streamed, and SGLang's own `/generate`,
streamed or not. With `stream_interval` 1 (SGLang's default) the server sends one chunk per decoding
step, so a chunk of n tokens is n - 1 accepted drafts and the bonus token. The server's own counts
(`spec_tokens_details`, `meta_info`) come at the end and tell whether chunks were merged on the way.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from sglang_dspark.errors import DSparkError
from sglang_dspark.loadtest.metrics import Chunk, Completion, SpecStats

OnChunk = Callable[[Chunk], None]


@dataclass(frozen=True)
class Sampling:
    """Sampling settings of one request; `extra` is passed on as it is."""

    max_new_tokens: int = 96
    temperature: float = 0.0
    ignore_eos: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)

    def openai(self) -> dict[str, Any]:
        """Fields of an OpenAI request."""
        body = {"max_tokens": self.max_new_tokens, "temperature": self.temperature}
        return {**body, "ignore_eos": self.ignore_eos, **self.extra}

    def sglang(self) -> dict[str, Any]:
        """`sampling_params` of a `/generate` request."""
        body = {"max_new_tokens": self.max_new_tokens, "temperature": self.temperature}
        return {**body, "ignore_eos": self.ignore_eos, **self.extra}


class SGLangClient:
    """One server. `async with SGLangClient(url) as client: await client.complete(...)`."""

    def __init__(self, url: str, timeout_s: float = 600.0):
        """timeout_s: longest silence between two chunks."""
        self._url = url
        limits = httpx.Limits(max_connections=None)
        self._http = httpx.AsyncClient(
            base_url=url, trust_env=False, timeout=httpx.Timeout(timeout_s), limits=limits
        )

    async def __aenter__(self) -> SGLangClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def complete(
        self, prompt: str | Sequence[int], sampling: Sampling, on_chunk: OnChunk | None = None
    ) -> Completion:
        """`/v1/completions`, streamed, with the token ids of each chunk.

        prompt: text or token ids. Raises DSparkError as `_stream` does.
        """
        body = {
            "model": "default",
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "return_token_ids": True,
            "return_spec_tokens_details": True,
            **sampling.openai(),
        }
        return await self._openai("/v1/completions", body, on_chunk)

    async def chat(
        self,
        messages: Sequence[Mapping[str, str]],
        sampling: Sampling,
        on_chunk: OnChunk | None = None,
    ) -> Completion:
        """`/v1/chat/completions`, streamed. SGLang streams no token ids here: `ids` stay empty.

        A step whose tokens give no text yet (half a character) is counted with the next chunk.
        """
        body = {
            "model": "default",
            "messages": list(messages),
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            "return_spec_tokens_details": True,
            **sampling.openai(),
        }
        return await self._openai("/v1/chat/completions", body, on_chunk)

    async def generate(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling,
        *,
        stream: bool = True,
        on_chunk: OnChunk | None = None,
        **fields: Any,
    ) -> Completion:
        """SGLang's `/generate`; `fields` are added to the request (`return_logprob=True`).

        The last event's whole `meta_info` is in the result.
        """
        key = "text" if isinstance(prompt, str) else "input_ids"
        value = prompt if isinstance(prompt, str) else list(prompt)
        body = {key: value, "sampling_params": sampling.sglang(), "stream": stream, **fields}
        recorder = _Recorder(on_chunk)
        if stream:
            async for event in self._events("/generate", body):
                recorder.native(event)
        else:
            recorder.native(await self._post("/generate", body))
        return recorder.result()

    async def get_json(self, path: str) -> Any:
        """JSON of a GET request (`/get_server_info`)."""
        try:
            response = await self._http.get(path)
        except httpx.TransportError as error:
            raise self._unreachable(error) from error
        _raise_for(response.status_code, response.text, path)
        return response.json()

    async def flush_cache(self) -> None:
        """Empty the server's prefix cache, so that a repeated prompt is prefilled again."""
        await self._post("/flush_cache", {}, as_json=False)

    async def _openai(
        self, path: str, body: dict[str, Any], on_chunk: OnChunk | None
    ) -> Completion:
        recorder = _Recorder(on_chunk)
        async for event in self._events(path, body):
            recorder.openai(event)
        return recorder.result()

    async def _post(self, path: str, body: dict[str, Any], *, as_json: bool = True) -> Any:
        try:
            response = await self._http.post(path, json=body)
        except httpx.TransportError as error:
            raise self._unreachable(error) from error
        _raise_for(response.status_code, response.text, path)
        return response.json() if as_json else response.text

    async def _events(self, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Server-sent events up to `[DONE]`.

        Raises DSparkError when the server refuses the request, reports an error in the stream,
        or the stream ends early.
        """
        try:
            async with self._http.stream("POST", path, json=body) as response:
                if response.status_code != 200:
                    text = (await response.aread()).decode(errors="replace")
                    _raise_for(response.status_code, text, path)
                async for line in response.aiter_lines():
                    if not line.startswith("data:"):
                        continue
                    data = line[len("data:") :].strip()
                    if data == "[DONE]":
                        return
                    event = json.loads(data)
                    if "error" in event:
                        _raise_for(500, data, path)
                    yield event
        except httpx.TransportError as error:
            raise self._unreachable(error) from error
        raise DSparkError(f"the stream from {self._url}{path} ended early; see the server's log")

    def _unreachable(self, error: Exception) -> DSparkError:
        reason = str(error) or type(error).__name__
        return DSparkError(f"lost the server at {self._url} ({reason}); see its log")


class _Recorder:
    """Turns events into a `Completion`; the clock starts when it is made."""

    def __init__(self, on_chunk: OnChunk | None):
        self._began = time.perf_counter()
        self._on_chunk = on_chunk
        self._chunks: list[Chunk] = []
        self._tokens = 0
        self._text_length = 0
        self._prompt_tokens = 0
        self._finish = ""
        self._spec: SpecStats | None = None
        self._meta: dict[str, Any] = {}

    def openai(self, event: Mapping[str, Any]) -> None:
        details = (event.get("sglext") or {}).get("spec_tokens_details")
        if details is not None:
            self._spec = SpecStats.from_details(details)
        usage = event.get("usage") or {}
        self._prompt_tokens = usage.get("prompt_tokens") or self._prompt_tokens
        for choice in event.get("choices", ()):
            self._finish = choice.get("finish_reason") or self._finish
            text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
            ids = tuple(choice.get("token_ids") or ())
            total = usage.get("completion_tokens")
            new = len(ids) if total is None else total - self._tokens
            if new > 0 or text:
                self._add(text, new, ids)

    def native(self, event: Mapping[str, Any]) -> None:
        meta = event["meta_info"]
        self._meta = dict(meta)
        self._prompt_tokens = meta.get("prompt_tokens", 0)
        self._finish = (meta.get("finish_reason") or {}).get("type", "")
        self._spec = SpecStats.from_details(meta) if "spec_verify_ct" in meta else None
        ids = event["output_ids"][self._tokens :]
        text = event["text"][self._text_length :]
        self._text_length += len(text)
        if ids or text:
            self._add(text, len(ids), tuple(ids))

    def _add(self, text: str, tokens: int, ids: tuple[int, ...]) -> None:
        self._tokens += tokens
        chunk = Chunk(time.perf_counter() - self._began, text, tokens, ids)
        self._chunks.append(chunk)
        if self._on_chunk is not None:
            self._on_chunk(chunk)

    def result(self) -> Completion:
        if not self._chunks:
            raise DSparkError(
                f"the server sent no token (finish reason {self._finish or 'unknown'})"
            )
        return Completion(
            chunks=tuple(self._chunks),
            prompt_tokens=self._prompt_tokens,
            finish_reason=self._finish,
            spec=self._spec,
            meta=self._meta,
        )


def _raise_for(status: int, text: str, path: str) -> None:
    if status < 400:
        return
    try:
        body = json.loads(text)
        error = body.get("error", body)
        reason = error.get("message", text) if isinstance(error, dict) else str(error)
    except (ValueError, AttributeError):
        reason = text
    shown = " ".join(str(reason).split())[:300]
    raise DSparkError(f"the server refused {path} with status {status}: {shown}")

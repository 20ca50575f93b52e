"""Asynchronous client of an SGLang server that records the time and the tokens of each chunk.

Three interfaces: OpenAI completions and chat completions, streamed, and SGLang's own `/generate`,
streamed or not. With `stream_interval` 1 (SGLang's default) the server sends one chunk per decoding
step, so a chunk of n tokens is n - 1 accepted drafts and the bonus token. The server's own counts
(`spec_tokens_details`, `meta_info`) are sent at the end and show whether chunks were merged.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from sglang_dspark.errors import DSparkError
from sglang_dspark.loadtest.client.bodies import PATHS, Api, Sampling, request_body
from sglang_dspark.loadtest.client.metrics import Completion
from sglang_dspark.loadtest.client.stream import (
    Answer,
    AnswerReader,
    MalformedEventError,
    OnChunk,
    ReportedError,
    refusal,
)

__all__ = ["FLUSH_S", "OnChunk", "SGLangClient", "Sampling"]

FLUSH_S = 10  # wait of a server for running requests before it refuses to empty its cache
_KEPT_S = 2.0  # SGLang closes a connection idle for 5 s; a request sent at that moment is lost


class SGLangClient:
    """One server's client. `async with SGLangClient(url) as client: await client.complete(...)`."""

    def __init__(self, url: str, timeout_s: float = 600.0):
        """Create a client of the server at `url`. timeout_s: longest silence between two chunks."""
        self._url = url
        limits = httpx.Limits(max_connections=None, keepalive_expiry=_KEPT_S)
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
        """Send a prompt to `/v1/completions`, streamed, with the token ids of each chunk.

        prompt: text or token ids. Raises DSparkError as `_streamed` does.
        """
        body = request_body("completions", prompt, sampling)
        return await self._streamed("completions", body, on_chunk)

    async def chat(
        self,
        messages: Sequence[Mapping[str, str]],
        sampling: Sampling,
        on_chunk: OnChunk | None = None,
    ) -> Completion:
        """Send messages to `/v1/chat/completions`, streamed, where SGLang sends no token ids.

        `ids` are empty. A step whose tokens form no text yet (half a character) is counted with the
        next chunk.
        """
        body = request_body("chat", messages, sampling)
        return await self._streamed("chat", body, on_chunk)

    async def generate(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling,
        *,
        stream: bool = True,
        on_chunk: OnChunk | None = None,
        **fields: Any,
    ) -> Completion:
        """Send a prompt to `/generate`; `fields` extend the request (`return_logprob=True`).

        The result holds the last event's whole `meta_info`.
        """
        body = {**request_body("generate", prompt, sampling), "stream": stream, **fields}
        if stream:
            return await self._streamed("generate", body, on_chunk)
        answer = Answer(on_chunk)
        began = time.perf_counter()
        event = await self._post("/generate", body)
        answer.native(event, time.perf_counter() - began)
        return self._completion(answer, "/generate")

    async def tokenize(self, prompt: str) -> list[int]:
        """Return the token ids of a prompt, as the server reads it."""
        answer = await self._post("/tokenize", {"prompt": prompt})
        return [int(token) for token in answer["tokens"]]

    async def flush_cache(self) -> None:
        """Empty the server's prefix cache, so that a repeated prompt is prefilled again.

        The server refuses while a request runs, and an answered one may still run for a moment.
        """
        await self._post(f"/flush_cache?timeout={FLUSH_S}", {}, as_json=False)

    async def _streamed(
        self, api: Api, body: dict[str, Any], on_chunk: OnChunk | None
    ) -> Completion:
        """Send one request and read its stream up to `[DONE]`.

        Raises DSparkError if the server refuses the request, reports an error in the stream, or
        the stream ends early, without a finish reason or without a count of its tokens.
        """
        answer, path = Answer(on_chunk), PATHS[api]
        reader = AnswerReader(api, answer)
        began = time.perf_counter()
        try:
            async with self._http.stream("POST", path, json=body) as response:
                if response.status_code != 200:
                    text = (await response.aread()).decode(errors="replace")
                    _raise_for(response.status_code, text, path)
                async for piece in response.aiter_bytes():
                    if reader.feed(piece, time.perf_counter() - began):
                        return self._completion(answer, path)
        except httpx.TransportError as error:
            raise self._unreachable(error) from error
        except (ReportedError, MalformedEventError) as error:
            raise DSparkError(f"the stream from {self._url}{path}: {error}") from None
        raise DSparkError(f"the stream from {self._url}{path} ended early; see the server's log")

    async def _post(self, path: str, body: dict[str, Any], *, as_json: bool = True) -> Any:
        try:
            response = await self._http.post(path, json=body)
        except httpx.TransportError as error:
            raise self._unreachable(error) from error
        _raise_for(response.status_code, response.text, path)
        return response.json() if as_json else response.text

    def _unreachable(self, error: Exception) -> DSparkError:
        reason = str(error) or type(error).__name__
        return DSparkError(f"lost the server at {self._url} ({reason}); see its log")

    def _completion(self, answer: Answer, path: str) -> Completion:
        outcome, reason = answer.close()
        if outcome != "ok":
            raise DSparkError(f"the answer from {self._url}{path} does not count: {reason}")
        return Completion(
            chunks=tuple(answer.chunks),
            prompt_tokens=answer.prompt_tokens,
            finish_reason=answer.finish_reason,
            spec=answer.spec,
            meta=answer.meta,
        )


def _raise_for(status: int, text: str, path: str) -> None:
    if status >= 400:
        raise DSparkError(f"the server refused {path} with status {status}: {refusal(text)}")

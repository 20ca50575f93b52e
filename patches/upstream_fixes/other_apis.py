"""Answer the APIs of Ollama and OpenAI with whole texts, right limits, end reasons and counts.

Ollama's `/api/chat` and `/api/generate` (sglang/srt/entrypoints/ollama/serving.py): upstream sends
the chunk that finishes with empty text. With one token a chunk that token is EOS; under DSPARK the
chunk holds up to gamma + 1 tokens. `done_reason` is always "stop", a stream has no counts, and a
refused request is a 500.

`/v1/responses` (`ResponsesRequest.to_sampling_params` in sglang/srt/entrypoints/openai/protocol.py)
subtracts two tokens from `max_output_tokens`. The handler of a body that does not validate returns
`str(error)`, in which FastAPI names the file, line and function of the endpoint.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from sglang_dspark.patches.seam import Seams, Upstream
from sglang_dspark.serving import upstream

SEAMS = Seams()
NO_LIMIT = (-1, -2)  # Ollama's num_predict: no limit; until the context is full


@SEAMS.subclass(
    "ollama",
    "sglang.srt.entrypoints.ollama.serving.OllamaServing",
    why="upstream drops the text of a stream's last chunk, up to gamma + 1 tokens under "
    "DSPARK, reports done_reason stop for an answer that a limit cut off, and answers "
    "num_predict -1, which means no limit, with 500",
    issue="sgl-project/sglang#17961",
    drop_when="upstream streams the last chunk's text, its end reason and the counts, answers "
    "400 for a refused request, and reads a negative num_predict as no limit",
)
class OllamaServing(Upstream):
    """Upstream's handler of `/api/chat` and `/api/generate`, with whole answers."""

    def _convert_options_to_sampling_params(self, options: Any = None) -> dict[str, Any]:
        """Read a negative num_predict as no limit other than the context and the KV pool."""
        sampling: dict[str, Any] = super()._convert_options_to_sampling_params(options)
        if sampling.get("max_new_tokens") in NO_LIMIT:
            sampling["max_new_tokens"] = None
        return sampling

    async def _generate_chat_response(
        self, gen_request: Any, raw_request: Any, model_name: str
    ) -> Any:
        answer = await _first(self, gen_request, raw_request)
        message = upstream.OllamaMessage(role="assistant", content=answer["text"])
        return upstream.OllamaChatResponse(message=message, **_end(self, answer, model_name))

    async def _generate_generate_response(
        self, gen_request: Any, raw_request: Any, model_name: str
    ) -> Any:
        answer = await _first(self, gen_request, raw_request)
        return upstream.OllamaGenerateResponse(
            response=answer["text"], **_end(self, answer, model_name)
        )

    async def _stream_chat_response(
        self, gen_request: Any, raw_request: Any, model_name: str
    ) -> Any:
        chunks = _text_deltas(self, gen_request, raw_request, model_name)
        return await _stream(
            {"message": {"role": "assistant", "content": text}, **fields}
            async for text, fields in chunks
        )

    async def _stream_generate_response(
        self, gen_request: Any, raw_request: Any, model_name: str
    ) -> Any:
        chunks = _text_deltas(self, gen_request, raw_request, model_name)
        return await _stream({"response": text, **fields} async for text, fields in chunks)


async def _first(serving: Any, gen_request: Any, raw_request: Any) -> dict[str, Any]:
    from fastapi import HTTPException

    try:
        answer = await anext(serving.tokenizer_manager.generate_request(gen_request, raw_request))
    except ValueError as error:
        raise HTTPException(400, str(error)) from None
    return {"text": "", **answer}


async def _text_deltas(
    serving: Any, gen_request: Any, raw_request: Any, model_name: str
) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """Yield each chunk's new text, then "" with the end's reason and counts, as Ollama does."""
    sent = 0
    async for chunk in serving.tokenizer_manager.generate_request(gen_request, raw_request):
        text = chunk.get("text", "")
        done = chunk.get("meta_info", {}).get("finish_reason") is not None
        fresh, sent = text[sent:], len(text)
        if fresh or not done:
            created = serving._get_timestamp()
            yield fresh, {"model": model_name, "created_at": created, "done": False}
        if done:
            yield "", {"done": True, **_end(serving, chunk, model_name)}


async def _stream(parts: AsyncIterator[dict[str, Any]]) -> Any:
    """Start the generation before the response: a refused request gets 400, not a broken stream."""
    from fastapi import HTTPException
    from fastapi.responses import StreamingResponse

    try:
        first = await anext(parts)
    except ValueError as error:
        raise HTTPException(400, str(error)) from None

    async def lines() -> AsyncIterator[bytes]:
        yield json.dumps(first).encode() + b"\n"
        async for fields in parts:
            yield json.dumps(fields).encode() + b"\n"

    return StreamingResponse(lines(), media_type="application/x-ndjson")


def _end(serving: Any, chunk: dict[str, Any], model_name: str) -> dict[str, Any]:
    """Return the fields of an answer's last chunk. chunk: the tokenizer manager's."""
    meta = chunk.get("meta_info", {})
    reason = meta.get("finish_reason") or {}
    return {
        "model": model_name,
        "created_at": serving._get_timestamp(),
        "done_reason": "length" if reason.get("type") == "length" else "stop",
        "prompt_eval_count": meta.get("prompt_tokens"),
        "eval_count": meta.get("completion_tokens"),
    }


@SEAMS.after(
    "responses-limit",
    "sglang.srt.entrypoints.openai.protocol.ResponsesRequest.to_sampling_params",
    signature="(self, default_max_tokens=None, default_params=None, stop=None, "
    "tool_call_constraint=None)",
    why="upstream generates two tokens fewer than max_output_tokens",
    issue="sgl-project/sglang#26158",
    drop_when="upstream generates up to max_output_tokens, not two tokens fewer",
)
def whole_limit(
    result: dict[str, Any], self: Any, default_max_tokens: int | None = None, *_: Any, **__: Any
) -> None:
    """Set the requested limit (AFTER hook of `ResponsesRequest.to_sampling_params`).

    A limit beyond the context gets status 400, as from `/v1/chat/completions`.
    """
    limits = [each for each in (self.max_output_tokens, default_max_tokens) if each is not None]
    if self.max_output_tokens is not None:
        result["max_new_tokens"] = min(limits)


@SEAMS.replace(
    "error-paths",
    "fastapi.exceptions.ValidationException._format_endpoint_context",
    why="upstream answers an invalid body with a path of the server's files",
    issue="https://github.com/fastapi/fastapi/pull/14306",
    drop_when="SGLang's handler of invalid bodies answers without str(error)",
)
def without_endpoint(self: Any) -> str:
    """Return no text (REPLACE hook of FastAPI's `ValidationException._format_endpoint_context`)."""
    return ""

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
COUNTS = {"prompt_eval_count": "prompt_tokens", "eval_count": "completion_tokens"}


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
        texts = _texts(self, gen_request, raw_request, model_name)
        parts = (
            {"message": {"role": "assistant", "content": text}, **fields}
            async for text, fields in texts
        )
        return await _answer(parts, None if gen_request.stream else upstream.OllamaChatResponse)

    async def _generate_generate_response(
        self, gen_request: Any, raw_request: Any, model_name: str
    ) -> Any:
        texts = _texts(self, gen_request, raw_request, model_name)
        parts = ({"response": text, **fields} async for text, fields in texts)
        return await _answer(parts, None if gen_request.stream else upstream.OllamaGenerateResponse)

    _stream_chat_response = _generate_chat_response
    _stream_generate_response = _generate_generate_response


async def _texts(
    serving: Any, gen_request: Any, raw_request: Any, model_name: str
) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """Yield each chunk's new text; the end's reason and counts come with "" in a stream."""
    sent = 0
    async for chunk in serving.tokenizer_manager.generate_request(gen_request, raw_request):
        text, meta = chunk.get("text", ""), chunk.get("meta_info", {})
        fresh, sent = text[sent:], len(text)
        reason = meta.get("finish_reason")
        fields = {"model": model_name, "created_at": serving._get_timestamp()}
        if gen_request.stream and (fresh or not reason):
            yield fresh, {**fields, "done": False}
            fresh = ""
        if reason:
            fields["done_reason"] = "length" if reason["type"] == "length" else "stop"
            counts = {name: meta.get(theirs) for name, theirs in COUNTS.items()}
            yield fresh, {**fields, "done": True, **counts}


async def _answer(parts: AsyncIterator[dict[str, Any]], whole: Any) -> Any:
    """Return a stream of `parts`, or the first one as a response of type `whole`.

    The generation starts before the response: a refused request gets 400, not a broken stream.
    """
    from fastapi import HTTPException
    from fastapi.responses import StreamingResponse

    try:
        first = await anext(parts)
    except ValueError as error:
        raise HTTPException(400, str(error)) from None
    if whole is not None:
        return whole(**first)

    async def lines() -> AsyncIterator[bytes]:
        yield json.dumps(first).encode() + b"\n"
        async for fields in parts:
            yield json.dumps(fields).encode() + b"\n"

    return StreamingResponse(lines(), media_type="application/x-ndjson")


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
    limit, most = self.max_output_tokens, default_max_tokens
    if limit is not None:
        result["max_new_tokens"] = limit if most is None else min(limit, most)


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

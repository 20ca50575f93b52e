"""Answer Ollama's `/api/chat` and `/api/generate` with whole texts, end reasons and token counts.

Upstream (sglang/srt/entrypoints/ollama/serving.py) sends the chunk that finishes with empty
text. With one token a chunk that token is EOS; under DSPARK the chunk holds up to gamma + 1 tokens.
`done_reason` is always "stop", a stream has no counts, and a refused request is a 500.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from sglang_dspark.patches.seam import Seam
from sglang_dspark.serving import upstream

NO_LIMIT = (-1, -2)  # Ollama's num_predict: without end; until the context is full


def convert_options(result: dict[str, Any], self: Any, options: Any = None) -> dict[str, Any]:
    """AFTER hook of `_convert_options_to_sampling_params`: read a negative num_predict as no limit.

    The scheduler limits the answer to the context and the KV pool.
    """
    if result.get("max_new_tokens") in NO_LIMIT:
        return {**result, "max_new_tokens": None}
    return result


async def answer_chat(self: Any, gen_request: Any, raw_request: Any, model_name: str) -> Any:
    """REPLACE hook of `_generate_chat_response`: answer with the whole text."""
    answer = await _first(self, gen_request, raw_request)
    message = upstream.OllamaMessage(role="assistant", content=answer["text"])
    return upstream.OllamaChatResponse(message=message, **_end(self, answer, model_name))


async def answer_generate(self: Any, gen_request: Any, raw_request: Any, model_name: str) -> Any:
    """REPLACE hook of `_generate_generate_response`: answer with the whole text."""
    answer = await _first(self, gen_request, raw_request)
    return upstream.OllamaGenerateResponse(
        response=answer["text"], **_end(self, answer, model_name)
    )


async def stream_chat(self: Any, gen_request: Any, raw_request: Any, model_name: str) -> Any:
    """REPLACE hook of `_stream_chat_response`: stream every chunk's text."""
    chunks = _text_deltas(self, gen_request, raw_request, model_name)
    return await _stream(
        {"message": {"role": "assistant", "content": text}, **fields}
        async for text, fields in chunks
    )


async def stream_generate(self: Any, gen_request: Any, raw_request: Any, model_name: str) -> Any:
    """REPLACE hook of `_stream_generate_response`: stream every chunk's text."""
    chunks = _text_deltas(self, gen_request, raw_request, model_name)
    return await _stream({"response": text, **fields} async for text, fields in chunks)


async def _first(self: Any, gen_request: Any, raw_request: Any) -> dict[str, Any]:
    from fastapi import HTTPException

    try:
        answer = await anext(self.tokenizer_manager.generate_request(gen_request, raw_request))
    except ValueError as error:
        raise HTTPException(400, str(error)) from None
    return {"text": "", **answer}


async def _text_deltas(
    self: Any, gen_request: Any, raw_request: Any, model_name: str
) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """Yield each chunk's new text, then "" with the end's reason and counts, as Ollama does."""
    sent = 0
    async for chunk in self.tokenizer_manager.generate_request(gen_request, raw_request):
        text = chunk.get("text", "")
        done = chunk.get("meta_info", {}).get("finish_reason") is not None
        fresh, sent = text[sent:], len(text)
        if fresh or not done:
            created = self._get_timestamp()
            yield fresh, {"model": model_name, "created_at": created, "done": False}
        if done:
            yield "", {"done": True, **_end(self, chunk, model_name)}


async def _stream(parts: AsyncIterator[dict[str, Any]]) -> Any:
    """Start the generation before the response: a refused request is a 400, not a broken stream."""
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


def _end(self: Any, chunk: dict[str, Any], model_name: str) -> dict[str, Any]:
    """Return the fields of an answer's last chunk. chunk: the tokenizer manager's."""
    meta = chunk.get("meta_info", {})
    reason = meta.get("finish_reason") or {}
    return {
        "model": model_name,
        "created_at": self._get_timestamp(),
        "done_reason": "length" if reason.get("type") == "length" else "stop",
        "prompt_eval_count": meta.get("prompt_tokens"),
        "eval_count": meta.get("completion_tokens"),
    }


_SERVING = "sglang.srt.entrypoints.ollama.serving.OllamaServing"
_ANSWER = "(self, gen_request, raw_request, model_name)"

SEAMS = (
    Seam(
        name="ollama-options",
        target=f"{_SERVING}._convert_options_to_sampling_params",
        kind="after",
        hook=convert_options,
        signature="(self, options=None)",
        why="upstream answers Ollama's num_predict -1, which means no limit, with 500",
        issue="none found (2026-11-27)",
        drop_when="upstream reads a negative num_predict as no limit",
    ),
    Seam(
        name="ollama-chat",
        target=f"{_SERVING}._generate_chat_response",
        kind="replace",
        hook=answer_chat,
        signature=_ANSWER,
        why="upstream reports done_reason stop for an answer that max_new_tokens cut off",
        issue="none found (2026-11-27)",
        drop_when="upstream answers done_reason length for a limit, and 400 for a refused request",
    ),
    Seam(
        name="ollama-generate",
        target=f"{_SERVING}._generate_generate_response",
        kind="replace",
        hook=answer_generate,
        signature=_ANSWER,
        why="upstream reports done_reason stop for an answer that max_new_tokens cut off",
        issue="none found (2026-11-27)",
        drop_when="upstream answers done_reason length for a limit, and 400 for a refused request",
    ),
    Seam(
        name="ollama-chat-stream",
        target=f"{_SERVING}._stream_chat_response",
        kind="replace",
        hook=stream_chat,
        signature=_ANSWER,
        why="upstream drops the text of the last chunk, up to gamma + 1 tokens under DSPARK",
        issue="sgl-project/sglang#17961",
        drop_when="upstream streams the last chunk's text, its end reason and the counts",
    ),
    Seam(
        name="ollama-generate-stream",
        target=f"{_SERVING}._stream_generate_response",
        kind="replace",
        hook=stream_generate,
        signature=_ANSWER,
        why="upstream drops the text of the last chunk, up to gamma + 1 tokens under DSPARK",
        issue="sgl-project/sglang#17961",
        drop_when="upstream streams the last chunk's text, its end reason and the counts",
    ),
)

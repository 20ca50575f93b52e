"""A small HTTP server that speaks SGLang's streaming formats with known tokens and delays.

It replaces an SGLang server in tests of our client and process handling. Run as a
module it takes the launch arguments of SGLang; `--delay S` postpones its health, `--die` ends it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.routing import Route

STEPS = ((7,), (8, 9, 10), (11,), (12, 13))  # token ids of each step; the first is the prefill
FIRST_S, STEP_S = 0.15, 0.05
ACCEPTED = 4  # the last step accepted both of its tokens: its bonus fell behind the stop
DETAILS = {
    "spec_verify_ct": 3,
    "spec_num_correct_drafts": ACCEPTED,
    "spec_correct_drafts_histogram": [1, 0, 2],
}


def _word(token: int) -> str:
    return f" w{token}"


def _data(value: Any) -> str:
    return f"data: {json.dumps(value)}\n\n"


async def _openai(body: dict[str, Any], chat: bool) -> AsyncIterator[str]:
    if chat:
        yield _data({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
    sent = 0
    for i, step in enumerate(STEPS):
        await asyncio.sleep(STEP_S if i else FIRST_S)
        sent += len(step)
        text = "".join(map(_word, step))
        choice: dict[str, Any] = {"index": 0, "finish_reason": None}
        choice.update({"delta": {"content": text}} if chat else {"text": text, "token_ids": step})
        if i == len(STEPS) - 1:
            choice["finish_reason"] = "length"
        yield _data({"choices": [choice], "usage": {"prompt_tokens": 5, "completion_tokens": sent}})
        if body["prompt" if not chat else "messages"] in ("break off", [{"content": "break off"}]):
            return
    yield _data({"choices": [], "sglext": {"spec_tokens_details": DETAILS}})
    yield _data({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": sent}})
    yield "data: [DONE]\n\n"


async def completions(request: Request) -> Any:
    """`/v1/completions`: refuses the prompt `refuse me`."""
    body = await request.json()
    if body["prompt"] == "refuse me":
        return JSONResponse({"message": "max_tokens\nis too large"}, status_code=400)
    return StreamingResponse(_openai(body, chat=False), media_type="text/event-stream")


async def chat(request: Request) -> Any:
    """`/v1/chat/completions`."""
    return StreamingResponse(
        _openai(await request.json(), chat=True), media_type="text/event-stream"
    )


async def generate(request: Request) -> Any:
    """`/generate`, streamed with cumulative text and ids, or at once."""
    body = await request.json()

    async def events() -> AsyncIterator[str]:
        ids: list[int] = []
        for i, step in enumerate(STEPS):
            await asyncio.sleep(STEP_S)
            ids += step
            yield _data(_native(ids, last=i == len(STEPS) - 1))
        yield "data: [DONE]\n\n"

    if body["stream"]:
        return StreamingResponse(events(), media_type="text/event-stream")
    return JSONResponse(_native([token for step in STEPS for token in step], last=True))


async def flush_cache(_: Request) -> PlainTextResponse:
    """`/flush_cache`: there is none, so it is empty."""
    return PlainTextResponse("Cache flushed.")


def _native(ids: list[int], last: bool) -> dict[str, Any]:
    meta: dict[str, Any] = {"prompt_tokens": 5, "completion_tokens": len(ids)}
    if last:
        meta |= {"finish_reason": {"type": "stop"}, **DETAILS}
    return {"text": "".join(map(_word, ids)), "output_ids": list(ids), "meta_info": meta}


def application(ready_at: float = 0.0) -> Starlette:
    """The server; `/health` answers 503 before `ready_at` (monotonic clock)."""

    async def health(_: Request) -> PlainTextResponse:
        return PlainTextResponse("", status_code=200 if time.monotonic() >= ready_at else 503)

    return Starlette(
        routes=[
            Route("/health", health),
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/generate", generate, methods=["POST"]),
            Route("/flush_cache", flush_cache, methods=["POST"]),
        ]
    )


def main() -> None:
    """Serve until killed, with a child process as SGLang has its scheduler."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-path")
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--delay", type=float, default=0.0)
    parser.add_argument("--die", action="store_true")
    arguments = parser.parse_args()
    if arguments.die:
        print("some noise\nValueError: hidden size 64 is not 576\nmore noise", flush=True)
        sys.exit(3)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print(f"child {child.pid}", flush=True)
    uvicorn.run(
        application(time.monotonic() + arguments.delay),
        host=arguments.host,
        port=arguments.port,
        log_level="warning",
    )


if __name__ == "__main__":
    main()

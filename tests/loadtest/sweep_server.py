"""A stand-in for SGLang's launcher in sweeps: known speed, `/metrics`, and a death on demand.

`--step S` is the time of a decoding step, `--die-after N` ends the process in the middle of its
N-th answer, `--flushes N` refuses to empty the cache after N times (as one that hangs does).
`--form` changes its streams: `whole` sends each answer in one chunk, `short` ends it after two
tokens, `boom` reports an error in the middle and ends as if all were well, `uncounted` counts none.
Of SGLang's other arguments `/server_info` reports the model, the tokenizer and the drafting; the
rest are ignored. Each answer has the tokens that the request asks for, two a step after the first,
and comes with the counts of a drafter of depth 2.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.routing import Route

from sglang_dspark.loadtest.servers.server import tied

PROMPT_TOKENS = 5
PER_STEP = 2


@dataclass
class State:
    """Counters and settings of the server."""

    step_s: float
    die_after: int
    flushes: int
    info: dict[str, Any]
    form: str = ""
    begun: int = 0
    requests: int = 0
    generated: int = 0

    def page(self) -> str:
        """`/metrics`; empty counters are skipped, as prometheus_client does."""
        rows = {
            "sglang:num_requests": self.requests,
            "sglang:generation_tokens": self.generated,
            "sglang:prompt_tokens": self.requests * PROMPT_TOKENS,
        }
        lines = ["# TYPE sglang:num_queue_reqs gauge", 'sglang:num_queue_reqs{m="x"} 0.0']
        for name, value in rows.items():
            lines += [f"# TYPE {name}_total counter", f'{name}_total{{m="x"}} {value}.0']
        return "\n".join(lines) + "\n"


def _event(choice: dict[str, Any], sent: int, **more: Any) -> str:
    usage = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": sent}
    return f"data: {json.dumps({'choices': [choice], 'usage': usage, **more})}\n\n"


async def _answer(state: State, asked: int) -> AsyncIterator[str]:
    state.begun += 1
    dies = state.begun == state.die_after
    asked = min(asked, 2) if state.form == "short" else asked
    sent = steps = 0
    while sent < asked:
        await asyncio.sleep(state.step_s)
        if dies and sent:
            print("RuntimeError: out of memory, as asked", flush=True)
            os._exit(7)
        new = min(PER_STEP if sent else 1, asked - sent)
        sent, steps = sent + new, steps + (sent > 0)
        choice = {"index": 0, "text": "x" * new, "token_ids": [1] * new}
        if state.form == "boom" and steps:
            yield f"event: error\ndata: {json.dumps({'message': 'boom', 'code': 500})}\n\n"
            break
        if state.form == "uncounted":
            choice.pop("token_ids")
            last = None if sent < asked else "length"
            yield f"data: {json.dumps({'choices': [{**choice, 'finish_reason': last}]})}\n\n"
        elif sent < asked and state.form != "whole":
            yield _event({**choice, "finish_reason": None}, sent)
    counts = {
        "spec_verify_ct": steps,
        "spec_num_correct_drafts": steps,
        "spec_correct_drafts_histogram": [0, steps, 0],
    }
    state.requests, state.generated = state.requests + 1, state.generated + sent
    if state.form not in ("boom", "uncounted"):
        choice = {"index": 0, "text": "x" * sent} if state.form == "whole" else choice
        details = {"spec_tokens_details": counts}
        yield _event({**choice, "finish_reason": "length"}, sent, sglext=details)
    yield "data: [DONE]\n\n"


def application(state: State) -> Starlette:
    """The server."""

    async def completions(request: Request) -> StreamingResponse:
        asked = (await request.json())["max_tokens"]
        return StreamingResponse(_answer(state, asked), media_type="text/event-stream")

    async def metrics(_: Request) -> PlainTextResponse:
        return PlainTextResponse(state.page())

    async def info(_: Request) -> JSONResponse:
        return JSONResponse(state.info)

    async def fine(_: Request) -> PlainTextResponse:
        return PlainTextResponse("")

    async def flush(_: Request) -> PlainTextResponse:
        state.flushes -= 1
        return PlainTextResponse("", status_code=400 if state.flushes < 0 else 200)

    return Starlette(
        routes=[
            Route("/health", fine),
            Route("/flush_cache", flush, methods=["POST"]),
            Route("/metrics", metrics),
            Route("/server_info", info),
            Route("/v1/completions", completions, methods=["POST"]),
        ]
    )


def _info(known: argparse.Namespace) -> dict[str, Any]:
    return {
        "model_path": known.model_path,
        "tokenizer_path": known.tokenizer_path or known.model_path,
        "speculative_algorithm": known.speculative_algorithm,
        "speculative_num_draft_tokens": known.speculative_num_draft_tokens,
        "device": "cpu",
        "enable_metrics": known.enable_metrics,
        "is_embedding": False,
    }


def main() -> None:
    """Serve until killed, with a child that ends with us, as SGLang's scheduler does."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--model-path")
    parser.add_argument("--tokenizer-path")
    parser.add_argument("--speculative-algorithm")
    parser.add_argument("--speculative-num-draft-tokens", type=int)
    parser.add_argument("--enable-metrics", action="store_true")
    parser.add_argument("--step", type=float, default=0.02)
    parser.add_argument("--die-after", type=int, default=0)
    parser.add_argument("--flushes", type=int, default=10**9)
    parser.add_argument("--form", default="", choices=["", "whole", "short", "boom", "uncounted"])
    known, _ = parser.parse_known_args()
    subprocess.Popen(
        tied([sys.executable, "-S", "-c", f"input()  # child of {known.port}"]),
        stdin=subprocess.PIPE,
    )
    state = State(known.step, known.die_after, known.flushes, _info(known), known.form)
    uvicorn.run(application(state), host=known.host, port=known.port, log_level="warning")


if __name__ == "__main__":
    main()

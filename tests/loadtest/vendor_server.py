"""An OpenAI-compatible server of another vendor: no page of SGLang's, and streams of its dialect.

It refuses fields that OpenAI does not have, and names of models other than its own.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

MODEL = "vendor/model-1"
STEP_S = 0.005
Usage = Literal["none", "last", "every", "zeros"]
_KNOWN = {"model", "messages", "stream", "stream_options", "max_tokens", "temperature"}


def stream(tokens: int, usage: Usage) -> Iterator[bytes]:
    """Yield an answer's events: CRLF, comments, a role alone, a finish reason alone.

    usage: in no chunk, in the last one alone, in every one, or in every one but 0 until the last.
    """

    def event(choices: list[dict[str, Any]], sent: int) -> bytes:
        chunk: dict[str, Any] = {"id": "x", "choices": choices}
        if usage in ("every", "zeros") or (usage == "last" and not choices and sent == tokens):
            running = 0 if usage == "zeros" and choices else sent
            chunk["usage"] = {"prompt_tokens": 7, "completion_tokens": running}
        return b": keep-alive\r\n\r\ndata:" + json.dumps(chunk).encode() + b"\r\n\r\n"

    yield event([], 0)
    yield event([_choice({"role": "assistant"})], 0)
    for sent in range(1, tokens + 1):
        field = "reasoning_content" if sent <= tokens // 2 else "content"
        yield event([_choice({field: f" {sent}"})], sent)
    yield event([_choice({}, "length")], tokens)
    yield event([], tokens)
    yield b"data:[DONE]\r\n\r\n"


def _choice(delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "finish_reason": reason}


@contextmanager
def vendor(usage: Usage) -> Iterator[str]:
    """Run the server; its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/v1/models":
                self._reply(200, {"object": "list", "data": [{"id": MODEL}]})
            else:
                self._reply(404, {"error": {"message": "no such page"}})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path != "/v1/chat/completions" or body["model"] != MODEL:
                self._reply(404, {"error": {"message": f"no {self.path} of {body['model']}"}})
            elif unknown := sorted(body.keys() - _KNOWN):
                self._reply(422, {"error": {"message": f"unknown fields {unknown}"}})
            else:
                self.send_response(200)
                self.end_headers()
                for piece in stream(body["max_tokens"], usage):
                    time.sleep(STEP_S)
                    self.wfile.write(piece)

        def _reply(self, status: int, value: dict[str, Any]) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(value).encode())

        def log_message(self, *_: object) -> None:
            """Be quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()

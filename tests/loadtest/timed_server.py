"""A streaming server with known delays, in a process of its own; asyncio alone, no framework.

A request waits FIRST_S, then sends STEPS chunks, one every STEP_S; chunk k has 1 + k % 3 tokens.
Times are kept against the request's own start, so that delays of the event loop do not add up.
What a prompt contains chooses a fault: `@refuse` is answered with 503, `@cut` breaks off in the
middle, `@abort` and `@error` fail within the stream, `@babble` sends no JSON, `@hush` goes silent,
`@nothing` ends without a token; `@boom` reports an error in an event of that name and ends as if
all were well, `@bare` in an event of a message alone, `@unfinished` gives no finish reason. Others
change the form of a good stream: `@null` has `"error": null` in every event, `@late` its usage in
an event of its own at the end, `@last` in the last chunk, `@uncounted` none, `@whole` all in one
chunk. GET `/truth` returns when chunks really left, and forgets it: a busy machine keeps the server
waiting too, and a client must then find those times.
Run as a module: `--port N`, and `--host` where it is not the loopback.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

FIRST_S, STEP_S, STEPS = 1.0, 0.15, 12
COUNTS = tuple(1 + k % 3 for k in range(STEPS))
TOKENS = sum(COUNTS)
_truth: list[list[float]] = []  # of each whole answer, seconds from its request to each chunk
_aborted: set[str] = set()  # `rid` of the requests that are to end


def _event(api: str, sent: int, new: int, last: bool) -> dict[str, Any]:
    usage = {"prompt_tokens": 4, "completion_tokens": sent}
    details = {
        "spec_verify_ct": STEPS - 1,
        "spec_num_correct_drafts": TOKENS - STEPS,
        "spec_correct_drafts_histogram": [3, 4, 4],
    }
    if api == "/generate":
        meta = {**usage, **(details if last else {})}
        meta["finish_reason"] = {"type": "length"} if last else None
        return {"text": "x" * sent, "output_ids": list(range(sent)), "meta_info": meta}
    part: dict[str, Any] = {"index": 0, "finish_reason": "length" if last else None}
    if api == "/v1/completions":
        part |= {"text": "x" * new, "token_ids": [1] * new}
    else:
        part |= {"delta": {"content": "x" * new}}
    event = {"choices": [part], "usage": usage}
    return event | ({"sglext": {"spec_tokens_details": details}} if last else {})


async def _stream(api: str, body: str) -> AsyncIterator[str]:
    clock = asyncio.get_running_loop().time
    began, sent = clock(), 0
    for step, new in enumerate(COUNTS):
        await asyncio.sleep(max(0.0, began + FIRST_S + step * STEP_S - clock()))
        if "@nothing" in body:
            break
        if "@whole" in body and step < STEPS - 1:
            continue
        if step == STEPS // 2:
            if "@cut" in body:
                return
            if "@hush" in body:
                await asyncio.sleep(60)
            if "@error" in body:
                yield json.dumps({"error": {"message": "out of\nmemory"}})
            if "@babble" in body:
                yield "{half"
            if "@boom" in body:
                yield f"event: error\ndata: {json.dumps({'message': 'boom', 'code': 500})}"
                break
            if "@bare" in body:
                yield json.dumps({"object": "error", "message": "bare", "code": 500})
                break
        new = TOKENS if "@whole" in body else new
        sent += new
        event = _event(api, sent, new, step == STEPS - 1)
        usage = _changed(event, body, step == STEPS - 1)
        if json.loads(body).get("rid") in _aborted:
            event["choices"][0]["finish_reason"] = "abort"
            yield json.dumps(event)
            break
        if "@abort" in body and step == STEPS - 1:
            event["choices"][0]["finish_reason"] = "abort"
        yield json.dumps(event)
        if usage is not None:
            yield json.dumps({"choices": [], "usage": usage})
    yield "[DONE]"


def _changed(event: dict[str, Any], body: str, last: bool) -> dict[str, Any] | None:
    """Give an event the form that the prompt asks for; the usage of one to be sent behind it."""
    if "@null" in body:
        event["error"] = None
    if "@unfinished" in body:
        event["choices"][0]["finish_reason"] = None
    if "@late" in body or "@uncounted" in body or ("@last" in body and not last):
        usage = event.pop("usage")
        event["choices"][0].pop("token_ids", None)
        return usage if "@late" in body and last else None
    return None


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    clock = asyncio.get_running_loop().time
    began = clock()
    api = head.split(" ", 2)[1]
    fields = {name.lower(): value for name, _, value in _headers(head)}
    body = (await reader.readexactly(int(fields.get("content-length", "0")))).decode()
    try:
        if head.startswith("GET"):
            known = json.dumps(_truth if api == "/truth" else {}).encode()
            _truth.clear()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(known) + known)
            return
        if api == "/abort_request":
            _aborted.add(json.loads(body)["rid"])
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            return
        if "@refuse" in body:
            reason = b'{"message": "busy"}'
            writer.write(b"HTTP/1.1 503 Busy\r\nContent-Length: %d\r\n\r\n" % len(reason) + reason)
            return
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n")
        writer.write(b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n")
        left: list[float] = []
        async for data in _stream(api, body):
            left.append(clock() - began)
            named = data.startswith("event:")
            payload = f"{data}\n\n".encode() if named else f"data: {data}\n\n".encode()
            writer.write(b"%x\r\n%s\r\n" % (len(payload), payload))
            await writer.drain()
            if data == "[DONE]":
                writer.write(b"0\r\n\r\n")
                _truth.append(left[:-1])
    except ConnectionError:
        return  # the client has disconnected
    finally:
        writer.close()


def _headers(head: str) -> list[tuple[str, str, str]]:
    return [
        (name.strip(), colon, value.strip())
        for name, colon, value in (line.partition(":") for line in head.splitlines()[1:])
    ]


async def _main(host: str, port: int) -> None:
    server = await asyncio.start_server(_serve, host, port, backlog=256)
    print("ready", flush=True)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args()
    asyncio.run(_main(options.host, options.port))

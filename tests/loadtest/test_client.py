"""The client against a real HTTP server with known steps: times, tokens, counts, and failures."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import uvicorn

from sglang_dspark.errors import DSparkError
from sglang_dspark.loadtest.client.client import Sampling, SGLangClient
from sglang_dspark.loadtest.client.metrics import Chunk, Completion
from tests.loadtest import small_server
from tests.loadtest.small_server import FIRST_S, STEP_S, STEPS

IDS = tuple(token for step in STEPS for token in step)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(small_server.application(), log_level="warning")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        thread.join()


def complete(url: str, prompt: str, chunks: list[Chunk] | None = None) -> Completion:
    async def run() -> Completion:
        async with SGLangClient(url) as client:
            on_chunk = None if chunks is None else chunks.append
            return await client.complete(prompt, Sampling(), on_chunk)

    return asyncio.run(run())


def test_completion_times(url: str) -> None:
    """One answer of twenty keeps time: another process may hold up either side of any of them."""
    found = []
    for _ in range(20):
        done = complete(url, "hello")
        assert done.tokens_per_s == pytest.approx(6 / done.decode_seconds)
        found.append((done.ttft - FIRST_S, done.decode_seconds - 3 * STEP_S))
        if all(0 <= late < 0.05 for late in found[-1]):
            return
    pytest.fail(f"seconds late: {found}")


def test_completion_tokens(url: str) -> None:
    live: list[Chunk] = []
    done = complete(url, "hello", live)
    assert tuple(live) == done.chunks
    assert [chunk.ids for chunk in done.chunks] == [tuple(step) for step in STEPS]
    assert [chunk.tokens for chunk in done.chunks] == [1, 3, 1, 2]
    assert done.ids == IDS
    assert done.text == " w7 w8 w9 w10 w11 w12 w13"
    assert (done.prompt_tokens, done.finish_reason) == (5, "length")
    assert done.decode_steps == 3


def test_counts_of_drafts(url: str) -> None:
    done = complete(url, "hello")
    assert done.spec is not None
    assert done.spec.tau == pytest.approx(1 + 4 / 3)
    assert done.spec.acceptance(3) == pytest.approx([2 / 3, 2 / 3, 0.0])
    # the prefill's token is no draft; the last step's two tokens are both drafts
    assert done.drafted() == [0, 2, 0, 2]


def test_chat_counts_tokens_by_usage(url: str) -> None:
    async def run() -> Completion:
        async with SGLangClient(url) as client:
            return await client.chat([{"role": "user", "content": "hello"}], Sampling())

    done = asyncio.run(run())
    assert [chunk.tokens for chunk in done.chunks] == [1, 3, 1, 2]
    assert done.ids == ()
    assert done.spec is not None
    assert done.drafted() == [0, 2, 0, 2]


@pytest.mark.parametrize("stream", [True, False])
def test_generate(url: str, stream: bool) -> None:
    async def run() -> Completion:
        async with SGLangClient(url) as client:
            return await client.generate([1, 2], Sampling(), stream=stream)

    done = asyncio.run(run())
    assert done.ids == IDS
    assert len(done.chunks) == (4 if stream else 1)
    assert done.text == " w7 w8 w9 w10 w11 w12 w13"
    assert done.finish_reason == "stop"
    assert done.meta["completion_tokens"] == 7
    assert done.spec is not None
    assert done.spec.accepted == 4


def test_many_users_at_once(url: str) -> None:
    async def run() -> list[Completion]:
        async with SGLangClient(url) as client:
            return await asyncio.gather(*(client.complete("hi", Sampling()) for _ in range(20)))

    took = []
    for _ in range(5):  # the quickest: another process may hold the machine up for a moment
        began = time.perf_counter()
        everyone = asyncio.run(run())
        took.append(time.perf_counter() - began)
        assert {done.ids for done in everyone} == {IDS}
    assert min(took) < 20 * (FIRST_S + 3 * STEP_S) / 2


def test_refusal_is_one_line(url: str) -> None:
    with pytest.raises(DSparkError, match="status 400: max_tokens is too large") as error:
        complete(url, "refuse me")
    assert "\n" not in str(error.value)


def test_a_stream_that_breaks_off_is_an_error(url: str) -> None:
    with pytest.raises(DSparkError, match="ended early"):
        complete(url, "break off")


def test_no_server_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(DSparkError, match="lost the server"):
        complete(f"http://127.0.0.1:{port}", "hello")

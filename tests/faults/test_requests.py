"""Test requests that end early, arrive in bursts, or outnumber the slots."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import httpx
import pytest

from tests.faults.conftest import Note
from tests.faults.live import LIMIT_S, LONG, POOL, PROMPTS, SLOTS, Live, Outcome, await_that

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.xdist_group("faults")]

CLIENTS, EOS = 100, 1
RETRACTED = "sglang:num_retracted_requests_total"
Way = Callable[[Live, str], None]


def abort(live: Live, rid: str) -> None:
    """By the API."""
    assert live.served.request("POST", "/abort_request", json={"rid": rid}).status_code == 200


@pytest.mark.parametrize("stage", ["draft", "verify", "commit"])
def test_a_request_aborted_within_a_step(live: Live, note: Note, stage: str) -> None:
    """The stage waits a second, so that the abort comes while it is under way."""
    ended: dict[str, Any] = {}

    def ask(rid: str, at: int) -> None:
        sampling = {"ignore_eos": True}
        ended[rid] = live.served.generate(PROMPTS[at], LONG, sampling_params=sampling, rid=rid)

    names = [f"{stage}-aborted", f"{stage}-stays"]
    threads = [threading.Thread(target=ask, args=(name, at)) for at, name in enumerate(names)]
    live.arm(f"{stage}-waits", seconds=1.0, requests=len(names))
    for thread in threads:
        thread.start()
    live.entered(stage)
    abort(live, names[0])
    for thread in threads:
        thread.join(30)
    aborted, stayed = ended[names[0]], ended[names[1]]
    assert aborted["meta_info"]["finish_reason"]["type"] == "abort"
    tokens = aborted["output_ids"]
    assert 0 < len(tokens) < LONG
    assert tokens == live.expected_long[0][: len(tokens)]
    assert stayed["output_ids"] == live.expected_long[1]
    recovered = live.recovered()
    live.at_rest()
    note(
        Outcome(
            f"a request is aborted during {stage}",
            "it ends with the tokens so far; the other request gets plain decoding's answer",
            "finish reason `abort`",
            recovered,
            0,
            1,
        )
    )


def test_clients_that_disconnect_in_storms(live: Live, note: Note) -> None:
    """Each sends a request, reads a little of the stream or nothing, and is gone."""
    live.served.pool.use(live.served)
    draws = Random(7)
    waits = [draws.choice([0.0, 0.01, 0.05, 0.2]) for _ in range(CLIENTS)]
    with ThreadPoolExecutor(20) as threads:
        survivor = threads.submit(live.ask, 2, LONG)
        list(threads.map(lambda n: _leaves(live, n, waits[n]), range(CLIENTS)))
        assert survivor.result() == live.expected_long[2]
    began = time.monotonic()
    await_that(lambda: live.running() == 0, "requests of clients that left still run")
    recovered = time.monotonic() - began + live.recovered()
    live.lossless()
    live.at_rest()
    note(
        Outcome(
            f"{CLIENTS} clients send a request and disconnect",
            "their requests are aborted; a connected client gets plain decoding's answer",
            "finish reason `abort`",
            recovered,
            0,
            1,
        )
    )


def _leaves(live: Live, number: int, wait_s: float) -> None:
    sampling = {"temperature": 0.0, "max_new_tokens": LONG, "ignore_eos": True}
    ask = {"input_ids": PROMPTS[number % 12], "sampling_params": sampling, "stream": True}
    body = json.dumps(ask).encode()
    url = httpx.URL(live.served.process.spec.url)
    with socket.create_connection((url.host, url.port), timeout=30) as connection:
        head = f"POST /generate HTTP/1.1\r\nHost: {url.host}\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        if wait_s:
            connection.recv(1)
            time.sleep(wait_s)


def test_more_requests_than_slots_wait(live: Live, note: Note) -> None:
    live.served.pool.use(live.served)
    turns = [at % len(PROMPTS) for at in range(3 * SLOTS)]
    answers = live.served.each(lambda at: {"ids": live.ask(at)}, turns, len(turns))
    assert [each["ids"] for each in answers] == [live.expected[at] for at in turns]
    recovered = live.recovered()
    live.at_rest()
    note(
        Outcome(
            f"{len(turns)} requests at once for {SLOTS} slots and a pool of {POOL} tokens",
            "requests without a slot wait",
            "`sglang:num_queue_reqs`",
            recovered,
            0,
            len(turns),
        )
    )


def test_requests_that_outgrow_the_pool_are_retracted(live: Live, note: Note) -> None:
    """They come a few at a time, so each finds room; their answers together are twice the pool."""
    live.served.pool.use(live.served)
    turns = [at % len(PROMPTS) for at in range(SLOTS)]
    assert sum(len(PROMPTS[at]) + LONG for at in turns) > 1.8 * POOL
    before, asked = live.count(RETRACTED), 0
    deadline = time.monotonic() + LIMIT_S
    while live.count(RETRACTED) == before:
        assert time.monotonic() < deadline, "no request was retracted"
        live.served.flush_cache()
        with ThreadPoolExecutor(SLOTS) as threads:
            answers = [threads.submit(_later, live, n, at) for n, at in enumerate(turns)]
            found = [each.result() for each in answers]
        for tokens, at in zip(found, turns, strict=True):
            assert tokens == live.expected_long[at][: len(tokens)]
            assert len(tokens) == LONG or tokens[-1] == EOS
        asked += len(turns)
    recovered = live.recovered()
    live.at_rest()
    note(
        Outcome(
            f"{len(turns)} requests grow to twice the pool's {POOL} tokens",
            "some are retracted and restarted later; all answers are plain decoding's",
            f"`{RETRACTED}`",
            recovered,
            0,
            asked,
        )
    )


def _later(live: Live, number: int, at: int) -> list[int]:
    """The answer to prompt `at`, asked for in its turn.

    SGLang keeps room to the end for a request that ignores the end token; this one does not.
    """
    time.sleep(0.03 * (number // 3))
    return list(live.served.generate(PROMPTS[at], LONG)["output_ids"])


def test_a_prompt_that_no_pool_holds(live: Live, note: Note) -> None:
    """It is refused by name while its neighbours are answered."""
    live.served.pool.use(live.served)
    prompt = [5 + at % 200 for at in range(POOL + 8)]
    body = {"input_ids": prompt, "sampling_params": {"temperature": 0.0, "max_new_tokens": 8}}
    with ThreadPoolExecutor(4) as threads:
        asked = [threads.submit(live.ask, at, LONG) for at in range(3)]
        refused = live.served.request("POST", "/generate", json=body)
        assert [each.result() for each in asked] == live.expected_long[:3]
    assert refused.status_code == 400, refused.text
    assert "exceeds the maximum allowed length" in refused.text
    recovered = live.recovered()
    live.at_rest()
    note(
        Outcome(
            f"a prompt of {len(prompt)} tokens for a pool of {POOL}",
            "it is refused; other requests are answered",
            "status 400",
            recovered,
            0,
            3,
        )
    )


@pytest.mark.slow
def test_the_gauge_of_used_tokens_is_late_and_no_leak(live: Live) -> None:
    """After a health check, a prompt of one token, it may say 1 while nothing is held.

    SGLang writes it with what it logs, and at rest every 30 s.
    """
    assert live.served.healthy()
    live.at_rest()
    await_that(lambda: live.count("sglang:num_used_tokens") == 0, "it stays", limit_s=60)
    live.at_rest()


@pytest.mark.parametrize("prompt", [40, POOL - 60])
def test_an_answer_that_fills_the_pool_ends_by_length(live: Live, note: Note, prompt: int) -> None:
    """As plain decoding ends it; a step's room, two windows, stays free behind it."""
    ids = [5 + 3 * i % 200 for i in range(prompt)]
    sampling = {"temperature": 0.0, "max_new_tokens": 4000 - prompt, "ignore_eos": True}
    answer = live.served.request(
        "POST", "/generate", json={"input_ids": ids, "sampling_params": sampling}
    )
    assert answer.status_code == 200, answer.text[:300]
    told = answer.json()["meta_info"]
    assert told["finish_reason"]["type"] == "length"
    assert POOL - 40 < prompt + told["completion_tokens"] < POOL
    recovered = live.recovered()
    live.at_rest()
    if prompt == 40:
        note(
            Outcome(
                f"a request asks for more tokens than the pool of {POOL} holds",
                "its answer ends when the pool is full but for one step",
                "finish reason `length`",
                recovered,
                0,
                1,
            )
        )

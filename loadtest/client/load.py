"""Closed-loop load: a fixed number of users that send the next prompt after each answer.

Throughput of a round is counted while all users are busy (`measure.measure_cell`). In the drain at
its end fewer and fewer answers run, so the load is below that number of users. With answers of one
length plain decoding has no drain, as all end in one step. Speculation has a long one, as easy
answers end early. `whole_tokens_per_s` includes the drain.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from sglang_dspark.loadtest.client.client import Sampling, SGLangClient
from sglang_dspark.loadtest.client.measure import Measurement, measure_cell
from sglang_dspark.loadtest.client.metrics import Completion
from sglang_dspark.loadtest.client.records import Header, Record

_BEAT_S = 0.01


@dataclass(frozen=True)
class Answer:
    """One request: when it was sent and when its answer was complete, s from the round's start."""

    sent: float
    ended: float
    done: Completion


@dataclass(frozen=True)
class Round:
    """One pass over the prompts: answers in the prompts' order, the round's length in seconds, and
    the figures of the time when all users were busy."""

    users: int
    completions: tuple[Completion, ...]
    seconds: float
    busy: Measurement

    @classmethod
    def of(
        cls, users: int, answers: Sequence[Answer], seconds: float, lags: Sequence[float] = ()
    ) -> Round:
        """Build a round from all its answers. lags: samples of the client's timer lag, s."""
        p50, p99, last = np.percentile(lags or [0.0], [50, 99, 100]).tolist()
        header = Header(0, 1, 0.0, "", {"p50": 1e3 * p50, "p99": 1e3 * p99, "max": 1e3 * last})
        records = [_record(index, answer) for index, answer in enumerate(answers)]
        busy = measure_cell(header, records, users)
        return cls(users, tuple(answer.done for answer in answers), seconds, busy)

    @property
    def tokens_per_s(self) -> float:
        """Return output tokens/s of all users while all were busy, prefill included."""
        return self.busy.tokens_per_s

    @property
    def whole_tokens_per_s(self) -> float:
        """Return output tokens/s of all users from the first request to the last answer."""
        return sum(done.tokens for done in self.completions) / self.seconds


async def closed_loop(
    client: SGLangClient,
    requests: Sequence[tuple[str | Sequence[int], Sampling]],
    users: int,
    on_done: Callable[[Completion], None] | None = None,
) -> Round:
    """Send every request once, at most `users` at a time.

    Raises DSparkError as the client does, after ending the other requests.
    """
    answers: dict[int, Answer] = {}
    lags: list[float] = []
    waiting = iter(enumerate(requests))
    gc.collect()
    began = time.perf_counter()

    async def user() -> None:
        for index, (prompt, sampling) in waiting:
            sent = time.perf_counter() - began
            done = await client.complete(prompt, sampling)
            answers[index] = Answer(sent, time.perf_counter() - began, done)
            if on_done is not None:
                on_done(done)

    pulse = asyncio.create_task(_beat(lags))
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(users, len(requests))):
                group.create_task(user())
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None  # the first user's failure ended the others
    finally:
        pulse.cancel()
    seconds = time.perf_counter() - began
    return Round.of(users, [answers[i] for i in range(len(requests))], seconds, lags)


async def _beat(lags: list[float]) -> None:
    """Record by how much a timer is late, until cancelled."""
    while True:
        before = time.perf_counter()
        await asyncio.sleep(_BEAT_S)
        lags.append(max(0.0, time.perf_counter() - before - _BEAT_S))


def _record(index: int, answer: Answer) -> Record:
    done = answer.done
    return Record(
        index=index,
        prompt="",
        domain="",
        outcome="ok",
        scheduled=None,
        sent=answer.sent,
        ended=answer.ended,
        at=tuple(answer.sent + chunk.at for chunk in done.chunks),
        tokens=tuple(chunk.tokens for chunk in done.chunks),
        prompt_tokens=done.prompt_tokens,
        status=200,
        finish_reason=done.finish_reason,
        spec=done.spec,
    )

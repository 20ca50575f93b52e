"""State of a running cell, shared by the users of one load-generating process.

Distributes the requests, keeps the clock, and measures how late the process itself is: a greenlet
sleeps 10 ms at a time and records the overshoot. A cause of delay (a full core, too many streams,
the garbage collector) delays the timestamps of tokens by the same time.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import gevent
import numpy as np
from gevent.event import Event

from sglang_dspark.loadtest.client.cell import CellPlan
from sglang_dspark.loadtest.client.records import Header, Outcome, Record
from sglang_dspark.loadtest.client.schedule import Arrival
from sglang_dspark.loadtest.client.stream import Answer

_BEAT_S = 0.01


@dataclass
class Pending:
    """A request without an outcome yet. aborted: whether the client has sent `/abort_request`."""

    arrival: Arrival
    sent: float | None = None
    status: int = 0
    aborted: bool = False
    answer: Answer = field(default_factory=Answer)


class LiveCell:
    """The cell's state in this process. Users wait for `begin`, when all of them exist."""

    def __init__(self, plan: CellPlan, worker: int, workers: int, on_finish: Callable[[], None]):
        """Set up this process's share. on_finish: called when it is answered, or time is over."""
        self.plan = plan
        self._worker, self._workers = worker, workers
        self._share = plan.schedule.share(worker, workers)
        self._waiting: Iterator[Arrival] = iter(self._share)
        self._pending: dict[int, Pending] = {}
        self._records: list[Record] = []
        self._lags: list[float] = []
        self._on_finish = on_finish
        self._started = Event()
        self._began = self._began_unix = 0.0

    def begin(self) -> None:
        """Start the clock and release the users; a second call has no effect."""
        if self._started.is_set():
            return
        gc.collect()
        gc.freeze()  # exempts loaded objects: collections within the cell are short
        self._began_unix, self._began = time.time(), time.perf_counter()
        gevent.spawn(self._beat)
        gevent.spawn_later(self.plan.limit_s, self._on_finish)
        self._started.set()
        if not self._share:
            self._on_finish()

    def now(self) -> float:
        """Return the seconds since the cell's start."""
        return time.perf_counter() - self._began

    def requests(self) -> Iterator[Pending]:
        """Yield the requests of one user, each when it is due. Pass each to `keep` at its end."""
        self._started.wait()
        for arrival in self._waiting:
            pending = self._pending[arrival.index] = Pending(arrival)
            if arrival.at is not None:
                gevent.sleep(max(0.0, arrival.at - self.now()))
            pending.sent = self.now()
            yield pending

    def keep(self, pending: Pending, outcome: Outcome, error: str) -> Record:
        """Record the outcome of a request that has just ended."""
        del self._pending[pending.arrival.index]
        record = self._record(pending, outcome, error)
        self._records.append(record)
        if len(self._records) == len(self._share):
            self._on_finish()
        return record

    def result(self) -> tuple[Header, list[Record]]:
        """Return all records, with the requests unanswered or unsent at the cell's end."""
        self._started.clear()
        stopped = "the cell was stopped"
        unsent = [Pending(arrival) for arrival in self._waiting]
        left = [
            self._record(each, "unsent" if each.sent is None else "cut", stopped)
            for each in (*self._pending.values(), *unsent)
        ]
        p50, p99, last = np.percentile(self._lags or [0.0], [50, 99, 100]).tolist()
        header = Header(
            worker=self._worker,
            workers=self._workers,
            began_unix=self._began_unix,
            fingerprint=self.plan.schedule.fingerprint(),
            lag_ms={"p50": 1e3 * p50, "p99": 1e3 * p99, "max": 1e3 * last},
        )
        return header, sorted([*self._records, *left], key=lambda record: record.index)

    def _record(self, pending: Pending, outcome: Outcome, error: str) -> Record:
        arrival, answer, sent = pending.arrival, pending.answer, pending.sent
        prompt = self.plan.prompts[arrival.prompt]
        return Record(
            index=arrival.index,
            prompt=prompt.id,
            domain=prompt.domain,
            outcome=outcome,
            scheduled=arrival.at,
            sent=sent,
            ended=None if sent is None else self.now(),
            at=tuple((sent or 0.0) + chunk.at for chunk in answer.chunks),
            tokens=tuple(chunk.tokens for chunk in answer.chunks),
            prompt_tokens=answer.prompt_tokens,
            status=pending.status,
            finish_reason=answer.finish_reason,
            error=error,
            spec=answer.spec,
            asked=arrival.max_new_tokens,
            loops=answer.loops,
        )

    def _beat(self) -> None:
        while self._started.is_set():
            before = time.perf_counter()
            gevent.sleep(_BEAT_S)
            self._lags.append(max(0.0, time.perf_counter() - before - _BEAT_S))

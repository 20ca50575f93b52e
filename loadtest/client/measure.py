"""One cell's figures from its records: throughput, speed per user, latencies, failures, validity.

Throughput of a closed loop is counted while all users are busy: from the first request of the last
user to the moment at which the first user has no more work. The start and the drain at the end have
no fixed concurrency. An open loop is counted from its start to the last token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from sglang_dspark.errors import DSparkError
from sglang_dspark.loadtest.client.metrics import SpecStats
from sglang_dspark.loadtest.client.records import INTENDED, Header, Outcome, Record

MAX_LAG_MS = 5.0
NAN = float("nan")


@dataclass(frozen=True)
class Spread:
    """Percentiles over requests (ITL: over tokens). p10 is the slow end of speeds. NaN if none."""

    mean: float
    p10: float
    p50: float
    p90: float
    p95: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Compute percentiles with linear interpolation; NaN values are skipped."""
        known = np.array([value for value in values if not np.isnan(value)], dtype=np.float64)
        if not len(known):
            return cls(NAN, NAN, NAN, NAN, NAN, NAN)
        p10, p50, p90, p95, p99 = np.percentile(known, [10, 50, 90, 95, 99]).tolist()
        return cls(float(known.mean()), p10, p50, p90, p95, p99)


@dataclass(frozen=True)
class Measurement:
    """The figures of one cell. Seconds, tokens/s; definitions in this module and in `records`.

    window: (begin, end) of the throughput count; failures: count by outcome, without "ok";
    lag_ms: p99 by which the client was late, its timer or its sending; void: why the cell does
    not count, "" when it does.
    """

    requests: int
    ok: int
    failures: dict[str, int]
    tokens: int
    window: tuple[float, float]
    tokens_per_s: float
    user_speed: Spread
    ttft: Spread
    itl: Spread
    tpot: Spread
    seconds: Spread
    tau: float
    spec: SpecStats
    lag_ms: float
    void: str


def merge(files: Sequence[tuple[Header, Sequence[Record]]]) -> tuple[Header, list[Record]]:
    """Merge the files of several workers onto the clock of the worker that began first.

    Raises DSparkError if a worker's file is missing or two workers had different schedules.
    """
    if not files:
        raise DSparkError("the load generator left no records; see its log")
    heads = [header for header, _ in files]
    workers = heads[0].workers
    if sorted(head.worker for head in heads) != list(range(workers)):
        raise DSparkError(f"records of {len(heads)} of {workers} load workers; see their logs")
    if len({head.fingerprint for head in heads}) > 1:
        raise DSparkError("the workers' records are of different schedules; measure again")
    first = min(heads, key=lambda head: head.began_unix)
    records = [
        _shifted(record, header.began_unix - first.began_unix)
        for header, own in files
        for record in own
    ]
    lag = {key: max(head.lag_ms[key] for head in heads) for key in first.lag_ms}
    return replace(first, worker=0, lag_ms=lag), sorted(records, key=lambda r: r.index)


def measure_cell(header: Header, records: Sequence[Record], users: int | None) -> Measurement:
    """Compute the figures of one cell. users: concurrency of a closed loop, None in an open one.

    A cell is void if the client was late by more than 5 ms at the 99th percentile, or if no request
    succeeded: its figures are then shown but never compared.
    """
    done = [record for record in records if record.ok]
    failures = Counter(r.outcome for r in records if not r.ok and r.outcome not in INTENDED)
    begin, end = _window(records, done, users)
    inside = sum(_tokens_within(record, begin, end) for record in done)
    spec = SpecStats.total(record.spec for record in done if record.spec is not None)
    lag_ms = max(header.lag_ms["p99"], _dispatch_lag_ms(records))
    return Measurement(
        requests=len(records),
        ok=len(done),
        failures=dict(sorted(failures.items())),
        tokens=sum(record.total_tokens for record in done),
        window=(begin, end),
        tokens_per_s=inside / (end - begin) if end > begin else NAN,
        user_speed=Spread.of([record.tokens_per_s for record in done]),
        ttft=Spread.of([record.ttft for record in done]),
        itl=Spread.of([gap for record in done for gap in record.itl()]),
        tpot=Spread.of([record.tpot for record in done]),
        seconds=Spread.of([record.seconds for record in done]),
        tau=spec.tau,
        spec=spec,
        lag_ms=lag_ms,
        void=_void(records, failures, lag_ms),
    )


def _window(
    records: Sequence[Record], done: Sequence[Record], users: int | None
) -> tuple[float, float]:
    """Return begin and end of the throughput count, s; the whole cell without a steady part."""
    if not done:
        return 0.0, 0.0
    last_token = max(record.at[-1] for record in done)
    sent = sorted(record.sent for record in records if record.sent is not None)
    if users is None:
        return 0.0, last_token
    whole = sent[0], last_token
    if len(sent) < 2 * users:
        return whole
    ends = [r.ended for r in records if r.ended is not None and r.ended > sent[-1]]
    begin, end = sent[users - 1], min(ends, default=sent[-1])
    return (begin, end) if end > begin else whole


def _tokens_within(record: Record, begin: float, end: float) -> float:
    """Count tokens produced from `begin` to `end`, a chunk's spread over the time since the last.

    A count at their arrival would favour the edge that just misses a wave.
    """
    total, before = 0.0, record.sent or 0.0
    for at, count in zip(record.at, record.tokens, strict=True):
        if at > before:
            total += count * max(0.0, min(at, end) - max(before, begin)) / (at - before)
        elif begin < at <= end:  # arrived together with the chunk before
            total += count
        before = at
    return total


def _dispatch_lag_ms(records: Sequence[Record]) -> float:
    """Return p99 of sent - scheduled in an open loop, ms; 0 in a closed one."""
    late = [r.sent - r.scheduled for r in records if r.sent is not None and r.scheduled is not None]
    return float(1e3 * np.percentile(late, 99)) if late else 0.0


def first_errors(records: Sequence[Record]) -> dict[str, str]:
    """Return the first message of each outcome other than "ok"."""
    return {record.outcome: record.error for record in reversed(records) if not record.ok}


def listed_failures(
    failures: Mapping[Outcome, int] | Mapping[str, int], errors: Mapping[str, str]
) -> str:
    """Format the failed requests as `6 malformed (the reason), 1 unsent`."""
    reasons = {name: f" ({errors[name]})" if errors.get(name) else "" for name in failures}
    return ", ".join(f"{count} {name}{reasons[name]}" for name, count in sorted(failures.items()))


def _void(records: Sequence[Record], failures: Counter[Outcome], lag_ms: float) -> str:
    if not any(record.ok for record in records):
        listed = listed_failures(failures, first_errors(records))
        return f"no request came through: {listed or 'none was made'}"
    if lag_ms > MAX_LAG_MS:
        return f"the client was late by {lag_ms:.1f} ms at p99, more than {MAX_LAG_MS:g} ms"
    return ""


def _shifted(record: Record, by: float) -> Record:
    """Return the record on a clock that began `by` seconds earlier; its lag does not change."""

    def move(at: float | None) -> float | None:
        return None if at is None else at + by

    return replace(
        record,
        scheduled=move(record.scheduled),
        sent=move(record.sent),
        ended=move(record.ended),
        at=tuple(at + by for at in record.at),
    )

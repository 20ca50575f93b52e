"""Compute the saved figures of a cell, `run_dir.Cell`, from its records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sglang_dspark.loadtest.client.measure import Measurement, Spread, first_errors
from sglang_dspark.loadtest.client.metrics import SpecStats
from sglang_dspark.loadtest.client.records import Record
from sglang_dspark.loadtest.client.replay import Replay
from sglang_dspark.loadtest.client.runner import CellResult
from sglang_dspark.loadtest.client.schedule import PHASES, Arrivals, Gamma, Poisson, Surge
from sglang_dspark.loadtest.sweep.answer_checks import answer_warnings
from sglang_dspark.loadtest.sweep.config import Hold
from sglang_dspark.loadtest.sweep.counters import totals_of
from sglang_dspark.loadtest.sweep.parts import Phase, Within
from sglang_dspark.loadtest.sweep.plan import PlannedCell
from sglang_dspark.loadtest.sweep.reconcile import disagreements
from sglang_dspark.loadtest.sweep.run_dir import Cell, Counters, Domain, Percentiles, known

_AT_P95 = 0.95


@dataclass(frozen=True)
class Watched:
    """The server's reports around a cell. log_tail: its log's last lines if it died."""

    before: Counters | None
    after: Counters | None
    timeline: tuple[Counters, ...]
    died: bool = False
    log_tail: str = ""


@dataclass(frozen=True)
class Sent:
    """The requests sent: the mix's name, and how many requests repeat an earlier prompt; hold:
    limits of latency to check, None without; whole: whether the answers had to have their full
    length (`ignore_eos`)."""

    mix: str
    repeats: int
    hold: Hold | None = None
    whole: bool = False


def make_cell(
    planned: PlannedCell, sent: Sent, gamma: int, attempt: int, result: CellResult, watched: Watched
) -> Cell:
    """Compute all figures of a measured cell. gamma: drafts its arm proposes a step, 0 for none."""
    found, records = result.measurement, result.records
    done = [record for record in records if record.ok]
    return Cell(
        arm=planned.arm,
        loop=planned.load.loop,
        level=planned.load.level,
        trial=planned.trial,
        order=planned.order,
        attempt=attempt,
        mix=sent.mix,
        fingerprint=result.header.fingerprint,
        started=datetime.fromtimestamp(result.header.began_unix, UTC).isoformat("T", "seconds"),
        seconds=max((record.ended or 0.0 for record in records), default=0.0),
        requests=found.requests,
        ok=found.ok,
        tokens=found.tokens,
        **_speeds(found, done),
        tau=known(found.tau),
        steps=found.spec.steps,
        accepted=found.spec.accepted,
        histogram=list(found.spec.histogram),
        step_s=_step_seconds(done),
        verify_length=_verify_length(gamma, found.spec, watched),
        domains=_domains(done),
        failures=found.failures,
        errors=first_errors(records),
        warnings=answer_warnings(done, sent.whole),
        lag_ms=found.lag_ms,
        void=_void(found, watched),
        disagreements=_disagreements(records, watched),
        **_server(watched),
        repeats=sent.repeats,
        phases=phases_of(planned.load.arrivals, records),
        within=None if sent.hold is None else within(sent.hold, planned.load.arrivals, result),
    )


def _speeds(found: Measurement, done: Sequence[Record]) -> dict[str, Any]:
    """Return the fields of a cell for throughput, speed and latency."""
    return {
        "tokens_per_s": known(found.tokens_per_s),
        "speed": percentiles(found.user_speed),
        "speeds": [speed for each in done if (speed := known(each.tokens_per_s)) is not None],
        "ttft": percentiles(found.ttft),
        "itl": percentiles(found.itl),
        "tpot": percentiles(found.tpot),
        "e2e": percentiles(found.seconds),
    }


def _server(watched: Watched) -> dict[str, Any]:
    """Return the fields of a cell that its server reported."""
    return {
        "before": watched.before,
        "after": watched.after,
        "timeline": list(watched.timeline),
        "died": watched.died,
        "log_tail": watched.log_tail,
    }


def phases_of(arrivals: Arrivals | Replay, records: Sequence[Record]) -> list[Phase]:
    """Summarise the records before, in and after a burst; empty for another load."""
    if not isinstance(arrivals, Surge):
        return []
    found = []
    for name in PHASES:
        own = [
            r for r in records if r.scheduled is not None and arrivals.phase(r.scheduled) == name
        ]
        done = [record for record in own if record.ok]
        waits = Spread.of([record.ttft for record in done])
        found.append(
            Phase(
                name=name,
                requests=len(own),
                ok=len(done),
                ttft_p50=known(waits.p50),
                ttft_p99=known(waits.p99),
                tpot_p99=known(Spread.of([record.tpot for record in done]).p99),
                e2e_p99=known(Spread.of([record.seconds for record in done]).p99),
            )
        )
    return found


def within(limits: Hold, arrivals: Arrivals | Replay, result: CellResult) -> Within | None:
    """Count the requests within the limits; None for a load without a steady rate."""
    if not isinstance(arrivals, Poisson | Gamma):
        return None
    records = result.records
    done = [record for record in records if record.ok]
    first = {r.index for r in done if _kept(1e3 * r.ttft, limits.p95_ttft_ms)}
    later = {r.index for r in done if _kept(1e3 * r.tpot, limits.p95_tpot_ms)}
    both = [record for record in done if record.index in first & later]
    begin, end = result.measurement.window
    shares = len(first) / len(records), len(later) / len(records)
    return Within(
        ttft=shares[0],
        tpot=shares[1],
        requests=len(both),
        tokens_per_s=sum(r.total_tokens for r in both) / (end - begin) if end > begin else 0.0,
        held=min(shares) >= _AT_P95,
    )


def _kept(value: float, limit: float | None) -> bool:
    """Return whether a value is within the limit; NaN (an answer of one chunk) is."""
    return limit is None or not value > limit


def percentiles(spread: Spread) -> Percentiles:
    """Convert to `Percentiles`, with null for unknown figures."""
    return Percentiles(
        mean=known(spread.mean),
        p10=known(spread.p10),
        p50=known(spread.p50),
        p90=known(spread.p90),
        p95=known(spread.p95),
        p99=known(spread.p99),
    )


def _void(found: Measurement, watched: Watched) -> str:
    if watched.died:
        return f"the server died; {found.ok} of {found.requests} requests had been answered"
    return found.void


def _step_seconds(done: Sequence[Record]) -> float | None:
    """Return decode seconds over decode steps, of all answers."""
    seconds = sum(record.at[-1] - record.at[0] for record in done)
    steps = sum(r.spec.steps if r.spec is not None else r.decode_tokens for r in done)
    return seconds / steps if steps else None


def _verify_length(gamma: int, spec: SpecStats, watched: Watched) -> float | None:
    """Return the mean drafts verified a step and request.

    Without scheduling every draft is verified. With it the server counts admitted and accepted
    drafts up to a second late. Their ratio is still right, and the client knows the accepted ones.
    """
    before, after = watched.before, watched.after
    if gamma == 0:
        return 0.0
    if before is None or after is None or not after.admitted:
        return float(gamma) if spec.steps else None
    admitted = sum(after.admitted) - sum(before.admitted)
    accepted = sum(after.accepted) - sum(before.accepted)
    if not spec.steps or (admitted and not accepted):
        return None
    return admitted / accepted * spec.accepted / spec.steps if admitted else 0.0


def _domains(done: Sequence[Record]) -> dict[str, Domain]:
    found: dict[str, Domain] = {}
    for name in sorted({record.domain for record in done}):
        own = [record for record in done if record.domain == name]
        spec = SpecStats.total(record.spec for record in own if record.spec is not None)
        found[name] = Domain(
            ok=len(own),
            speed_p50=known(Spread.of([record.tokens_per_s for record in own]).p50),
            tau=known(spec.tau),
            histogram=list(spec.histogram),
        )
    return found


def _disagreements(records: Sequence[Record], watched: Watched) -> list[str]:
    if watched.before is None or watched.after is None:
        return []
    return disagreements(records, totals_of(watched.before), totals_of(watched.after))

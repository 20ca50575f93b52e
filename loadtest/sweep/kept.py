"""From the records of a cell to the figures that are kept: `run_dir.Cell`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sglang_dspark.loadtest.client.measure import Measurement, Spread
from sglang_dspark.loadtest.client.metrics import SpecStats
from sglang_dspark.loadtest.client.records import Record
from sglang_dspark.loadtest.client.runner import CellResult
from sglang_dspark.loadtest.sweep.counters import totals_of
from sglang_dspark.loadtest.sweep.plan import PlannedCell
from sglang_dspark.loadtest.sweep.reconcile import disagreements
from sglang_dspark.loadtest.sweep.run_dir import Cell, Counters, Domain, Percentiles, known


@dataclass(frozen=True)
class Watched:
    """What the server said around a cell. log_tail: its last lines where it died within it."""

    before: Counters | None
    after: Counters | None
    timeline: tuple[Counters, ...]
    died: bool = False
    log_tail: str = ""


def make_cell(
    planned: PlannedCell, mix: str, gamma: int, attempt: int, result: CellResult, watched: Watched
) -> Cell:
    """All figures of a measured cell. gamma: drafts its arm proposes a step, 0 for none."""
    found, records = result.measurement, result.records
    done = [record for record in records if record.ok]
    return Cell(
        arm=planned.arm,
        loop=planned.load.loop,
        level=planned.load.level,
        trial=planned.trial,
        order=planned.order,
        attempt=attempt,
        mix=mix,
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
        errors={each.outcome: each.error for each in reversed(records) if not each.ok},
        lag_ms=found.lag_ms,
        void=_void(found, watched),
        died=watched.died,
        log_tail=watched.log_tail,
        disagreements=_disagreements(records, watched),
        before=watched.before,
        after=watched.after,
        timeline=list(watched.timeline),
    )


def _speeds(found: Measurement, done: Sequence[Record]) -> dict[str, Any]:
    """The fields of a cell that say how fast it was."""
    return {
        "tokens_per_s": known(found.tokens_per_s),
        "speed": percentiles(found.user_speed),
        "speeds": [speed for each in done if (speed := known(each.tokens_per_s)) is not None],
        "ttft": percentiles(found.ttft),
        "itl": percentiles(found.itl),
        "tpot": percentiles(found.tpot),
        "e2e": percentiles(found.seconds),
    }


def percentiles(spread: Spread) -> Percentiles:
    """The same figures, null for what is not known."""
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
    """Decoding seconds over decoding steps, of all answers."""
    seconds = sum(record.at[-1] - record.at[0] for record in done)
    steps = sum(r.spec.steps if r.spec is not None else r.decode_tokens for r in done)
    return seconds / steps if steps else None


def _verify_length(gamma: int, spec: SpecStats, watched: Watched) -> float | None:
    """Mean drafts verified a step and request.

    Without scheduling every draft is. With it the server counts admitted and accepted drafts, up
    to a second late; their ratio is not affected by that, and the client knows what was accepted.
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

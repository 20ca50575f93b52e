"""Tables of a sweep's report, as texts: comparisons, latencies, failures, provenance."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sglang_dspark.loadtest.client.metrics import SpecStats
from sglang_dspark.loadtest.report.data import Run, pooled, verified_drafts
from sglang_dspark.loadtest.report.model_error import MISSED, ModelError
from sglang_dspark.loadtest.sweep.holding import said_limits
from sglang_dspark.loadtest.sweep.run_dir import Cell, Interval, Percentiles


@dataclass(frozen=True)
class Table:
    """A table of texts. numeric: columns after the first are figures, right-aligned."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    numeric: bool = True


def speeds(run: Run) -> list[Table]:
    """Tabulate throughput and speed per user by arm and load, closed loop and open."""
    found = []
    for loop, title in (("closed", "Closed loop"), ("open", "Open loop")):
        unit = "users" if loop == "closed" else "requests/s"
        rows = [
            [
                name,
                f"{level.level:g}",
                _interval(level.tokens_per_s, 1),
                _interval(level.speed_p50, 1),
                _interval(level.speed_p10, 1),
                _number(level.tau, 2),
                _number(level.verify_length, 2),
                f"{level.trials}" + (f" (+{level.void} void)" if level.void else ""),
            ]
            for name in run.arms
            for level in run.levels(name, loop)  # type: ignore[arg-type]
        ]
        head = ["arm", unit, "tokens/s", "tokens/s/user", "slowest tenth", "tau", "verify length"]
        if rows:
            found.append(Table(f"{title}: speed (95% interval)", [*head, "trials"], rows))
    return found


def ratios(run: Run) -> Table | None:
    """Tabulate paired ratios at each load, throughput and speed per user side by side."""
    by_place: dict[tuple[str, str, str], dict[str, str]] = {}
    for each in run.summary.ratios:
        unit = "requests/s" if each.loop == "open" else "user" if each.level == 1 else "users"
        place = (each.over, each.under, f"{each.level:g} {unit}")
        said = _bounds(each.low, each.mid, each.high, 2) + "x"
        winner = f"{each.winner} faster" if each.winner else "no winner"
        by_place.setdefault(place, {})[each.what] = f"{said}, {winner}"
    rows = [
        [f"{over} / {under}", at, said.get("tokens_per_s", "-"), said.get("speed_p50", "-")]
        for (over, under, at), said in by_place.items()
    ]
    if not rows:
        return None
    return Table(
        "Paired ratios at equal load", ["arms", "at", "throughput", "speed per user"], rows
    )


def matched(run: Run) -> Table | None:
    """Tabulate speed per user at matched throughput."""
    rows = []
    for each in run.summary.matched:
        pair = f"{each.over} / {each.under}"
        for level in each.levels:
            ratio = _bounds(level.low, level.mid, level.high, 2) + "x"
            rows.append([pair, f"{level.tokens_per_s:.0f}", f"{level.level:g}", ratio])
        if each.mid is not None:
            ratio = _bounds(each.low, each.mid, each.high, 2) + "x"
            rows.append([pair, "all levels", "", ratio])
    if not rows:
        return None
    head = ["arms", "tokens/s of both", "users of the second", "speed per user, ratio"]
    return Table("Speed per user at matched throughput", head, rows)


def capacities(run: Run) -> list[Table]:
    """Tabulate the goodput of each arm under each service level (`sla.capacity`)."""
    found = []
    for sla in run.summary.slas:
        limits = (
            ("p50 speed at least", sla.speed_p50, "tokens/s/user"),
            ("p10 speed at least", sla.speed_p10, "tokens/s/user"),
            ("TTFT p95 at most", sla.ttft_p95, "s"),
        )
        said = ", ".join(f"{name} {value:g} {unit}" for name, value, unit in limits if value)
        rows = [
            [
                arm.arm,
                f"{arm.tokens_per_s:.1f}" if arm.kind != "infeasible" else "-",
                f"{arm.load:.3g}" if arm.kind != "infeasible" else "-",
                arm.kind,
                arm.why,
            ]
            for arm in sla.arms
        ]
        head = ["arm", "tokens/s", "users", "kind", "what limits it"]
        found.append(Table(f"Goodput under the service level: {said}", head, rows))
    return found


def hold(run: Run) -> Table | None:
    """Tabulate each arm's highest arrival rate within the limits of latency, and its goodput."""
    found = run.summary.hold
    if found is None:
        return None
    rows = [
        [
            arm.arm,
            "-" if arm.rate is None else f"{arm.rate:g}",
            "-" if arm.missed is None else f"{arm.missed:g}",
            _number(arm.goodput, 1),
            _number(arm.tokens_per_s, 1),
            arm.kind,
            str(arm.probes),
        ]
        for arm in found.arms
    ]
    head = ["arm", "requests/s held", "missed at", "goodput, tokens/s", "of", "kind", "probes"]
    limits = said_limits(found.p95_ttft_ms, found.p95_tpot_ms)
    return Table(f"Arrival rate held with {limits}", head, rows)


def bursts(run: Run) -> list[Table]:
    """Tabulate latencies before, in and after each burst, medians over the trials, ms."""
    found = []
    for burst in run.summary.bursts:
        rows = [
            [
                arm.arm,
                phase.name,
                f"{phase.ok} of {phase.requests}",
                *(
                    _number(None if value is None else 1e3 * value, 1)
                    for value in (phase.ttft_p50, phase.ttft_p99, phase.tpot_p99, phase.e2e_p99)
                ),
            ]
            for arm in burst.arms
            for phase in arm.phases
        ]
        head = ["arm", "phase", "answered", "TTFT p50", "TTFT p99", "TPOT p99", "whole p99"]
        title = f"A burst at {burst.level:g} requests/s on average: latency, ms"
        found.append(Table(title, head, rows))
    return found


def latencies(run: Run) -> list[Table]:
    """Tabulate TTFT, TPOT, ITL, end-to-end by arm and load, ms, medians over the trials."""
    columns: tuple[tuple[str, Callable[[Cell], Percentiles], str], ...] = (
        ("TTFT p50", lambda c: c.ttft, "p50"),
        ("p95", lambda c: c.ttft, "p95"),
        ("p99", lambda c: c.ttft, "p99"),
        ("TPOT p50", lambda c: c.tpot, "p50"),
        ("p95", lambda c: c.tpot, "p95"),
        ("ITL p50", lambda c: c.itl, "p50"),
        ("p99", lambda c: c.itl, "p99"),
        ("whole p50", lambda c: c.e2e, "p50"),
        ("p95", lambda c: c.e2e, "p95"),
    )
    found = []
    for loop, title in (("closed", "Closed loop"), ("open", "Open loop")):
        rows = []
        for name in run.arms:
            for level in run.levels(name, loop):  # type: ignore[arg-type]
                cells = [c for c in run.good(name) if (c.loop, c.level) == (loop, level.level)]
                texts = [_milliseconds(cells, get, part) for _, get, part in columns]
                rows.append([name, f"{level.level:g}", *texts])
        if rows:
            unit = "users" if loop == "closed" else "requests/s"
            head = ["arm", unit, *(title for title, _, _ in columns)]
            found.append(Table(f"{title}: latency, ms (median over trials)", head, rows))
    return found


def acceptance(run: Run) -> Table | None:
    """Tabulate tau by domain and arm: accepted tokens a verify step, bonus included."""
    domains = sorted({name for cell in run.good() for name in cell.domains})
    rows = []
    for name in run.arms:
        if not run.arm(name).gamma:
            continue
        cells = run.good(name)
        parts = [
            pooled(cell.domains[d].histogram for cell in cells if d in cell.domains)
            for d in domains
        ]
        if any(map(sum, parts)):
            whole = pooled(cell.histogram for cell in cells)
            rows.append([name, str(run.arm(name).gamma), *map(_tau, [*parts, whole])])
    if not rows:
        return None
    return Table("tau by kind of prompt", ["arm", "gamma", *domains, "all"], rows)


def accepted_positions(run: Run) -> Table | None:
    """Tabulate acceptance by kind of prompt and position, under AIPerf's names.

    Token-weighted acceptance length is tau; a position's share is of all steps, and counts those
    whose drafts up to it were all accepted.
    """
    deepest = max((run.arm(name).gamma for name in run.arms), default=0)
    rows = []
    for name in run.arms:
        cells, gamma = run.good(name), run.arm(name).gamma
        domains = sorted({domain for cell in cells for domain in cell.domains}) if gamma else []
        for domain in domains:
            found = pooled(c.domains[domain].histogram for c in cells if domain in c.domains)
            if not sum(found):
                continue
            steps = SpecStats(sum(found), sum(n * k for n, k in enumerate(found)), tuple(found))
            shares = [f"{share:.1%}" for share in steps.acceptance(gamma)]
            shares += ["-"] * (deepest - gamma)
            rows.append([name, domain, f"{steps.steps}", f"{steps.tau:.2f}", *shares])
    head = ["arm", "prompts", "spec decode steps", "token-weighted acceptance length"]
    head += [f"position {k}" for k in range(1, deepest + 1)]
    return Table("Acceptance by kind of prompt and position", head, rows) if rows else None


def verified(run: Run) -> Table | None:
    """Tabulate, by arm, the share accepted of the drafts that the target verified."""
    rows = []
    for name in run.arms:
        found = verified_drafts(run, name)
        if found is not None:
            whole, accepted = sum(found.admitted), sum(found.accepted)
            counts = [f"{whole:.0f}", f"{accepted:.0f}", f"{accepted / whole:.1%}"]
            rows.append([name, str(run.arm(name).gamma), *counts])
    head = ["arm", "gamma", "drafts verified", "accepted", "share"]
    return Table("Of the drafts verified, accepted", head, rows) if rows else None


def troubles(run: Run) -> Table | None:
    """Tabulate void cells, failed requests, disagreements with the server's counters."""
    rows = [[note] for note in run.summary.notes]
    return Table("What went wrong", ["note"], rows, numeric=False) if rows else None


def model_check(errors: Sequence[ModelError]) -> Table | None:
    """Tabulate the interactive page's model against the measurements, arm by arm."""
    rows = [
        [
            each.arm,
            str(each.users),
            f"{each.found:.1f}",
            f"{each.seen:.1f}",
            f"{each.error:+.1%}",
            f"{each.drafts:.2f}",
            _number(each.verify_length, 2),
            "missed" if each.missed else "",
        ]
        for each in errors
    ]
    head = ["arm", "users", "model tokens/s", "measured", "error"]
    head += ["model verify length", "measured", f"off by more than {MISSED:.0%}"]
    return Table("The model against what was measured", head, rows) if rows else None


def tables_used(run: Run) -> Table:
    """Tabulate the arms with their drafters and tables, and the hashes of those."""
    rows = []
    for arm in run.info.arms:
        rows.append([arm.name, "about", arm.about])
        if arm.drafter is not None:
            digest = f" (weights {arm.drafter_sha256[:16]})" if arm.drafter_sha256 else ""
            rows.append([arm.name, f"drafter, gamma {arm.gamma}", arm.drafter + digest])
        for kind, table in arm.tables.items():
            rows.append([arm.name, f"table {kind}", f"{table.path} (sha256 {table.sha256[:16]})"])
    return Table("Arms, drafters and tables", ["arm", "what", "which"], rows, numeric=False)


def _milliseconds(cells: Sequence[Cell], get: Callable[[Cell], Percentiles], part: str) -> str:
    values = [getattr(get(cell), part) for cell in cells]
    given = [value for value in values if value is not None]
    return _number(1e3 * statistics.median(given) if given else None, 1)


def _tau(histogram: Sequence[int]) -> str:
    steps = sum(histogram)
    accepted = sum(n * count for n, count in enumerate(histogram))
    return f"{1 + accepted / steps:.2f}" if steps else "-"


def _interval(found: Interval | None, digits: int) -> str:
    return "-" if found is None else _bounds(found.low, found.mid, found.high, digits)


def _bounds(low: float | None, mid: float, high: float | None, digits: int) -> str:
    if low is None or high is None:
        return f"{mid:.{digits}f}"
    return f"{mid:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"

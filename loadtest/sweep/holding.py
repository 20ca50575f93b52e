"""Plan each arm's probes for the load it holds within limits of latency, and summarize them.

A probe is a cell like any other, so a sweep that was stopped continues with the missing probes.
Open loops of the sweep itself count as probes and are not measured again.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from sglang_dspark.errors import DSparkError
from sglang_dspark.loadtest.sweep.config import Hold, SweepConfig
from sglang_dspark.loadtest.sweep.hold import Bracket, Probe, bracket, next_rate
from sglang_dspark.loadtest.sweep.parts import HoldArm, HoldSummary
from sglang_dspark.loadtest.sweep.plan import PlannedCell, rate_of, steady_load
from sglang_dspark.loadtest.sweep.run_dir import Cell, Pilot

_START = 0.5  # of the baseline's throughput
_FIELDS = ("p95_ttft_ms", "p95_tpot_ms")
_FORM = "p95_ttft_ms<=500,p95_tpot_ms<=60"


def parse_hold(text: str, known: Hold | None = None) -> Hold:
    """Read `p95_ttft_ms<=500,p95_tpot_ms<=60`, or one of both; other fields are those of `known`.

    Raises DSparkError for anything else.
    """
    limits: dict[str, float] = {}
    for part in "".join(text.split()).split(","):
        name, _, value = part.partition("<=")
        try:
            limit = float(value)
        except ValueError:
            limit = 0.0
        if name not in _FIELDS or name in limits or not 0 < limit < float("inf"):
            raise DSparkError(f"--hold {text!r}: {part!r} is no limit; write {_FORM}")
        limits[name] = limit
    other = {} if known is None else known.model_dump(exclude=set(_FIELDS))
    return Hold.model_validate({**other, **limits})


def next_probes(
    config: SweepConfig, pilot: Pilot, cells: Sequence[Cell], first: int
) -> list[PlannedCell]:
    """Plan one more rate of each arm whose bracket is too wide. first: place of the first probe."""
    hold = config.hold
    if hold is None:
        return []
    planned: list[PlannedCell] = []
    measured = {cell.name for cell in cells}
    for arm in config.names:
        rate = next_rate(_probes(cells, arm), rate_of(pilot, _START), hold.probes, hold.narrow)
        if rate is None:
            continue
        load = steady_load(config.open, pilot, rate, hold.probe_seconds, hold.requests)
        probe = PlannedCell(arm, load, 0, first + len(planned))
        if probe.name not in measured:  # a void probe would be planned again and again
            planned.append(probe)
    return planned


def held(config: SweepConfig, cells: Sequence[Cell]) -> HoldSummary:
    """Summarize the load that each arm holds. Raises DSparkError if the sweep has no limits."""
    if config.hold is None:
        raise DSparkError("the sweep has no limits to hold")
    limits = config.hold
    return HoldSummary(
        p95_ttft_ms=limits.p95_ttft_ms,
        p95_tpot_ms=limits.p95_tpot_ms,
        arms=[_arm(limits, cells, name) for name in config.names],
    )


def said_limits(ttft_ms: float | None, tpot_ms: float | None) -> str:
    """Return the limits in words."""
    parts = (("TTFT", ttft_ms), ("TPOT", tpot_ms))
    given = [f"{name} up to {limit:g} ms" for name, limit in parts if limit is not None]
    return f"{' and '.join(given)} at p95"


def _steady(cells: Sequence[Cell], arm: str) -> list[Cell]:
    return [cell for cell in cells if cell.arm == arm and not cell.void and cell.within is not None]


def _probes(cells: Sequence[Cell], arm: str) -> list[Probe]:
    """List an arm's probes by rate; a rate held only if it held in every trial."""
    own = _steady(cells, arm)
    return [
        Probe(rate, all(c.within.held for c in own if c.within is not None and c.level == rate))
        for rate in sorted({cell.level for cell in own})
    ]


def _arm(limits: Hold, cells: Sequence[Cell], name: str) -> HoldArm:
    probes = _probes(cells, name)
    found = bracket(probes)
    at = [cell for cell in _steady(cells, name) if cell.level == found.held]
    goodputs = [cell.within.tokens_per_s for cell in at if cell.within is not None]
    rates = [cell.tokens_per_s for cell in at if cell.tokens_per_s is not None]
    goodput = statistics.fmean(goodputs) if goodputs else None
    return HoldArm(
        arm=name,
        kind=found.kind,
        rate=found.held,
        missed=found.missed,
        goodput=goodput,
        tokens_per_s=statistics.fmean(rates) if rates else None,
        probes=len(probes),
        said=_said(limits, name, found, goodput),
    )


def _said(limits: Hold, name: str, found: Bracket, goodput: float | None) -> str:
    what = said_limits(limits.p95_ttft_ms, limits.p95_tpot_ms)
    if found.held is None and found.missed is None:
        return f"{name}: no probe of {what} counts."
    if found.held is None:
        return f"{name} does not hold {what}, not at {found.missed:g} requests/s either."
    end = "missed at none that was tried" if found.missed is None else f"not {found.missed:g}"
    return (
        f"{name} holds {found.held:g} requests/s ({end}) with {what}: "
        f"{goodput or 0.0:.1f} tokens/s of goodput."
    )

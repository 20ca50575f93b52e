"""Summarize each arm's latencies before, in and after a burst of arrivals, over all trials."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from sglang_dspark.loadtest.client.schedule import PHASES, PhaseName
from sglang_dspark.loadtest.sweep.parts import BurstArm, BurstSummary, Phase
from sglang_dspark.loadtest.sweep.run_dir import Cell


def bursts(names: Sequence[str], cells: Sequence[Cell]) -> list[BurstSummary]:
    """Summarise bursts by load, arms in the order of `names`. cells: those that count."""
    of_bursts = [cell for cell in cells if cell.phases]
    found = []
    for level in sorted({cell.level for cell in of_bursts}):
        arms = []
        for name in names:
            own = [cell for cell in of_bursts if (cell.arm, cell.level) == (name, level)]
            if own:
                phases = [_over_trials(phase, own) for phase in PHASES]
                arms.append(BurstArm(arm=name, trials=len(own), phases=phases))
        found.append(BurstSummary(level=level, arms=arms))
    return found


def _over_trials(name: PhaseName, cells: Sequence[Cell]) -> Phase:
    own = [phase for cell in cells for phase in cell.phases if phase.name == name]
    return Phase(
        name=name,
        requests=sum(phase.requests for phase in own),
        ok=sum(phase.ok for phase in own),
        ttft_p50=_median([phase.ttft_p50 for phase in own]),
        ttft_p99=_median([phase.ttft_p99 for phase in own]),
        tpot_p99=_median([phase.tpot_p99 for phase in own]),
        e2e_p99=_median([phase.e2e_p99 for phase in own]),
    )


def _median(values: Sequence[float | None]) -> float | None:
    given = [value for value in values if value is not None]
    return statistics.median(given) if given else None

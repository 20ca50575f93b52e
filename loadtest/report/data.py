"""Derive a report's data from the files of a sweep's run: pooled counts, model, colours.

Pooling over trials adds counts and never averages shares. Growth of the server's counters over a
cell is `after - before`. Void cells appear in their own list only.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from sglang_dspark.common.files import FAULTS, fault
from sglang_dspark.errors import DSparkError
from sglang_dspark.loadtest.report.page_model import (
    Curve,
    LoadModel,
    Workload,
    normalised,
)
from sglang_dspark.loadtest.report.page_reference import Selection, fitted_spread
from sglang_dspark.loadtest.sweep.run_dir import (
    ArmRecord,
    Cell,
    Level,
    Loop,
    RunInfo,
    Summary,
    read_cells,
    read_run,
    read_summary,
)
from sglang_dspark.schedule.cost_table import CostTable, from_document

ASSUMED_SPREAD = 1.0
FITTED = "fitted"  # the first word of a fitted spread's source
# Okabe-Ito, which colour-blind readers can distinguish; plain decoding has the grey of the text.
GREY = "#6b7580"
_COLOURS = {
    "plain": GREY,
    "mtp1": "#E69F00",
    "mtp3": "#D55E00",
    "mtp5": "#A05195",
    "dspark": "#0072B2",
    "dspark-fixed-gamma": "#009E73",
    "dspark-static-threshold": "#CC79A7",
    "upstream-dspark": "#56B4E9",
}
# A policy has the colour of the arm that runs it; no colour has two meanings.
POLICY_COLOURS = {
    "plain": GREY,
    "fixed": _COLOURS["dspark-fixed-gamma"],
    "static": _COLOURS["dspark-static-threshold"],
    "algorithm1": "#8C564B",
    "dspark": _COLOURS["dspark"],
}
_SPARE = ("#882255", "#999933", "#332288", "#44AA99")  # of other arms
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")


@dataclass(frozen=True)
class Run:
    """A sweep's files, read."""

    folder: Path
    info: RunInfo
    cells: Sequence[Cell]
    summary: Summary

    @property
    def label(self) -> str:
        """Return the label that every picture and table must carry, "" if none."""
        return self.summary.label

    @classmethod
    def read(cls, folder: Path) -> Run:
        """Read a run. Raises DSparkError if the folder is no sweep's, or no cell counts."""
        run = cls(folder, read_run(folder), read_cells(folder), read_summary(folder))
        if not run.good():
            raise DSparkError(f"{folder} has no cell that counts: there is nothing to report")
        return run

    def good(self, arm: str | None = None, loop: Loop | None = None) -> list[Cell]:
        """List the cells that count, of one arm and loop if named."""
        return [
            cell
            for cell in self.cells
            if not cell.void and arm in (None, cell.arm) and loop in (None, cell.loop)
        ]

    def levels(self, arm: str, loop: Loop) -> list[Level]:
        """List the measured levels of an arm, ascending."""
        found = [each for each in self.summary.levels if (each.arm, each.loop) == (arm, loop)]
        return sorted((e for e in found if e.tokens_per_s), key=lambda each: each.level)

    @property
    def arms(self) -> list[str]:
        """Return the names of arms with a cell that counts, in the order of the configuration."""
        present = {cell.arm for cell in self.good()}
        return [arm.name for arm in self.info.arms if arm.name in present]

    def arm(self, name: str) -> ArmRecord:
        """Return the record of an arm."""
        return next(arm for arm in self.info.arms if arm.name == name)

    def colour(self, name: str) -> str:
        """Return the colour of an arm, the same in every figure."""
        unknown = [arm.name for arm in self.info.arms if arm.name not in _COLOURS]
        if name in _COLOURS:
            return _COLOURS[name]
        return _SPARE[unknown.index(name) % len(_SPARE)]

    def marker(self, name: str) -> str:
        """Return the matplotlib marker of an arm."""
        return _MARKERS[[arm.name for arm in self.info.arms].index(name) % len(_MARKERS)]


def pooled(histograms: Iterable[Sequence[int]]) -> list[int]:
    """Sum histograms of different lengths."""
    total: list[int] = []
    for histogram in histograms:
        total += [0] * (len(histogram) - len(total))
        for n, count in enumerate(histogram):
            total[n] += count
    return total


def survival(histogram: Sequence[int], gamma: int) -> tuple[float, ...]:
    """Return the share of steps whose first k drafts were accepted: [gamma].

    histogram[n]: steps that accepted exactly n.
    """
    steps = sum(histogram)
    return tuple(sum(histogram[k:]) / steps for k in range(1, gamma + 1))


@dataclass(frozen=True)
class Growth:
    """Growth of the scheduler's draft counters over some cells, by position: [gamma]."""

    admitted: tuple[float, ...]
    accepted: tuple[float, ...]

    @classmethod
    def of(cls, cells: Iterable[Cell]) -> Growth | None:
        """Sum over cells with counters; None if no drafts were counted."""
        pairs = [(c.before, c.after) for c in cells if c.before and c.after]
        pairs = [(before, after) for before, after in pairs if any(after.admitted)]
        admitted = _grown([(before.admitted, after.admitted) for before, after in pairs])
        accepted = _grown([(before.accepted, after.accepted) for before, after in pairs])
        return cls(admitted, accepted) if sum(admitted) > 0 else None


def verified_drafts(run: Run, name: str) -> Growth | None:
    """Return the drafts that an arm verified and accepted, over all its cells that count.

    A scheduled arm has counters; any other verifies every draft of every step. None if no draft
    was verified.
    """
    cells = run.good(name)
    gamma = run.arm(name).gamma
    grown = Growth.of(cells)
    if grown is not None or not gamma:
        return grown
    if policy_of(run.arm(name)) in ("dspark", "static"):
        return None
    histogram = pooled(cell.histogram for cell in cells)
    steps = float(sum(histogram))
    accepted = tuple(float(sum(histogram[k:])) for k in range(1, gamma + 1))
    return Growth((steps,) * gamma, accepted) if steps else None


def policy_of(arm: ArmRecord) -> str | None:
    """Return the page's policy that the arm's server runs; None if the page does not model it."""
    if arm.gamma == 0:
        return "plain"
    if "--speculative-algorithm=DSPARK" not in arm.command.replace("algorithm ", "algorithm="):
        return None
    if "DSPARK_DISABLE" in arm.environment:
        return None
    schedule = arm.config.get("schedule", {})
    if schedule.get("mode", "auto") == "static":
        return "fixed"
    return "static" if _threshold(schedule) is not None else "dspark"


def model_of(run: Run) -> LoadModel:
    """Build the model of the page. Raises DSparkError naming the data that the run lacks."""
    found = [arm for arm in run.info.arms if "costs" in arm.tables]
    if not found:
        raise DSparkError("no arm of the run kept its measured step times (table `costs`)")
    table = _cost_table(found[0])
    accepted = _acceptance(run, table.gamma)
    top = int(max(cell.level for cell in run.good(loop="closed")))
    most = max(top, min(2 * top, table.draft_requests[-1]))
    curve = Curve.of(table, most, _context(run))
    scale, speed_scale = _scales(run, curve)
    model = LoadModel(
        gamma=table.gamma,
        most=most,
        tokens=curve.tokens,
        per_request=curve.per_request,
        draft=curve.draft,
        workloads=accepted.workloads,
        acceptance_from=accepted.source,
        spread=ASSUMED_SPREAD,
        spread_from="assumed: the run did not record it",
        scale=scale,
        speed_scale=speed_scale,
    )
    return _with_spread(run, model) if accepted.free else model


def threshold_of(run: Run) -> float:
    """Return the static threshold that an arm of the run used, else 0.5."""
    given = (_threshold(arm.config.get("schedule", {})) for arm in run.info.arms)
    return next((value for value in given if value is not None), 0.5)


def _threshold(schedule: Mapping[str, object]) -> float | None:
    value = schedule.get("threshold")
    return float(value) if isinstance(value, int | float) else None


def _cost_table(arm: ArmRecord) -> CostTable:
    try:
        return from_document(arm.tables["costs"].content)
    except FAULTS as error:
        raise DSparkError(
            f"the step times of arm {arm.name} cannot be read ({fault(error)}); sweep again"
        ) from None


@dataclass(frozen=True)
class _Acceptance:
    """Workloads, their source in words, and whether (`free`) every draft was verified."""

    workloads: dict[str, Workload]
    source: str
    free: bool


def _acceptance(run: Run, gamma: int) -> _Acceptance:
    """Estimate acceptance by domain from the arms that verify every draft: only they are unbiased.

    Without such an arm, from the scheduled one at its fewest users, where it verifies most: the
    share of steps that accepted k drafts, over the share that verified k of them.
    """
    cells = [cell for name in _arms(run, "fixed") for cell in run.good(name)]
    if cells:
        source = "counted where every draft is verified"
        return _Acceptance(_workloads(cells, (1.0,) * gamma), source, True)
    for name in _arms(run, "dspark"):
        levels = run.levels(name, "closed")
        cells = [c for c in run.good(name, "closed") if levels and c.level == levels[0].level]
        grown, steps = Growth.of(cells), sum(cell.steps for cell in cells)
        if grown is not None and steps:
            source = (
                f"as the scheduled arm saw it with {levels[0].level:g} at a time, which is roughly "
                "right: what it verified it had chosen, and no arm of the run verified every draft"
            )
            verified = tuple(min(1.0, count / steps) for count in grown.admitted)
            return _Acceptance(_workloads(cells, verified), source, False)
    raise DSparkError("no arm of the run counted which drafts were verified and accepted")


def _arms(run: Run, policy: str) -> list[str]:
    """List the arms that run one of the page's policies."""
    return [arm.name for arm in run.info.arms if policy_of(arm) == policy and arm.name in run.arms]


def _workloads(cells: Sequence[Cell], verified: Sequence[float]) -> dict[str, Workload]:
    """Build a workload of each domain. verified: [gamma], share of steps that verified k drafts."""
    found = {}
    for domain in sorted({name for cell in cells for name in cell.domains}):
        parts = [cell.domains[domain] for cell in cells if domain in cell.domains]
        histogram = pooled(part.histogram for part in parts)
        if sum(histogram):
            seen = survival(histogram, len(verified))
            shares = [min(1.0, a / v) if v else 0.0 for a, v in zip(seen, verified, strict=True)]
            falling = tuple(np.minimum.accumulate(shares).tolist())
            found[domain] = Workload(float(sum(p.ok for p in parts)), falling, sum(histogram))
    return normalised(found)


def _context(run: Run) -> float:
    """Return the mean tokens that a request holds: its prompt and half of its answer."""
    cells = [c for c in run.good(loop="closed") if c.before is not None and c.after is not None]
    prompt = requests = 0.0
    for cell in cells:
        assert cell.before is not None and cell.after is not None  # noqa: PT018 - chosen above
        prompt += cell.after.prompt - cell.before.prompt
        requests += cell.after.requests - cell.before.requests
    answers = sum(cell.tokens for cell in cells) / max(1, sum(cell.ok for cell in cells))
    return (prompt / requests if requests else 0.0) + answers / 2


def _with_spread(run: Run, model: LoadModel) -> LoadModel:
    """Return the model with the confidence spread of the scheduled arms, if it can be fitted."""
    chosen = [found for name in _arms(run, "dspark") for found in _selections(run, name)]
    spread = fitted_spread(model, chosen)
    if spread is None:
        return model
    verified, accepted = (sum(getattr(c, n) for c in chosen) for n in ("verified", "accepted"))
    source = (
        f"{FITTED} to this run: of the drafts that its scheduler verified "
        f"{accepted / verified:.0%} were accepted, and so they are on the model's curve for DSpark"
    )
    return replace(model, spread=spread, spread_from=source)


def _selections(run: Run, arm: str) -> list[Selection]:
    """Read the scheduler's choice at each closed level."""
    found = []
    for level in run.levels(arm, "closed"):
        grown = Growth.of([c for c in run.good(arm, "closed") if c.level == level.level])
        if grown is not None:
            verified, accepted = sum(grown.admitted), sum(grown.accepted)
            found.append(Selection(round(level.level), verified, accepted))
    return found


def _scales(run: Run, curve: Curve) -> tuple[float, float]:
    """Return the plain arm's throughput and speed per user over those of its passes alone.

    Both are medians over levels; 1 without a plain arm.
    """
    levels = [level for name in _arms(run, "plain") for level in run.levels(name, "closed")]
    throughput, speed = [], []
    for level in levels:
        users = round(level.level)
        rate = curve.plain_rate(users)
        if level.tokens_per_s is not None:
            throughput.append(level.tokens_per_s.mid / rate)
        if level.speed_p50 is not None:
            speed.append(level.speed_p50.mid * users / rate)
    return statistics.median(throughput or [1.0]), statistics.median(speed or [1.0])


def _grown(pairs: Sequence[tuple[Sequence[float], Sequence[float]]]) -> tuple[float, ...]:
    width = max((len(after) for _, after in pairs), default=0)
    return tuple(
        sum(
            after[k] - (before[k] if k < len(before) else 0.0)
            for before, after in pairs
            if k < len(after)
        )
        for k in range(width)
    )

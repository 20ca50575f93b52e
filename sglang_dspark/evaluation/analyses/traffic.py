"""Measure confidence when traffic changes from one domain to another, on recorded steps.

The table is left as fitted, learned on online, or learned on with each request's own shift as a
server does it. Drafts are admitted by each variant's survivals, at a server's step
times, and only admitted drafts are learned from. As in `thresholds`, a shorter window yields its
part of the recorded step; the later anchors that it moves are not simulated. K uses the present
step's survivals, while a server uses those of an earlier one.

Requests are drawn anew for each replay, with replacement; all calibrations replay the same ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from sglang_dspark.errors import DSparkError
from sglang_dspark.evaluation.analyses import cells
from sglang_dspark.evaluation.analyses.analysis import Analysis, Result
from sglang_dspark.evaluation.analyses.cells import Table
from sglang_dspark.evaluation.figure_parts import bars, colour_of, legend, marker_of, new_figure
from sglang_dspark.evaluation.records import Generation
from sglang_dspark.evaluation.resampling import Estimate, Floats, Number, estimate
from sglang_dspark.evaluation.traces import DrafterFacts, Trace
from sglang_dspark.schedule.admission import admit
from sglang_dspark.schedule.budget import Counts, Gains, Workspace, search
from sglang_dspark.schedule.calibration import bin_of, logits_of
from sglang_dspark.schedule.cost_model import CostModel
from sglang_dspark.schedule.cost_table import CostTable
from sglang_dspark.schedule.gains import gains
from sglang_dspark.schedule.online import OnlineCalibration
from sglang_dspark.schedule.rehearsal import SPREAD
from sglang_dspark.schedule.sts_file import StsTable

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import RenderableType

DRAWS = 100
SETTLING = 30  # first steps of the batch at the start of the traffic, and at the change
BINS = 10
WINDOWS = ("before", "change", "after")
VARIANTS = {
    "fixed": "as fitted",
    "online": "learned online",
    "served": "online, with own shifts",
}


@dataclass(frozen=True)
class Window:
    """One part of the traffic under one calibration.

    ece: of survivals, over all replays. predicted, accepted: mean survival, share accepted.
    drafts: admitted per request and step. over_fixed: ratio of tokens/s to the fixed table's.
    """

    ece: Number
    predicted: Number
    accepted: Number
    drafts: Number
    over_fixed: Estimate


@dataclass(frozen=True)
class TrafficResult(Result):
    """variant -> window -> figures.

    fitted_on: the table's data. requests: of each domain in a replay.
    """

    analysis: ClassVar[str] = "traffic"
    label: str
    drafter: DrafterFacts
    fitted_on: str
    requests: Mapping[str, int]
    batch: int
    draws: int
    windows: Mapping[str, Mapping[str, Window]]

    def remarks(self) -> list[str]:
        """Name the domains in order, and the batch."""
        first, then = self.requests
        return [f"{first}, then {then}, {self.batch} at a time"]


@dataclass(frozen=True)
class _Request:
    """Full verify steps of a request: logits [N, gamma] float32, accepted, context [N]."""

    logits: Gains
    accepted: Counts
    context: Counts
    changed: bool  # of the second domain


class _Sums:
    """Sums over the steps of a window."""

    def __init__(self) -> None:
        self.gap, self.survival, self.label = np.zeros(BINS), 0.0, 0.0
        self.count = self.steps = self.tokens = self.admitted = 0
        self.seconds = 0.0

    def add(self, survival: Gains, accepted: Counts, lengths: Counts, seconds: float) -> None:
        """Add a step of R requests: survival [R, gamma]; the rest [R]."""
        column = np.arange(1, survival.shape[1] + 1)
        label = (accepted[:, None] >= column).astype(np.float64).ravel()
        predicted = survival.ravel().astype(np.float64)
        place = bin_of(predicted, bins=BINS, binning="width")
        self.gap += np.bincount(place, weights=predicted - label, minlength=BINS)
        self.survival += float(predicted.sum())
        self.label += float(label.sum())
        self.count += len(label)
        self.steps += len(accepted)
        self.tokens += int((1 + np.minimum(accepted, lengths)).sum())
        self.admitted += int(lengths.sum())
        self.seconds += seconds


def compute(
    label: str, trace: Trace, table: StsTable, costs: CostTable, domains: tuple[str, str],
    batch: int = 16, draws: int = DRAWS,
) -> TrafficResult:  # fmt: skip
    """Replay both domains' requests of a trace, `batch` at a time.

    table: of the trace's sampling; costs: a server's step times. Raises DSparkError for a domain
    that the trace lacks, for costs of another gamma, or if a window has no step.
    """
    if costs.gamma != trace.gamma:
        raise DSparkError(f"step times of gamma {costs.gamma}, the trace's is {trace.gamma}")
    pools = [_requests(trace, name, changed=name == domains[1]) for name in domains]
    rng = np.random.default_rng(0)
    replays: dict[str, list[dict[str, _Sums]]] = {name: [] for name in VARIANTS}
    for _ in range(draws):
        queue = [pool[i] for pool in pools for i in rng.integers(len(pool), size=len(pool))]
        for name in VARIANTS:
            replays[name].append(_replay(queue, batch, table, CostModel(costs, batch), name))
    if not all(sums.steps for each in replays["fixed"] for sums in each.values()):
        raise DSparkError(
            f"a domain ends within {SETTLING} steps of {batch} requests: give more prompts"
        )
    return TrafficResult(
        trace.target, dict(trace.settings), label, trace.drafter, table.dataset,
        {name: len(pool) for name, pool in zip(domains, pools, strict=True)}, batch, draws,
        {
            name: {
                window: _window([r[window] for r in each], [r[window] for r in replays["fixed"]])
                for window in WINDOWS
            }
            for name, each in replays.items()
        },
    )  # fmt: skip


def no_table(gamma: int) -> StsTable:
    """Return the initial table of a server without one: the head's own confidences."""
    zero, one = (0.0,) * gamma, (1.0,) * gamma
    return StsTable(
        one, {}, "nothing", 0, 0, (0,) * gamma, zero, zero, 0.0, one, {}, request_spread=SPREAD
    )


def _requests(trace: Trace, domain: str, *, changed: bool) -> list[_Request]:
    chosen = [g for g, name in zip(trace.generations, trace.domains, strict=True) if name == domain]
    found = [_request(each, trace.gamma, changed) for each in chosen]
    if not (usable := [each for each in found if len(each.accepted)]):
        raise DSparkError(
            f"the trace has no verify step of {domain!r}, only of "
            f"{', '.join(dict.fromkeys(trace.domains))}"
        )
    return usable


def _request(generation: Generation, gamma: int, changed: bool) -> _Request:
    full = [step for step in generation.steps if step.verify_len == gamma]
    told = np.array([step.confidence for step in full], np.float64).reshape(len(full), gamma)
    return _Request(
        logits_of(told).astype(np.float32),
        np.array([step.accepted for step in full], np.int64),
        np.array([step.position for step in full], np.int64),
        changed,
    )


def _calibration(table: StsTable, variant: str, batch: int) -> OnlineCalibration:
    if variant == "served":
        return OnlineCalibration([table.followed], pool_rows=batch)
    return OnlineCalibration([table.shifted])


def _replay(
    queue: Sequence[_Request], batch: int, table: StsTable, model: CostModel, variant: str
) -> dict[str, _Sums]:
    """Return the sums by window of one replay."""
    gamma = model.table.gamma
    calibration, workspace = _calibration(table, variant, batch), Workspace(batch, gamma)
    sums = {name: _Sums() for name in WINDOWS}
    since: int | None = None  # step at which the second domain began
    for t, (rows, generations, steps) in enumerate(_batches(queue, batch)):
        if since is None and any(request.changed for request, _ in steps):
            since = t
        logits = np.stack([request.logits[at] for request, at in steps])
        accepted = np.array([request.accepted[at] for request, at in steps])
        context = sum(int(request.context[at]) for request, at in steps)
        regimes = np.zeros(len(rows), np.int64)
        slots = (rows, generations) if variant == "served" else None
        confidence = calibration.confidence(logits, regimes, np.empty_like(logits), slots)
        survival = gains(confidence)
        costs = model.costs(len(rows), context)
        budget = search(survival, costs, workspace)
        limits = np.full(len(rows), budget.depth, np.int64)
        lengths = admit(survival, budget.drafts, workspace, limits=limits)
        if (window := _window_of(t, since)) is not None:
            sums[window].add(survival, accepted, lengths, budget.seconds)
        if variant != "fixed":
            kept = np.minimum(accepted, lengths)
            calibration.observe(
                logits, regimes, kept, lengths, slots, confidence if slots else None
            )
    return sums


def _window_of(t: int, since: int | None) -> str | None:
    if since is None:
        return "before" if t >= SETTLING else None
    return "change" if t < since + SETTLING else "after"


def _batches(
    queue: Sequence[_Request], batch: int
) -> Iterator[tuple[Counts, Counts, list[tuple[_Request, int]]]]:
    """Yield rows and generations [R] and each request's next step; refill free rows in order."""
    waiting = list(enumerate(queue))[::-1]
    active: dict[int, tuple[int, _Request, int]] = {}  # row -> generation, request, next step
    while waiting or active:
        for row in range(batch):
            if row not in active and waiting:
                active[row] = (*waiting.pop(), 0)
        rows = sorted(active)
        generations = np.array([active[row][0] for row in rows], np.int64)
        yield np.array(rows, np.int64), generations, [active[row][1:] for row in rows]
        for row in rows:
            generation, request, at = active.pop(row)
            if at + 1 < len(request.accepted):
                active[row] = generation, request, at + 1


def _window(each: Sequence[_Sums], fixed: Sequence[_Sums]) -> Window:
    count, steps = sum(s.count for s in each), sum(s.steps for s in each)
    gap: Floats = np.sum([s.gap for s in each], axis=0)
    rates = np.array([_rate(s) / _rate(f) for s, f in zip(each, fixed, strict=True)])
    whole = sum(s.tokens for s in each) / sum(s.seconds for s in each)
    base = sum(f.tokens for f in fixed) / sum(f.seconds for f in fixed)
    return Window(
        ece=float(np.abs(gap).sum() / count),
        predicted=sum(s.survival for s in each) / count,
        accepted=sum(s.label for s in each) / count,
        drafts=sum(s.admitted for s in each) / steps,
        over_fixed=estimate(np.array([whole / base, *rates])),
    )


def _rate(sums: _Sums) -> float:
    return sums.tokens / sums.seconds


def draw(result: TrafficResult) -> Figure:
    """Draw ECE and tokens/s over the fixed table's, by window, a line for each calibration."""
    figure = new_figure(7.6, 3.3)
    left, right = figure.subplots(1, 2)
    place = np.arange(len(WINDOWS))
    for i, (name, windows) in enumerate(result.windows.items()):
        found = [windows[window] for window in WINDOWS]
        style = {"color": colour_of(i), "marker": marker_of(i), "label": VARIANTS[name], "ms": 5}
        left.plot(place, [100 * each.ece for each in found], **style)
        over = [Estimate(*(100 * (x - 1) for x in _parts(each.over_fixed))) for each in found]
        right.errorbar(
            place + 0.06 * i, [each.value for each in over], bars(over), capsize=3, **style
        )
    left.set_ylabel("ECE of survival, %")
    left.set_ylim(bottom=0)
    right.set_ylabel("tokens/s over the fixed table's, %")
    for axes in (left, right):
        axes.set_xticks(place, [_named(window, result) for window in WINDOWS])
    legend(figure, left)
    return figure


def _named(window: str, result: TrafficResult) -> str:
    first, then = result.requests
    return {
        "before": first,
        "change": f"{then},\nfirst {SETTLING} steps",
        "after": f"{then}, later",
    }[window]


def _parts(found: Estimate) -> tuple[float, float, float]:
    return found.value, found.low, found.high


def page_tables(result: TrafficResult) -> list[Table]:
    """Tabulate ECE and its effect on tokens/s, one row for each calibration and window."""
    rows = [
        [
            VARIANTS[name],
            _named(window, result).replace("\n", " "),
            *(cells.percent(x) for x in (found.ece, found.predicted, found.accepted)),
            f"{found.drafts:.2f}",
            cells.gain(found.over_fixed),
        ]
        for name, windows in result.windows.items()
        for window, found in windows.items()
    ]
    head = ["calibration", "traffic", "ECE", "survival", "accepted", "drafts admitted"]
    return [Table([*head, "tokens/s over the fixed table's"], rows)]


def table(result: TrafficResult) -> list[RenderableType]:
    """Show the page's table in the terminal."""
    from rich.table import Table as Shown

    (found,) = page_tables(result)
    shown = Shown(title=f"{result.label}: {result.remarks()[0]}; fitted on {result.fitted_on}")
    for i, name in enumerate(found.head):
        shown.add_column(name, justify="left" if i < 2 else "right")
    for row in found.rows:
        shown.add_row(*row)
    return [shown]


ANALYSIS = Analysis(TrafficResult, "Confidence when traffic changes", draw, page_tables, table)

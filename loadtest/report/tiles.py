"""Build the tiles at the top of a sweep's report: its main results.

First the load that each arm holds, if the sweep has limits. The others are about the arm that the
sweep compares, against its rival at matched throughput (paper, Figure 7), against the baseline with
the fewest and the most users, under the first service level, and about its drafts.
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang_dspark.loadtest.report.data import Run, verified_drafts
from sglang_dspark.loadtest.sweep.holding import said_limits
from sglang_dspark.loadtest.sweep.parts import HoldSummary
from sglang_dspark.loadtest.sweep.run_dir import Compared, SlaSummary


@dataclass(frozen=True)
class Tile:
    """value: the figure; label: of what; detail: its interval and verdict, or a comparison."""

    value: str
    label: str
    detail: str


def tiles(run: Run) -> list[Tile]:
    """Build the tiles that the run has figures for, first the load that each arm holds."""
    holding = [] if run.summary.hold is None else _holding(run.summary.hold)
    if not run.summary.matched:
        return holding
    over, baseline = run.summary.matched[0].over, str(run.info.config.get("baseline", "plain"))
    found = [*holding, _matched(run), *_loads(run, over, baseline)]
    found += [_goodput(run.summary.slas[0], over, baseline)] if run.summary.slas else []
    return [tile for tile in [*found, _drafts(run, over)] if tile is not None]


def _holding(hold: HoldSummary) -> list[Tile]:
    limits = said_limits(hold.p95_ttft_ms, hold.p95_tpot_ms)
    return [
        Tile(
            f"{arm.rate:g} req/s",
            f"held by {arm.arm}: {limits}",
            f"goodput {arm.goodput or 0.0:.0f} tok/s",
        )
        for arm in hold.arms
        if arm.rate is not None
    ]


def _matched(run: Run) -> Tile | None:
    first = run.summary.matched[0]
    if first.mid is None:
        return None
    label = f"speed per user, {first.over} over {first.under} at the same throughput"
    return Tile(f"{first.mid:.2f}x", label, _verdict(first.low, first.high, "faster", "slower"))


def _loads(run: Run, over: str, baseline: str) -> list[Tile]:
    """Build the tiles of throughput with the fewest and the most users."""
    rows = [
        each
        for each in run.summary.ratios
        if (each.over, each.under) == (over, baseline)
        and (each.what, each.loop) == ("tokens_per_s", "closed")
    ]
    rows.sort(key=lambda row: row.level)
    return [_load(row) for row in (rows if len(rows) < 2 else (rows[0], rows[-1]))]


def _load(row: Compared) -> Tile:
    users = "1 user" if row.level == 1 else f"{row.level:g} users"
    label = f"throughput, {row.over} over {row.under}, {users}"
    return Tile(f"{row.mid:.2f}x", label, _verdict(row.low, row.high, "more", "less"))


def _verdict(low: float | None, high: float | None, better: str, worse: str) -> str:
    if low is None or high is None:
        return "too few trials for an interval"
    word = better if low > 1 else worse if high < 1 else "level within noise"
    return f"95%: {low:.2f} to {high:.2f}, {word}"


def _goodput(sla: SlaSummary, over: str, baseline: str) -> Tile | None:
    arms = {arm.arm: arm for arm in sla.arms if arm.kind not in ("infeasible", "unknown")}
    if over not in arms:
        return None
    limits = (
        ("median user", sla.speed_p50, "tok/s"),
        ("slowest tenth", sla.speed_p10, "tok/s"),
        ("TTFT p95", sla.ttft_p95, "s"),
    )
    said = ", ".join(f"{name} {value:g} {unit}" for name, value, unit in limits if value)
    against = f"{baseline}: {arms[baseline].tokens_per_s:.0f}" if baseline in arms else ""
    return Tile(f"{arms[over].tokens_per_s:.0f} tok/s", f"goodput of {over}: {said}", against)


def _drafts(run: Run, over: str) -> Tile | None:
    found = verified_drafts(run, over) if over in run.arms else None
    if found is None:
        return None
    share = sum(found.accepted) / sum(found.admitted)
    return Tile(f"{share:.0%}", f"of the drafts that {over} verified were accepted", "all loads")

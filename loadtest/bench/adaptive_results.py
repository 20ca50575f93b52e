"""Summarize `dspark bench adaptive`: ratios with intervals, sentences, and the figure.

The best fixed gamma has the largest mean throughput in the same trials that it is compared in. An
operator cannot make this choice beforehand, so the comparison favours the fixed gamma.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from sglang_dspark.errors import DSparkError
from sglang_dspark.evaluation.figure_parts import COLOURS, MARKERS
from sglang_dspark.intervals import Ratio, paired_ratio
from sglang_dspark.loadtest.bench.adaptive import FIXED, PLAIN, SCHEDULED, Figure
from sglang_dspark.loadtest.sweep.verdict import verdict

AGAINST_PLAIN, AGAINST_FIXED = 1.0, 0.97  # ratios that the scheduler promises

Speeds = dict[str, list[float]]  # arm -> tokens/s by trial


def as_metrics(figures: Sequence[Figure], concurrency: Sequence[int]) -> dict[str, Any]:
    """Build JSON-ready metrics by concurrency. Raises DSparkError if one has no whole trial."""
    rows = [_row(figures, users) for users in concurrency]
    return {
        "by_concurrency": rows,
        **sentences(rows),
        "promises": {"over_plain": AGAINST_PLAIN, "over_best_fixed": AGAINST_FIXED},
        "client_lag_ms": max(each.lag_ms for each in figures),
        "method": "all servers up, all but one frozen (SIGSTOP); a trial measures every arm once, "
        "next to each other; tokens/s while all users are busy",
    }


def sentences(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """Collect the verdicts of all rows, as the metrics hold them."""
    return {"verdicts": [line for row in rows for line in row["verdicts"]]}


def _row(figures: Sequence[Figure], users: int) -> dict[str, Any]:
    speeds = whole_trials(figures, users)
    taus = {name: _tau(figures, users, name) for name in speeds if name != PLAIN}
    return compared(users, speeds, taus)


def compared(users: int, speeds: Speeds, taus: Mapping[str, float | None]) -> dict[str, Any]:
    """Build a row of `by_concurrency` from the tokens/s of every arm in every trial.

    speeds: by arm, in the trials' order; taus: by arm that drafts. The row holds both, so that it
    can be recomputed from itself (`republish`).
    """
    fixed = {name: values for name, values in speeds.items() if name.startswith(FIXED)}
    best = max(fixed, key=lambda name: float(np.mean(fixed[name])))
    over_plain = paired_ratio(speeds[SCHEDULED], speeds[PLAIN])
    over_fixed = paired_ratio(speeds[SCHEDULED], fixed[best])
    what = f"throughput at {users} users"
    return {
        "concurrency": users,
        "plain": _mean(speeds[PLAIN]),
        "fixed": {name.removeprefix(FIXED): _mean(each) for name, each in fixed.items()},
        "dspark": _mean(speeds[SCHEDULED]),
        "best_fixed": best.removeprefix(FIXED),
        "over_plain": _ratio(over_plain, AGAINST_PLAIN),
        "over_best_fixed": _ratio(over_fixed, AGAINST_FIXED),
        "tau": dict(taus),
        "trials": speeds,
        "verdicts": [
            verdict("DSPARK", "plain decoding", what, over_plain),
            verdict("DSPARK", f"fixed gamma {best.removeprefix(FIXED)}", what, over_fixed),
        ],
    }


def whole_trials(figures: Sequence[Figure], users: int) -> Speeds:
    """Return tokens/s of each arm in the trials that have all arms, in the trials' order.

    Raises DSparkError if there is no such trial, or no fixed gamma.
    """
    here = [each for each in figures if each.users == users]
    arms = list(dict.fromkeys(each.arm for each in here))
    valid = {(e.trial, e.arm): e.tokens_per_s for e in here if e.tokens_per_s > 0}
    trials = sorted({each.trial for each in here})
    whole = [t for t in trials if all((t, arm) in valid for arm in arms)]
    if not whole or not any(arm.startswith(FIXED) for arm in arms):
        raise DSparkError(f"no trial at {users} users is whole; see the journal, and measure again")
    return {arm: [valid[t, arm] for t in whole] for arm in arms}


def _ratio(ratio: Ratio, promised: float) -> dict[str, Any]:
    """Return a ratio's fields. met: "yes" or "no" beyond the run's noise, else "within noise"."""
    met = "yes" if ratio.low >= promised else "no" if ratio.high < promised else "within noise"
    low, high = ratio.bounds or (None, None)
    return {
        "low": low,
        "mid": ratio.mid,
        "high": high,
        "trials": ratio.trials,
        "method": ratio.method,
        "met": met,
    }


def _mean(values: Sequence[float]) -> float:
    return float(np.exp(np.log(values).mean()))


def _tau(figures: Sequence[Figure], users: int, arm: str) -> float | None:
    taus = [e.tau for e in figures if (e.users, e.arm) == (users, arm) and e.tau is not None]
    return float(np.mean(taus)) if taus else None


def draw(metrics: Mapping[str, Any], title: str) -> Canvas:
    """Draw the throughput of all arms, and the scheduler's ratios with their intervals."""
    rows = metrics["by_concurrency"]
    figure = Canvas(figsize=(10, 4.2), layout="constrained")
    with mpl.rc_context({"font.size": 9, "legend.frameon": False}):
        left, right = figure.subplots(1, 2)
        _throughput(left, rows)
        _ratios(right, rows)
        figure.suptitle(title, fontsize=10, x=0.01, ha="left")
    return figure


def _throughput(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    users = [row["concurrency"] for row in rows]
    plain = np.array([row["plain"] for row in rows])
    for i, gamma in enumerate(rows[0]["fixed"]):
        ratio = np.array([row["fixed"][gamma] for row in rows]) / plain
        colour, marker = COLOURS[(i + 1) % 6], MARKERS[(i + 1) % len(MARKERS)]
        label = f"fixed gamma {gamma}"
        axes.plot(users, ratio, label=label, color=colour, marker=marker, ls="--", lw=1, ms=4)
    ours = np.array([row["dspark"] for row in rows]) / plain
    axes.plot(users, ours, label="scheduled", color=COLOURS[0], marker=MARKERS[0], lw=2.2)
    axes.axhline(1.0, color=COLOURS[6], lw=1, label="plain decoding")
    _over_users(axes, users)
    axes.set(ylabel="throughput over plain decoding", title="Throughput of each arm")
    axes.legend(fontsize=8)


def _ratios(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    users = np.array([row["concurrency"] for row in rows], dtype=float)
    looks = (("over_plain", "scheduled / plain", 0), ("over_best_fixed", "/ best fixed", 4))
    for key, label, colour in looks:
        found = [row[key] for row in rows]
        mid = np.array([each["mid"] for each in found])
        low = np.array([mid[i] if e["low"] is None else e["low"] for i, e in enumerate(found)])
        high = np.array([mid[i] if e["high"] is None else e["high"] for i, e in enumerate(found)])
        axes.errorbar(
            users * (0.96 if colour == 0 else 1.04),
            mid,
            yerr=[mid - low, high - mid],
            label=label,
            color=COLOURS[colour],
            marker=MARKERS[colour],
            ls="none",
            capsize=3,
        )
    axes.axhline(AGAINST_PLAIN, color=COLOURS[0], lw=1)
    axes.axhline(AGAINST_FIXED, color=COLOURS[4], lw=1, ls=":")
    _over_users(axes, [int(each) for each in users])
    axes.set(ylabel="ratio of throughputs, 95% interval", title="Promised: above the lines")
    axes.legend(fontsize=8)


def _over_users(axes: Axes, users: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(users, [str(each) for each in users])
    axes.set_xlabel("users at once")
    axes.grid(color="#e4e4e4")
    axes.spines[["top", "right"]].set_visible(False)

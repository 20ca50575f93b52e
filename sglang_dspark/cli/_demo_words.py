"""Write the texts of `dspark demo`: its steps and their time, the meaning of columns, the result.

A ratio is called faster or slower only if its 95% interval says so. One trial has no interval: then
the ratio must be off by more than `NOISE`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sglang_dspark.intervals import MIN_TRIALS, paired_ratio
from sglang_dspark.loadtest.bench.compare import OVERALL, Pair, summarise
from sglang_dspark.loadtest.sweep.plan import SERVER_START_S
from sglang_dspark.loadtest.sweep.run_dir import Summary

# About twice the standard deviation of the log of a one-trial ratio of DSPARK at the closed loads
# of a sweep: 0.05 and 0.06 in two of them.
NOISE = 1.1
PLAIN_TOKENS_PER_S = 40.0  # of one user on 2 cores; like the next only for the forecast
BUILD_S = 60.0
SELDOM = 0.5  # drafts verified a step and request, below which the scheduler chose not to draft

WORDS = (
    "tau: tokens that one verify step yields, its bonus token included",
    "TTFT: time to first token; tok/s: of one user, after the first token",
)
SWEEP_WORDS = (
    "arm: one way of serving the model, with a server of its own; per user: tokens/s that a user "
    "gets; tau: tokens a verify step; verified: drafts that the target checks in a step for each "
    "request",
    f"Of one trial a load there is no interval: a ratio within {NOISE - 1:.0%} counts as level",
)


@dataclass(frozen=True)
class Versus:
    """A ratio of speeds with its 95% interval, None if it is unknown."""

    ratio: float
    low: float | None = None
    high: float | None = None

    @property
    def word(self) -> str:
        """Return `faster`, `slower`, or `level` if noise may explain the ratio."""
        if self.low is None or self.high is None:
            low, high = self.ratio / NOISE, self.ratio * NOISE
        else:
            low, high = self.low, self.high
        return "faster" if low > 1 else "slower" if high < 1 else "level"

    def said(self, against: str, over: str = "") -> str:
        """Format the ratio, as "1.20x plain" or "level with plain (1.02x, within noise)"."""
        if self.word == "faster":
            return f"{self.ratio:.2f}x {over}{against}"
        if self.word == "slower":
            return f"slower than {against} ({self.ratio:.2f}x)"
        return f"level with {against} ({self.ratio:.2f}x, within noise)"


@dataclass(frozen=True)
class Crowd:
    """Result of a load test at its most users, against plain decoding.

    verified: mean drafts that the target checked per step and request, None if unknown.
    """

    users: int
    plain: Versus
    verified: float | None

    def said(self) -> str:
        """Format the result, as "at 4 users level with plain (0.99x, within noise), as the ...".

        Names few drafts as the reason if the arm is level, but not if it is slower.
        """
        line = f"at {self.users} users {self.plain.said('plain')}"
        if self.verified is None or self.verified >= SELDOM or self.plain.word == "faster":
            return line
        if self.plain.word == "level":
            return f"{line}, as the scheduler found drafting not worth it"
        return f"{line}, though the scheduler drafted little"


def forecast(prompts: int, tokens: int, build_mb: int, sweep: tuple[str, float] | None) -> str:
    """List the steps, line by line, and their time on 2 idle cores.

    build_mb: download of the demo target, 0 if it is present; sweep: what the load test measures,
    and its seconds including the start of its servers; None without one.
    """
    seconds = 2 * SERVER_START_S + 2 * prompts * tokens / PLAIN_TOKENS_PER_S
    steps = []
    if build_mb:
        steps.append(f"the demo model is built, once ({build_mb} MB to download)")
        seconds += BUILD_S
    steps.append(f"a server with DSPARK answers {prompts} prompts, accepted drafts marked")
    steps.append("a server without answers the same, and the two are compared")
    if sweep is not None:
        steps.append(f"a short load test of {sweep[0]}, and a report")
        seconds += sweep[1]
    steps.append("the result in one line; every server is stopped")
    minutes = max(2, math.ceil(seconds / 60))
    head = f"What comes, about {minutes} minutes on 2 idle cores (Ctrl-C stops it):"
    return "\n".join([head, *(f"  {n}. {step}" for n, step in enumerate(steps, start=1))])


def one_user(pairs: Sequence[Pair]) -> Versus:
    """Compute DSPARK's speed over plain decoding's for one user; the interval is over prompts."""
    overall = summarise(pairs, gamma=0)[-1]
    assert overall.domain == OVERALL
    speeds = [(p.dspark.tokens_per_s, p.plain.tokens_per_s) for p in pairs]
    speeds = [each for each in speeds if all(math.isfinite(speed) for speed in each)]
    if len(speeds) < MIN_TRIALS:
        return Versus(overall.speedup)
    found = paired_ratio(*zip(*speeds, strict=True))
    return Versus(overall.speedup, found.low, found.high)


def identical(pairs: Sequence[Pair]) -> str:
    """Count the answers that equal plain decoding's, token for token."""
    same = sum(pair.first_difference() is None for pair in pairs)
    word = "identical" if same == len(pairs) else "not all identical"
    return f"{word}, {same} of {len(pairs)}"


def from_sweep(summary: Summary, over: str, plain: str) -> tuple[Versus | None, Crowd | None]:
    """Return the ratios to MTP-1 with one user, and to plain decoding with the most users.

    over, plain: the arms' names. None if it was not measured.
    """
    found = {
        (each.under, each.level): Versus(each.mid, each.low, each.high)
        for each in summary.ratios
        if (each.over, each.what, each.loop) == (over, "tokens_per_s", "closed")
    }
    most = [level for under, level in found if under == plain and level > 1]
    mtp = found.get(("mtp1", 1))
    if not most:
        return mtp, None
    rows = [r for r in summary.levels if (r.arm, r.loop, r.level) == (over, "closed", max(most))]
    verified = rows[0].verify_length if rows else None
    return mtp, Crowd(round(max(most)), found[plain, max(most)], verified)


def in_short(one: Versus, same: str, mtp: Versus | None, crowd: Crowd | None) -> str:
    """Summarise the run in one line. same: text of `identical`."""
    line = f"DSPARK here: {one.said('plain decoding')} for one user"
    if mtp is not None:
        line += f", {mtp.said('MTP-1', 'over ')}"
    if crowd is not None:
        line += f"; {crowd.said()}"
    return f"{line}. Answers against plain decoding's: {same}."

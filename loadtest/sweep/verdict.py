"""Name the faster arm, or no winner, and order the arms of a trial.

A trial measures every arm once, next to each other, so that a slow minute of the machine affects
all of them; only ratios within a trial are compared (`intervals.paired_ratio`).
"""

from __future__ import annotations

from collections.abc import Sequence

from sglang_dspark.intervals import MIN_TRIALS, Ratio


def verdict(name: str, against: str, what: str, ratio: Ratio) -> str:
    """State the winner in a sentence. what: the quantity, such as "throughput at 4 users"."""
    shown = f"{ratio.mid:.2f}x (95% {ratio.low:.2f} to {ratio.high:.2f}, {ratio.trials} trials)"
    if ratio.trials < MIN_TRIALS:
        few = "one trial is" if ratio.trials == 1 else f"{ratio.trials} trials are"
        return f"No winner in {what}: {few} too few to tell ({ratio.mid:.2f}x)."
    if ratio.winner == "over":
        return f"{name} beats {against} in {what}: {shown}."
    if ratio.winner == "under":
        return f"{name} is behind {against} in {what}: {shown}."
    return f"No winner between {name} and {against} in {what}: {shown} contains 1."


def arm_order(arms: Sequence[str], trial: int) -> list[str]:
    """Order the arms of a trial (from 0): rotated, and reversed every other time.

    Over 2 x len(arms) trials each arm has each place equally often, and is before and after
    each other arm equally often.
    """
    shift = trial // 2 % len(arms)
    order = [*arms[shift:], *arms[:shift]]
    return order if trial % 2 == 0 else order[::-1]

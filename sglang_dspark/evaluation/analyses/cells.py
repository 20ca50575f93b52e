"""Format table cells as text, for the page and the terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sglang_dspark.evaluation.resampling import Estimate

UNKNOWN = "-"


@dataclass(frozen=True)
class Table:
    """A table of texts."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]


def interval(found: Estimate) -> str:
    """Format a value with its interval."""
    return f"{found.value:.3f} ({found.low:.2f}-{found.high:.2f})"


def share_interval(found: Estimate) -> str:
    """Format a share with its interval, in percent."""
    return f"{found.value:.1%} ({found.low:.1%}-{found.high:.1%})"


def gain(found: Estimate) -> str:
    """Format a ratio's excess over 1 in percent, with its interval."""
    value, low, high = (100 * (x - 1) for x in (found.value, found.low, found.high))
    return f"{value:+.1f}% ({low:+.1f} to {high:+.1f})"


def percent(value: float) -> str:
    """Format a share in percent."""
    return UNKNOWN if math.isnan(value) else f"{value:.1%}"


def number(value: float | None) -> str:
    """Format a number with three decimals."""
    return UNKNOWN if value is None or math.isnan(value) else f"{value:.3f}"

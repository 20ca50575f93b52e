"""List all analyses of drafters by name, in the order of the paper's section 4."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_dspark.evaluation.analyses import (
    curves,
    limits,
    overhead,
    positions,
    reliability,
    roc,
    series,
    tau,
    thresholds,
    traffic,
    trainings,
)
from sglang_dspark.evaluation.analyses.analysis import Analysis, Result

_ANALYSES: tuple[Analysis[Any], ...] = (
    tau.ANALYSIS,
    trainings.ANALYSIS,
    positions.ANALYSIS,
    series.DEPTH,
    series.LENGTH,
    overhead.ANALYSIS,
    thresholds.ANALYSIS,
    roc.ANALYSIS,
    reliability.ANALYSIS,
    traffic.ANALYSIS,
    curves.ANALYSIS,
    limits.ANALYSIS,
)
ANALYSES = {each.name: each for each in _ANALYSES}


def of(result: Result) -> Analysis[Any]:
    """Return the analysis of a result."""
    return ANALYSES[result.analysis]


def read(metrics: Mapping[str, Any]) -> Result:
    """Read the result from a result file's `metrics`. Raises ValueError for another analysis."""
    name = metrics["analysis"]
    if name not in ANALYSES:
        raise ValueError(f"no analysis {name!r}; known: {', '.join(ANALYSES)}")
    result: Result = ANALYSES[name].read(metrics)
    return result

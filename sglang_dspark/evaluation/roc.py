"""ROC of confidence: how well raw survival a_k tells drafts that are accepted from others.

A point is (share of the rejected drafts above a threshold, share of the accepted ones above it).
The areas are those of `reliability`: pooled over positions, within positions, and of each position.
Only what was verified counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from sglang_dspark.evaluation.analyses import origin
from sglang_dspark.evaluation.calibration_data import observations
from sglang_dspark.evaluation.reliability import Predictions, conditional_auc
from sglang_dspark.evaluation.traces import Trace, require_comparable
from sglang_dspark.schedule.calibration import Calibration, Floats

_POINTS = 60


def roc(traces: Mapping[str, Trace]) -> dict[str, Any]:
    """Curves and areas by domain and overall of drafters that tell a confidence."""
    require_comparable(list(traces.values()), list(traces))
    found = {}
    for label, trace in traces.items():
        data = observations(trace.generations, trace.gamma)
        domain = np.array(trace.domains)[data.request]
        groups = {"overall": np.ones(len(domain), dtype=bool)}
        groups |= {name: domain == name for name in dict.fromkeys(trace.domains)}
        parts = {}
        for name, rows in groups.items():
            chosen = data.of_steps(rows)
            predictions = Predictions.of(chosen, Calibration.identity(trace.gamma))
            parts[name] = {
                "auc": {**predictions.auc(), "conditional": conditional_auc(chosen)},
                "curve": roc_curve(predictions.survival, predictions.label),
                "drafts": len(predictions.label),
            }
        found[label] = parts
    return {"analysis": "roc", **origin(traces), "groups": found}


def roc_curve(value: Floats, label: Floats) -> dict[str, list[float]]:
    """At most 62 points of the ROC of value [n] for label [n] in {0, 1}, from (0, 0) to (1, 1).

    Equal values are passed together. Empty when all labels are the same.
    """
    order = np.argsort(-value, kind="stable")
    hits, misses = np.cumsum(label[order]), np.cumsum(1 - label[order])
    if len(label) == 0 or hits[-1] == 0 or misses[-1] == 0:
        return {"false_positive": [], "true_positive": []}
    last_of_equals = np.append(np.diff(value[order]) != 0, True)
    x = np.append(0.0, misses[last_of_equals] / misses[-1])
    y = np.append(0.0, hits[last_of_equals] / hits[-1])
    kept = np.unique(np.searchsorted(x, np.linspace(0, 1, _POINTS), side="right") - 1)
    kept = np.unique(np.concatenate([[0], kept, [len(x) - 1]]))
    return {"false_positive": x[kept].tolist(), "true_positive": y[kept].tolist()}

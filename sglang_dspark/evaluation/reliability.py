"""How far confidence can be trusted (paper, Fig. 6): reliability, ECE and ROC-AUC of a trace.

Survival a_k is compared with whether drafts 1..k were all accepted, for every verified draft.
Three readings of ROC-AUC, because the usual one flatters: survival falls along the block and so
does acceptance, so a pooled AUC also rewards knowing k.
    pooled       all positions together
    within       only pairs of the same position are compared, all positions counted by their pairs
    conditional  c_k alone against acceptance of draft k, where drafts 1..k-1 were accepted, pooled
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_dspark.evaluation.calibration_data import observations
from sglang_dspark.evaluation.statistics import ConfidencePairs
from sglang_dspark.evaluation.traces import Trace
from sglang_dspark.schedule.calibration import (
    Binning,
    Calibration,
    Floats,
    Ints,
    Observations,
    bin_of,
    ece,
    ece_debiased,
    ece_interval,
    predicted,
)

BINS = 10
# raw, STS, shift of each position and one temperature, the same with each request followed
VARIANTS = ("before", "after", "shifted", "followed")
_FLOOR_DRAWS = 50
_KEPT = ("ece", "ece_debiased", "ece_floor", "brier")


@dataclass(frozen=True)
class Predictions:
    """One entry for each verified draft: survival, label, position (from 1), request: [n] each."""

    survival: Floats
    label: Floats
    position: Ints
    request: Ints

    @classmethod
    def of(cls, data: Observations, calibration: Calibration) -> Predictions:
        """Calibrated survival against what happened; unverified left out."""
        survival = predicted(data, calibration)  # [N, gamma]
        column = np.arange(1, data.gamma + 1)
        known = column <= data.verified[:, None]  # [N, gamma]
        label = (data.accepted[:, None] >= column).astype(np.float64)
        position = np.broadcast_to(column, known.shape)
        request = np.broadcast_to(data.request[:, None], known.shape)
        return cls(survival[known], label[known], position[known], request[known])

    def calibration(self, binning: Binning = "width") -> tuple[float, float, float]:
        """ECE with its 95% bootstrap interval over requests."""
        value = ece(self.survival, self.label, bins=BINS, binning=binning)
        interval = ece_interval(self.survival, self.label, self.request, bins=BINS, binning=binning)
        return value, *interval

    def curve(self) -> list[dict[str, float | int]]:
        """Bins of equal width that hold something: mean survival, share accepted, count."""
        place = bin_of(self.survival, bins=BINS, binning="width")
        rows: list[dict[str, float | int]] = []
        for b in range(BINS):
            inside = place == b
            if inside.any():
                low, high = _share_interval(self.label[inside], self.request[inside])
                row = {"predicted": self.survival[inside].mean(), "low": low, "high": high}
                row["accepted"] = self.label[inside].mean()
                rows.append({**{k: float(v) for k, v in row.items()}, "count": int(inside.sum())})
        return rows

    def auc(self) -> dict[str, Any]:
        """ROC-AUC of survival: pooled, within position, and of each position; NaN if undefined."""
        each, weights = [], []
        for k in np.unique(self.position):
            chosen = self.position == k
            label = self.label[chosen]
            each.append(_auc(self.survival[chosen], label))
            weights.append(float(label.sum() * (len(label) - label.sum())))
        known = [(a, w) for a, w in zip(each, weights, strict=True) if w > 0]
        total = sum(w for _, w in known)
        within = sum(a * w for a, w in known) / total if total else float("nan")
        pooled = _auc(self.survival, self.label)
        return {"pooled": pooled, "within": within, "by_position": each}


def reliability(trace: Trace, calibrations: Mapping[str, Calibration]) -> dict[str, Any]:
    """Numbers of one trace by domain and overall: `before`, and under each named calibration."""
    data = observations(trace.generations, trace.gamma)
    domain = np.array(trace.domains)[data.request]
    groups = {name: domain == name for name in dict.fromkeys(trace.domains)}
    groups["overall"] = np.ones(len(domain), dtype=bool)
    variants = {"before": Calibration.identity(trace.gamma), **calibrations}
    result = {}
    for name, rows in groups.items():
        chosen = data.of_steps(rows)
        if len(chosen.logits) == 0:
            continue
        part: dict[str, Any] = {"steps": len(chosen.logits)}
        part["auc_conditional"] = conditional_auc(chosen)
        for variant, calibration in variants.items():
            part[variant] = _summary(chosen, calibration)
        result[name] = part
    return result


def conditional_auc(data: Observations) -> float:
    """ROC-AUC of the raw c_k for acceptance of draft k among steps that reached k."""
    values, labels = [], []
    for k in range(1, data.gamma + 1):
        reached = data.known(k) & data.survived(k - 1)
        values.append(data.logits[reached, k - 1])
        labels.append(data.survived(k)[reached])
    return _auc(np.concatenate(values), np.concatenate(labels).astype(np.float64))


def ece_floor(data: Observations, calibration: Calibration, seed: int = 0) -> float:
    """ECE that a perfectly calibrated predictor would show on this much data, mean of draws.

    Acceptance is drawn from the predictions themselves, as a chain in each step. What a
    measurement exceeds this by is miscalibration; the floor itself is sampling noise.
    """
    generator = np.random.default_rng(seed)
    survival = predicted(data, calibration)  # [N, gamma]
    column = np.arange(1, data.gamma + 1)
    known = column <= data.verified[:, None]
    found = []
    for _ in range(_FLOOR_DRAWS):
        # One uniform a step: a_k falls along the block, so u < a_k is a chain with these marginals.
        label = generator.uniform(size=(len(survival), 1)) < survival
        found.append(ece(survival[known], label[known].astype(np.float64), bins=BINS))
    return float(np.mean(found))


def _summary(data: Observations, calibration: Calibration) -> dict[str, Any]:
    """ECE says whether the level is right; the Brier score, mean (a - label)^2, also punishes a
    calibration that gets there by telling good drafts from bad ones less."""
    predictions = Predictions.of(data, calibration)
    value, low, high = predictions.calibration()
    adaptive, adaptive_low, adaptive_high = predictions.calibration("mass")
    by_position = []
    for k in range(1, data.gamma + 1):
        chosen = predictions.position == k
        by_position.append(ece(predictions.survival[chosen], predictions.label[chosen], bins=BINS))
    return {
        "ece": {"value": value, "low": low, "high": high},
        "ece_debiased": ece_debiased(
            predictions.survival, predictions.label, predictions.request, bins=BINS
        ),
        "ece_adaptive": {"value": adaptive, "low": adaptive_low, "high": adaptive_high},
        "ece_floor": ece_floor(data, calibration),
        "brier": float(np.mean((predictions.survival - predictions.label) ** 2)),
        "ece_by_position": by_position,
        "mean_survival": float(predictions.survival.mean()),
        "mean_accepted": float(predictions.label.mean()),
        "auc": predictions.auc(),
        "curve": predictions.curve(),
        "predictions": len(predictions.survival),
    }


def _share_interval(label: Floats, request: Ints, draws: int = 500) -> tuple[float, float]:
    """95% bootstrap interval over requests of the mean of `label` [n]."""
    _, owner = np.unique(request, return_inverse=True)
    hits, count = np.bincount(owner, weights=label), np.bincount(owner)
    n = len(count)
    chosen = np.random.default_rng(0).multinomial(n, np.full(n, 1 / n), size=draws)
    low, high = np.percentile((chosen @ hits) / (chosen @ count), [2.5, 97.5])
    return float(low), float(high)


def _auc(values: Floats, labels: Floats) -> float:
    accepted: NDArray[np.bool_] = labels > 0
    pairs = ConfidencePairs(values, accepted, np.ones(len(values), dtype=np.int64))
    return pairs.auc()


def held_out_summary(parts: dict[str, Any]) -> dict[str, Any]:
    """ECE, Brier score and AUCs by domain, for the calibration file; null is unknown."""

    def known(value: float) -> float | None:
        return None if np.isnan(value) else float(value)

    found = {}
    for name, part in parts.items():
        row: dict[str, Any] = {"steps": part["steps"]}
        row["auc_conditional"] = known(part["auc_conditional"])
        for variant in (each for each in VARIANTS if each in part):
            numbers = part[variant]
            row[variant] = {key: numbers[key] for key in _KEPT}
            row[variant]["auc_pooled"] = known(numbers["auc"]["pooled"])
            row[variant]["auc_within_position"] = known(numbers["auc"]["within"])
        found[name] = row
    return found


def as_metrics(label: str, trace: Trace, parts: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The `metrics` of a result file."""
    return {
        "analysis": "reliability",
        "label": label,
        "target": trace.target,
        "settings": dict(trace.settings),
        "drafter": asdict(trace.drafter),
        "prompts": len(trace.prompts),
        **more,
        "groups": parts,
    }

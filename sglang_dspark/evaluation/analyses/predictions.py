"""Judge survival as a prediction of acceptance: bins, ECE with its floor, three kinds of ROC-AUC.

Survival a_k is compared with whether drafts 1..k were all accepted, for every verified draft.
There are three kinds of ROC-AUC, because the usual one flatters: survival decreases along the block
and so does acceptance, so a pooled AUC also rewards knowing k.
    pooled       all positions together
    within       only pairs of the same position are compared, all positions counted by their pairs
    conditional  c_k alone against acceptance of draft k, where drafts 1..k-1 were accepted, pooled
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sglang_dspark.evaluation.resampling import Estimate, Number
from sglang_dspark.evaluation.statistics import ConfidencePairs
from sglang_dspark.schedule.calibration import (
    Binning,
    Calibration,
    Floats,
    Ints,
    Observations,
    bin_of,
    ece,
    ece_interval,
    predicted,
)

BINS = 10
_FLOOR_DRAWS = 50


@dataclass(frozen=True)
class Auc:
    """ROC-AUC of survival; NaN if all labels are the same. by_position: [gamma]."""

    pooled: Number
    within: Number
    by_position: tuple[Number, ...]


@dataclass(frozen=True)
class Bin:
    """Mean survival, share accepted with its interval, and drafts of a bin of equal width."""

    predicted: Number
    low: Number
    high: Number
    accepted: Number
    count: int


@dataclass(frozen=True)
class Predictions:
    """One entry for each verified draft: survival, label, position (from 1), request: [n] each."""

    survival: Floats
    label: Floats
    position: Ints
    request: Ints

    @classmethod
    def of(cls, data: Observations, calibration: Calibration) -> Predictions:
        """Compare calibrated survival with the outcomes of verified drafts."""
        survival = predicted(data, calibration)  # [N, gamma]
        column = np.arange(1, data.gamma + 1)
        known = column <= data.verified[:, None]  # [N, gamma]
        label = (data.accepted[:, None] >= column).astype(np.float64)
        position = np.broadcast_to(column, known.shape)
        request = np.broadcast_to(data.request[:, None], known.shape)
        return cls(survival[known], label[known], position[known], request[known])

    def calibration(self, binning: Binning = "width") -> Estimate:
        """Compute ECE with its 95% bootstrap interval over requests."""
        value = ece(self.survival, self.label, bins=BINS, binning=binning)
        interval = ece_interval(self.survival, self.label, self.request, bins=BINS, binning=binning)
        return Estimate(value, *interval)

    def curve(self) -> tuple[Bin, ...]:
        """Return the bins that are not empty."""
        place = bin_of(self.survival, bins=BINS, binning="width")
        rows = []
        for inside in (place == b for b in range(BINS)):
            if inside.any():
                survival, label = self.survival[inside], self.label[inside]
                low, high = _share_interval(label, self.request[inside])
                share = float(label.mean())
                rows.append(Bin(float(survival.mean()), low, high, share, int(inside.sum())))
        return tuple(rows)

    def auc(self) -> Auc:
        """Compute ROC-AUC of survival; positions with one label only have no weight."""
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
        return Auc(pooled, within, tuple(each))


def conditional_auc(data: Observations) -> float:
    """Compute ROC-AUC of the raw c_k for acceptance of draft k among steps that reached k."""
    values, labels = [], []
    for k in range(1, data.gamma + 1):
        reached = data.known(k) & data.survived(k - 1)
        values.append(data.logits[reached, k - 1])
        labels.append(data.survived(k)[reached])
    return _auc(np.concatenate(values), np.concatenate(labels).astype(np.float64))


def ece_floor(data: Observations, calibration: Calibration, seed: int = 0) -> float:
    """Compute the mean ECE that a perfectly calibrated predictor would show on this much data.

    Acceptance is drawn from the predictions themselves, as a chain in each step. The excess of a
    measurement over this floor is miscalibration; the floor itself is sampling noise.
    """
    generator = np.random.default_rng(seed)
    survival = predicted(data, calibration)  # [N, gamma]
    column = np.arange(1, data.gamma + 1)
    known = column <= data.verified[:, None]
    found = []
    for _ in range(_FLOOR_DRAWS):
        # One uniform a step: a_k decreases along the block, so u < a_k is a chain with these
        # marginals.
        label = generator.uniform(size=(len(survival), 1)) < survival
        found.append(ece(survival[known], label[known].astype(np.float64), bins=BINS))
    return float(np.mean(found))


def _share_interval(label: Floats, request: Ints, draws: int = 500) -> tuple[float, float]:
    """Return the 95% bootstrap interval over requests of the mean of `label` [n]."""
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

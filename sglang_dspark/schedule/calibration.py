"""Fit Sequential Temperature Scaling: one temperature per draft position (paper, 3.2.1).

Positions are fitted left to right. Position k tries every temperature of a one-dimensional grid,
with T_1..T_{k-1} fixed. It keeps the one with the smallest expected calibration error of the
cumulative product a_k = prod_{i<=k} sigmoid(logit_i / T_i).

A label is the outcome under the request's own sampling: drafts 1..k all accepted by the accept rule
in use. Position k of a step is counted only if it was verified. An unverified position is censored,
not a failure: an earlier rejection would make it a known failure, but keeping only those would bias
the labels to failures.

A temperature cannot move a confidence of one half. So it cannot correct a head that is
overconfident by the same amount everywhere, the error of a head trained on acceptance of its own
training text. `fit_shifts` goes beyond the paper and is stored apart from its table (`sts+shift`):
a shift for each position and one temperature by maximum likelihood, and the variance between
requests (`request_shift`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sglang_dspark.schedule.request_shift import SPREADS, RequestShift
from sglang_dspark.schedule.survival import survival

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Binning = Literal["width", "mass"]

GRID_LOW, GRID_HIGH, GRID_POINTS = 0.1, 10.0, 201  # evenly in log T; 1 is one of the points
SHIFT_LIMIT = 10.0  # logits; a larger shift would mean that all or no drafts were accepted
MINIMUM_LABELS = 50  # below this an ECE of ten bins is noise: the position keeps T = 1


@dataclass(frozen=True)
class Observations:
    """N verify steps: the drafter's confidence logits, and the drafts verified and accepted.

    logits: [N, gamma] confidence logits, not calibrated. accepted: [N] leading drafts accepted.
    verified: [N] drafts that were verified, accepted <= verified <= gamma. request: [N], which
    request each step belongs to; steps of one request are not independent.
    """

    logits: Floats
    accepted: Ints
    verified: Ints
    request: Ints

    def __post_init__(self) -> None:
        if self.logits.ndim != 2 or np.isnan(self.logits).any():
            raise ValueError("logits must be [N, gamma] without NaN")
        steps, gamma = self.logits.shape
        for name in ("accepted", "verified", "request"):
            if getattr(self, name).shape != (steps,):
                raise ValueError(f"{name} must be [{steps}]")
        ordered = (self.accepted >= 0) & (self.accepted <= self.verified) & (self.verified <= gamma)
        if not ordered.all():
            raise ValueError("0 <= accepted <= verified <= gamma must hold in every step")

    @property
    def gamma(self) -> int:
        """Return the number of drafts per step."""
        return int(self.logits.shape[1])

    def known(self, k: int) -> NDArray[np.bool_]:
        """Return [N]: whether position k (from 1) was verified."""
        return self.verified >= k

    def survived(self, k: int) -> NDArray[np.bool_]:
        """Return [N]: whether drafts 1..k were all accepted; valid where `known(k)`."""
        return self.accepted >= k

    def of_steps(self, chosen: NDArray[np.bool_]) -> Observations:
        """Select the steps where `chosen` [N] is true."""
        return Observations(
            self.logits[chosen], self.accepted[chosen], self.verified[chosen], self.request[chosen]
        )


@dataclass(frozen=True)
class StsFit:
    """Temperatures of positions 1..gamma, and the ECE of a_k there before and after.

    counts: labels each position was fitted on; a position with fewer than MINIMUM_LABELS keeps
    temperature 1. ECE is NaN if there is no label.
    """

    temperatures: tuple[float, ...]
    ece_before: tuple[float, ...]
    ece_after: tuple[float, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True)
class Calibration:
    """Parameters of c_k = sigmoid((logit_k + shift_k) / T_k + s_r); plain STS has only T_k.

    temperatures: [gamma] > 0. shift: common part of all shift_k; by_position: [gamma] the rest, or
    empty. spread: variance of the requests' own shifts s_r, or 0; `request_shift.RequestShift` adds
    those, not `apply`.
    """

    temperatures: tuple[float, ...]
    shift: float = 0.0
    by_position: tuple[float, ...] = ()
    spread: float = 0.0

    @property
    def shifts(self) -> tuple[float, ...]:
        """Return shift_k, [gamma]."""
        return tuple(self.shift + s for s in self.by_position or (0.0,) * len(self.temperatures))

    @classmethod
    def identity(cls, gamma: int) -> Calibration:
        """Return the calibration that changes nothing."""
        return cls((1.0,) * gamma)


def temperature_grid() -> Floats:
    """Return the temperatures of the search grid, ascending."""
    return np.geomspace(GRID_LOW, GRID_HIGH, GRID_POINTS)


def fit(data: Observations, *, bins: int = 10, binning: Binning = "width") -> StsFit:
    """Fit temperatures to observed acceptance; deterministic.

    Raises ValueError if there is no step. Of temperatures with equal ECE the one nearest to 1 wins,
    so that data without information changes nothing.
    """
    if len(data.logits) == 0:
        raise ValueError("no verify step to fit temperatures to")
    grid = temperature_grid()
    by_distance = grid[np.argsort(np.abs(np.log(grid)), kind="stable")]  # 1 first
    before, after = np.ones(len(data.logits)), np.ones(len(data.logits))  # [N] a_{k-1}
    fitted: list[tuple[float, float, float, int]] = []
    for k in range(1, data.gamma + 1):
        logit, rows = data.logits[:, k - 1], data.known(k)
        label = data.survived(k)[rows].astype(np.float64)
        before = before * _sigmoid(logit)
        temperature = 1.0
        if len(label) >= MINIMUM_LABELS:
            tried = after[rows] * _sigmoid(logit[rows] / by_distance[:, None])  # [grid, n]
            errors = [ece(survived, label, bins=bins, binning=binning) for survived in tried]
            temperature = float(by_distance[int(np.argmin(errors))])
        after = after * _sigmoid(logit / temperature)
        gap_before, gap_after = (
            ece(a[rows], label, bins=bins, binning=binning) for a in (before, after)
        )
        fitted.append((temperature, gap_before, gap_after, len(label)))
    temperatures, ece_before, ece_after, counts = zip(*fitted, strict=True)
    return StsFit(temperatures, ece_before, ece_after, counts)


def fit_shifts(data: Observations) -> Calibration:
    """Fit one temperature, a shift for each position (maximum likelihood), and the spread.

    The data are verified drafts whose predecessors were all accepted. A penalty pulls each
    position's shift to the common one and the slope to 1, each with the weight of four outcomes, so
    that few labels change little. The spread is the entry of `SPREADS` with the largest likelihood
    of each step's outcomes, predicted from the request's earlier steps. Raises ValueError if there
    is no such draft.
    """
    reached = [data.known(k) & data.survived(k - 1) for k in range(1, data.gamma + 1)]
    logit = np.concatenate([data.logits[rows, k] for k, rows in enumerate(reached)])
    label = np.concatenate([data.survived(k + 1)[rows] for k, rows in enumerate(reached)])
    place = np.concatenate([np.full(int(rows.sum()), k) for k, rows in enumerate(reached)])
    if len(label) == 0:
        raise ValueError("no verified draft to fit a shift to")
    ones = np.ones((len(label), 1))
    design = np.concatenate([logit[:, None], ones, np.eye(data.gamma)[place]], axis=1)
    slope, common, *rest = _logistic(design, label.astype(np.float64))
    slope = min(max(slope, 1 / GRID_HIGH), 1 / GRID_LOW)
    found = Calibration(
        (1 / slope,) * data.gamma, common / slope, tuple(float(v / slope) for v in rest)
    )
    losses = [_log_loss(data, replace(found, spread=spread)) for spread in SPREADS]
    return replace(found, spread=SPREADS[int(np.argmin(losses))])


def _logistic(design: Floats, label: Floats) -> list[float]:
    """Fit a logistic regression; weight 0 is pulled to 1, weight 1 is free, the others to 0."""
    centre, pull = np.zeros(design.shape[1]), np.ones(design.shape[1])
    centre[0], pull[1] = 1.0, 1e-3

    def loss(weights: Floats) -> float:
        signs = 1 - 2 * label
        data = np.logaddexp(0.0, signs * (design @ weights)).sum()
        return float(data + (pull * (weights - centre) ** 2).sum() / 2)

    weights, present = centre, loss(centre)
    for _ in range(30):  # Newton steps, halved until the loss decreases
        chance = _sigmoid(design @ weights)
        slope = design.T @ (label - chance) - pull * (weights - centre)
        curve = (design * (chance * (1 - chance))[:, None]).T @ design + np.diag(pull)
        move = np.linalg.solve(curve, slope)
        tried = (move / 2**i for i in range(12))
        halved = next((each for each in tried if loss(weights + each) < present), None)
        if halved is None:
            break
        weights = weights + halved
        present = loss(weights)
    return [float(w) for w in np.clip(weights, -SHIFT_LIMIT, SHIFT_LIMIT)]


def _log_loss(data: Observations, calibration: Calibration) -> float:
    """Return the mean -log likelihood of reached drafts, each predicted before its outcome."""
    confidence = np.clip(conditional(data, calibration), 1e-6, 1 - 1e-6)
    column = np.arange(1, data.gamma + 1)
    hit = column <= data.accepted[:, None]
    reached = column <= np.minimum(data.verified, data.accepted + 1)[:, None]
    return float(-np.log(np.where(hit, confidence, 1 - confidence))[reached].mean())


def conditional(data: Observations, calibration: Calibration) -> Floats:
    """Return c_k of every step [N, gamma], with requests' own shifts if there is a spread.

    Steps of one request must be in the order in which they happened.
    """
    shifts = np.array(calibration.shifts)
    logit = (data.logits + shifts) / np.array(calibration.temperatures)  # [N, gamma]
    if calibration.spread == 0 or not len(logit):
        return _sigmoid(logit)
    _, owner = np.unique(data.request, return_inverse=True)
    order = np.argsort(owner, kind="stable")
    starts = np.flatnonzero(np.diff(owner[order], prepend=-1))
    rank = np.empty(len(order), dtype=np.int64)  # index of each step in its request
    rank[order] = np.arange(len(order)) - np.repeat(starts, np.diff([*starts, len(order)]))
    follower = RequestShift([calibration.spread], int(owner.max()) + 1)
    regime = np.zeros(len(logit), np.int64)
    result = np.empty_like(logit)
    for turn in range(int(rank.max()) + 1):
        rows = np.flatnonzero(rank == turn)
        who = owner[rows].astype(np.int64)
        result[rows] = _sigmoid(logit[rows] + follower.shifts(who, who)[:, None])
        follower.observe(
            who, who, regime[rows], result[rows], data.accepted[rows], data.verified[rows]
        )
    return result


def predicted(data: Observations, calibration: Calibration) -> Floats:
    """Return survival a_k of every step [N, gamma], in the float32 arithmetic of `survival`."""
    if calibration.spread == 0:
        return apply_numpy(data.logits, calibration)
    confidence = torch.from_numpy(conditional(data, calibration)).float()
    return survival(confidence).double().numpy()


def apply(logits: Tensor, temperatures: Tensor, shift: Tensor | float = 0.0) -> Tensor:
    """Return calibrated survival a_k, non-increasing along gamma in executed float32 arithmetic.

    logits: [..., gamma] confidence logits; temperatures: [gamma], all > 0; shift: [gamma] or a
    scalar. Returns [..., gamma] float32. Raises ValueError on NaN, mismatched shapes, or a
    temperature that is not positive and finite.
    """
    if temperatures.shape != logits.shape[-1:]:
        raise ValueError(f"{tuple(temperatures.shape)} temperatures for {tuple(logits.shape)}")
    if not bool(((temperatures > 0) & temperatures.isfinite()).all()):
        raise ValueError(f"temperatures must be positive numbers: {temperatures.tolist()}")
    return survival(torch.sigmoid((logits.float() + shift) / temperatures.float()))


def apply_numpy(logits: Floats, calibration: Calibration) -> Floats:
    """Run `apply` on arrays, in the same float32 arithmetic: [N, gamma] -> [N, gamma]."""
    scale = torch.tensor(calibration.temperatures, dtype=torch.float32)
    shift = torch.tensor(calibration.shifts, dtype=torch.float32)
    return apply(torch.from_numpy(logits), scale, shift).double().numpy()


def logits_of(confidence: Floats) -> Floats:
    """Return the logits of confidences that were computed as float32 sigmoids.

    The sigmoid rounds to exactly 1 from a logit of about 17, and to 0 below -104. Such values map
    to those logits, so that a temperature still moves them.
    """
    lowest, highest = 2.0**-149, 1.0 - 2.0**-25
    inside = np.clip(confidence, lowest, highest)
    return np.log(inside) - np.log1p(-inside)


def bin_of(values: Floats, *, bins: int, binning: Binning) -> Ints:
    """Return the bin of each value [n] in [0, 1], 0..bins-1.

    "width": bins of equal width. "mass": adaptive, of (nearly) equal count; equal values share a
    bin, so some may stay empty.
    """
    if binning == "width":
        return np.minimum((values * bins).astype(np.int64), bins - 1)
    edges = np.quantile(values, np.linspace(0, 1, bins + 1)[1:-1])
    return np.searchsorted(edges, values, side="right").astype(np.int64)


def ece(values: Floats, labels: Floats, *, bins: int = 10, binning: Binning = "width") -> float:
    """Return the calibration error sum_b |sum_{i in b} (value_i - label_i)| / n; NaN if empty.

    values: [n] predicted chance in [0, 1]; labels: [n], 0 or 1.
    """
    if len(values) == 0:
        return float("nan")
    place = bin_of(values, bins=bins, binning=binning)
    gap = np.bincount(place, weights=values - labels, minlength=bins)
    return float(np.abs(gap).sum() / len(values))


def ece_debiased(
    values: Floats, labels: Floats, request: Ints, *, bins: int = 10, binning: Binning = "width"
) -> float:
    """Return `ece` without its sampling noise: a bin's gap g counts sqrt(max(g^2 - var g, 0)).

    The variance is over requests (not steps), which are assumed independent. 0 means that this much
    data shows no miscalibration, not that there is none.
    """
    if len(values) == 0:
        return float("nan")
    gap, _ = _by_request(values, labels, request, bins, binning)
    square = gap.sum(axis=0) ** 2 - (gap**2).sum(axis=0)
    return float(np.sqrt(square.clip(min=0)).sum() / len(values))


def _by_request(
    values: Floats, labels: Floats, request: Ints, bins: int, binning: Binning
) -> tuple[Floats, Ints]:
    """Sum value - label by request and bin [requests, bins], and count values by request."""
    _, owner = np.unique(request, return_inverse=True)
    place = bin_of(values, bins=bins, binning=binning)
    count = np.bincount(owner)
    size = len(count) * bins
    gap = np.bincount(owner * bins + place, weights=values - labels, minlength=size)
    return gap.astype(np.float64).reshape(len(count), bins), count.astype(np.int64)


def ece_interval(
    values: Floats,
    labels: Floats,
    request: Ints,
    *,
    bins: int = 10,
    binning: Binning = "width",
    draws: int = 1000,
    seed: int = 0,
) -> tuple[float, float]:
    """Return the 95% percentile bootstrap interval (low, high) of `ece` over requests (not steps).

    request: [n], the request of each value. Bins are those of the whole sample. ECE is a sum of
    absolute values, so noise raises it, and resampling raises it again: with few requests the
    interval is biased upwards.
    """
    if len(values) == 0:
        return float("nan"), float("nan")
    gap, count = _by_request(values, labels, request, bins, binning)
    requests = len(count)
    generator = np.random.default_rng(seed)
    chosen = generator.multinomial(requests, np.full(requests, 1 / requests), size=draws)
    errors = np.abs(chosen @ gap).sum(axis=1) / (chosen @ count)  # [draws]
    low, high = np.percentile(errors, [2.5, 97.5])
    return float(low), float(high)


def _sigmoid(x: Floats) -> Floats:
    """Return 1 / (1 + exp(-x)) without overflow."""
    return np.exp(-np.logaddexp(0.0, -x))

"""Sequential Temperature Scaling: one temperature a draft position (paper, 3.2.1).

Positions are fitted left to right. Position k tries every temperature of a one-dimensional grid
and keeps the one that gives the cumulative product a_k = prod_{i<=k} sigmoid(logit_i / T_i) the
smallest expected calibration error, T_1..T_{k-1} fixed.

A label is the outcome under the request's own sampling: drafts 1..k all accepted by the
rule that was in force. Position k of a step is counted only if it was verified; an unverified one
is censored, never a failure (an earlier rejection would make it a known failure, but keeping only
those would count failures alone).

A temperature cannot move a confidence of one half, so it cannot fix a head that is too sure by the
same amount everywhere, which is the error of a head that saw acceptance on its own training text.
`fit_shifts` goes beyond the paper and is kept apart from its table (`sts+shift`): a shift for each
position and one temperature, the most likely ones, and how far requests stray from that
(`request_shift`).
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
SHIFT_LIMIT = 10.0  # logits; more would say that all or nothing was accepted
MINIMUM_LABELS = 50  # below this an ECE of ten bins is noise: the position keeps T = 1


@dataclass(frozen=True)
class Observations:
    """N verify steps: what the drafter said of each draft, and how far acceptance went.

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
        """Drafts a step."""
        return int(self.logits.shape[1])

    def known(self, k: int) -> NDArray[np.bool_]:
        """Return [N]: whether position k (from 1) was verified."""
        return self.verified >= k

    def survived(self, k: int) -> NDArray[np.bool_]:
        """Return [N]: whether drafts 1..k were all accepted; valid where `known(k)`."""
        return self.accepted >= k

    def of_steps(self, chosen: NDArray[np.bool_]) -> Observations:
        """The steps where `chosen` [N] is true."""
        return Observations(
            self.logits[chosen], self.accepted[chosen], self.verified[chosen], self.request[chosen]
        )


@dataclass(frozen=True)
class StsFit:
    """Temperatures of positions 1..gamma, and the ECE of a_k there before and after.

    counts: labels each position was fitted on; a position with fewer than MINIMUM_LABELS keeps
    temperature 1. ECE is NaN where there is no label.
    """

    temperatures: tuple[float, ...]
    ece_before: tuple[float, ...]
    ece_after: tuple[float, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True)
class Calibration:
    """c_k = sigmoid((logit_k + shift_k) / T_k + s_r); with temperatures alone it is plain STS.

    temperatures: [gamma] > 0. shift: common part of all shift_k; by_position: [gamma] the rest,
    empty for none. spread: variance of the requests' own shifts s_r, 0 for none; those are added
    by `request_shift.RequestShift`, not by `apply`.
    """

    temperatures: tuple[float, ...]
    shift: float = 0.0
    by_position: tuple[float, ...] = ()
    spread: float = 0.0

    @property
    def shifts(self) -> tuple[float, ...]:
        """shift_k, [gamma]."""
        return tuple(self.shift + s for s in self.by_position or (0.0,) * len(self.temperatures))

    @classmethod
    def identity(cls, gamma: int) -> Calibration:
        """The one that changes nothing."""
        return cls((1.0,) * gamma)


def temperature_grid() -> Floats:
    """The temperatures that are tried, ascending."""
    return np.geomspace(GRID_LOW, GRID_HIGH, GRID_POINTS)


def fit(data: Observations, *, bins: int = 10, binning: Binning = "width") -> StsFit:
    """Fit temperatures to observed acceptance; deterministic.

    Raises ValueError when there is no step. Of temperatures with equal ECE the one nearest to 1
    wins, so that data without information changes nothing.
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
    """One temperature and a shift for each position, by maximum likelihood; and the spread.

    Over verified drafts whose predecessors were all accepted. A position's shift is drawn to the
    common one as if by four outcomes, the slope to 1 as weakly, so that few labels move little.
    The spread is the one of `SPREADS` under which the outcomes of each step, predicted from the
    request's earlier steps, are likeliest. Raises ValueError when there is no such draft.
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
    """Weights of a logistic regression: column 0 held near 1, column 1 free, the others near 0."""
    centre, pull = np.zeros(design.shape[1]), np.ones(design.shape[1])
    centre[0], pull[1] = 1.0, 1e-3

    def loss(weights: Floats) -> float:
        signs = 1 - 2 * label
        data = np.logaddexp(0.0, signs * (design @ weights)).sum()
        return float(data + (pull * (weights - centre) ** 2).sum() / 2)

    weights, present = centre, loss(centre)
    for _ in range(30):  # Newton, halved until it helps
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
    """Mean -log likelihood of reached drafts' outcomes, each step predicted before it is seen."""
    confidence = np.clip(conditional(data, calibration), 1e-6, 1 - 1e-6)
    column = np.arange(1, data.gamma + 1)
    hit = column <= data.accepted[:, None]
    reached = column <= np.minimum(data.verified, data.accepted + 1)[:, None]
    return float(-np.log(np.where(hit, confidence, 1 - confidence))[reached].mean())


def conditional(data: Observations, calibration: Calibration) -> Floats:
    """c_k of every step [N, gamma]: as the table says, each request followed if it has a spread.

    Steps of one request must be in the order in which they happened.
    """
    shifts = np.array(calibration.shifts)
    logit = (data.logits + shifts) / np.array(calibration.temperatures)  # [N, gamma]
    if calibration.spread == 0 or not len(logit):
        return _sigmoid(logit)
    _, owner = np.unique(data.request, return_inverse=True)
    order = np.argsort(owner, kind="stable")
    starts = np.flatnonzero(np.diff(owner[order], prepend=-1))
    rank = np.empty(len(order), dtype=np.int64)  # which step of its request each one is
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
    """Survival a_k of every step [N, gamma], in the float32 arithmetic of `survival`."""
    if calibration.spread == 0:
        return apply_numpy(data.logits, calibration)
    confidence = torch.from_numpy(conditional(data, calibration)).float()
    return survival(confidence).double().numpy()


def apply(logits: Tensor, temperatures: Tensor, shift: Tensor | float = 0.0) -> Tensor:
    """Calibrated survival a_k, non-increasing along gamma in the executed float32 arithmetic.

    logits: [..., gamma] confidence logits; temperatures: [gamma], all > 0; shift: [gamma] or one.
    Returns [..., gamma] float32. Raises ValueError on NaN, shapes that do not fit, or a
    temperature that is not a positive number.
    """
    if temperatures.shape != logits.shape[-1:]:
        raise ValueError(f"{tuple(temperatures.shape)} temperatures for {tuple(logits.shape)}")
    if not bool(((temperatures > 0) & temperatures.isfinite()).all()):
        raise ValueError(f"temperatures must be positive numbers: {temperatures.tolist()}")
    return survival(torch.sigmoid((logits.float() + shift) / temperatures.float()))


def apply_numpy(logits: Floats, calibration: Calibration) -> Floats:
    """`apply` on arrays, in the same float32 arithmetic: [N, gamma] -> [N, gamma]."""
    scale = torch.tensor(calibration.temperatures, dtype=torch.float32)
    shift = torch.tensor(calibration.shifts, dtype=torch.float32)
    return apply(torch.from_numpy(logits), scale, shift).double().numpy()


def logits_of(confidence: Floats) -> Floats:
    """Logits of confidences that were computed as float32 sigmoids.

    The sigmoid rounds to exactly 1 from a logit of about 17, and to 0 below -104: such values get
    those logits, so that a temperature still moves them.
    """
    lowest, highest = 2.0**-149, 1.0 - 2.0**-25
    inside = np.clip(confidence, lowest, highest)
    return np.log(inside) - np.log1p(-inside)


def bin_of(values: Floats, *, bins: int, binning: Binning) -> Ints:
    """Bin of each value [n] in [0, 1], 0..bins-1.

    "width": bins of equal width. "mass": adaptive, of (nearly) equal count; equal values share a
    bin, so some may stay empty.
    """
    if binning == "width":
        return np.minimum((values * bins).astype(np.int64), bins - 1)
    edges = np.quantile(values, np.linspace(0, 1, bins + 1)[1:-1])
    return np.searchsorted(edges, values, side="right").astype(np.int64)


def ece(values: Floats, labels: Floats, *, bins: int = 10, binning: Binning = "width") -> float:
    """Expected calibration error sum_b |sum_{i in b} (value_i - label_i)| / n; NaN when empty.

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
    """`ece` less what chance adds to it: a bin's gap g counts sqrt(max(g^2 - var g, 0)).

    The variance is over requests (not steps), whose gaps are taken as independent of each other.
    0 says that no miscalibration shows on this much data, not that there is none.
    """
    if len(values) == 0:
        return float("nan")
    gap, _ = _by_request(values, labels, request, bins, binning)
    square = gap.sum(axis=0) ** 2 - (gap**2).sum(axis=0)
    return float(np.sqrt(square.clip(min=0)).sum() / len(values))


def _by_request(
    values: Floats, labels: Floats, request: Ints, bins: int, binning: Binning
) -> tuple[Floats, Ints]:
    """Summed value - label of each request in each bin [requests, bins], and values a request."""
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
    """95% percentile bootstrap interval of `ece` over requests (not steps): (low, high).

    request: [n], which request each value belongs to. Bins stay those of the whole sample. ECE is
    a sum of absolute values: noise pushes it up, in resamples once more, so the interval leans
    upwards when there are few requests.
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
    """1 / (1 + exp(-x)) without overflow."""
    return np.exp(-np.logaddexp(0.0, -x))

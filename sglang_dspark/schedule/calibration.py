"""Sequential Temperature Scaling: one temperature a draft position (paper, 3.2.1).

Positions are fitted left to right. Position k tries every temperature of a one-dimensional grid
and keeps the one that gives the cumulative product a_k = prod_{i<=k} sigmoid(logit_i / T_i) the
smallest expected calibration error, T_1..T_{k-1} fixed.

A label is what really happened under the request's own sampling: drafts 1..k all accepted by the
rule that was in force. Position k of a step is counted only if it was verified; an unverified one
is censored, never a failure (an earlier rejection would make it a known failure, but keeping only
those would count failures alone).

A temperature cannot move a confidence of one half, so it cannot mend a head that is too sure by the
same amount everywhere, which is how a head errs that saw acceptance on its own training text.
`fit_shift` finds that amount: one number added to all logits before the temperatures. It goes
beyond the paper and is kept apart from its table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

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
        """[N]: whether position k (from 1) was verified."""
        return self.verified >= k

    def survived(self, k: int) -> NDArray[np.bool_]:
        """[N]: whether drafts 1..k were all accepted; means something where `known(k)`."""
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
    """c_k = sigmoid((logit_k + shift) / T_k); temperatures [gamma] > 0; without shift plain STS."""

    temperatures: tuple[float, ...]
    shift: float = 0.0

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


def fit_shift(data: Observations) -> float:
    """The number that, added to all logits, makes conditional acceptance most likely.

    Over verified drafts whose predecessors were all accepted: there the mean of c_k then equals
    the share accepted. Raises ValueError when there is none.
    """
    reached = [data.known(k) & data.survived(k - 1) for k in range(1, data.gamma + 1)]
    logit = np.concatenate([data.logits[rows, k] for k, rows in enumerate(reached)])
    label = np.concatenate([data.survived(k + 1)[rows] for k, rows in enumerate(reached)])
    if len(label) == 0:
        raise ValueError("no verified draft to fit a shift to")
    low, high = -SHIFT_LIMIT, SHIFT_LIMIT  # the mean of the sigmoids rises with the shift
    for _ in range(60):
        middle = (low + high) / 2
        if float(_sigmoid(logit + middle).mean()) < float(label.mean()):
            low = middle
        else:
            high = middle
    return (low + high) / 2


def shifted(data: Observations, shift: float) -> Observations:
    """The same steps with `shift` added to all logits."""
    return Observations(data.logits + shift, data.accepted, data.verified, data.request)


def apply(logits: Tensor, temperatures: Tensor, shift: float = 0.0) -> Tensor:
    """Calibrated survival a_k, non-increasing along gamma in the executed float32 arithmetic.

    logits: [..., gamma] confidence logits; temperatures: [gamma], all > 0.
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
    return apply(torch.from_numpy(logits), scale, calibration.shift).double().numpy()


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
    _, owner = np.unique(request, return_inverse=True)
    place = bin_of(values, bins=bins, binning=binning)
    requests = int(owner.max()) + 1
    cell = owner * bins + place
    size = requests * bins
    gap = np.bincount(cell, weights=values - labels, minlength=size).reshape(requests, bins)
    count = np.bincount(owner, minlength=requests)  # [requests]
    generator = np.random.default_rng(seed)
    chosen = generator.multinomial(requests, np.full(requests, 1 / requests), size=draws)
    errors = np.abs(chosen @ gap).sum(axis=1) / (chosen @ count)  # [draws]
    low, high = np.percentile(errors, [2.5, 97.5])
    return float(low), float(high)


def _sigmoid(x: Floats) -> Floats:
    """1 / (1 + exp(-x)) without overflow."""
    return np.exp(-np.logaddexp(0.0, -x))

"""Define the configuration of a planner, and its decision about a step before drafting."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from sglang_dspark.schedule.budget import Budget, Counts, Gains
from sglang_dspark.schedule.early_exit import ExitConfig
from sglang_dspark.schedule.estimator import EstimatorConfig
from sglang_dspark.schedule.guard import SERVING_GUARD, GuardConfig, Mode

Signal = Literal["confidence", "draft probability"]


@dataclass(frozen=True)
class PlannerConfig:
    """Settings of a planner.

    lag: steps between a confidence and the first plan that may use it (at least 1). max_age:
    confidences older than this many steps are replaced by the prior. signal: the source of
    confidences, a head or an estimate from the draft's distribution
    (`drafter/draft_confidence.py`). look_deep: after this many shallow drafts one is drafted to
    full depth, for confidences of the skipped positions; without them no plan could find that depth
    pays again. deep_share: drafts have full depth if that adds at most this part of a step.
    """

    lag: int = 2
    max_age: int = 16
    signal: Signal = "confidence"
    look_deep: int = 16
    deep_share: float = 0.005
    guard: GuardConfig = SERVING_GUARD
    estimator: EstimatorConfig | None = None
    early_exit: ExitConfig | None = None

    def __post_init__(self) -> None:
        if self.lag < 1:
            raise ValueError("a plan must not see the step it plans: lag is at least 1")
        if self.look_deep < 1 or self.deep_share < 0:
            raise ValueError(f"look_deep must be at least 1 and deep_share at least 0: {self}")


@dataclass(frozen=True)
class Plan:
    """Decision about step `step` before drafting.

    budget: K (an expectation if K is found after drafting), depth and predictions. limits: [R]
    int64, most drafts of each request, depth included. floors: [R] int64 <= limits, or None, drafts
    admitted first. settled: whether the guard may measure the step. known: requests whose
    confidence was known, of `requests`. gain: corrected tokens/s of speculating over plain.
    weights: [R] float32, weight of a token of each request, or None: all have weight 1.
    """

    step: int
    requests: int
    context: int
    budget: Budget
    limits: Counts
    floors: Counts | None
    mode: Mode
    settled: bool
    known: int
    gain: float
    weights: Gains | None = None

    @property
    def speculates(self) -> bool:
        """Return whether the step drafts."""
        return self.budget.speculates

    def without_drafts(self) -> Plan:
        """Return the same plan without drafts."""
        nothing = self.budget._replace(drafts=0, depth=0)
        return replace(self, budget=nothing, limits=np.zeros_like(self.limits), floors=None)

    def worth(self, accepted: Counts) -> float:
        """Return the emitted tokens, weighted like the predicted ones. accepted: [R]."""
        if self.weights is None:
            return float(self.requests + accepted.sum())
        return float((self.weights * (1 + accepted)).sum(dtype=np.float64))


def base_of(weights: Gains | None) -> float | None:
    """Return the summed weights [R] of tokens without drafts; None, meaning R, without weights."""
    return None if weights is None else float(weights.sum(dtype=np.float64))

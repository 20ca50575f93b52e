"""Compute acceptance and confidence statistics, each with its exact definition.

tau: tokens per verify step, bonus included: 1 + accepted drafts, averaged over all verify steps
(paper, 4.1). The last step of a request counts in full, even if a stop token or the token limit
discards some of its tokens, because the target verified them.
accept_length: completion tokens / verify steps, equal to the server's `spec_accept_length`. It
also counts the prefill's token, and not the tokens that the last step discarded.
Requests without a verify step (finished by the prefill) count in neither.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sglang_dspark.evaluation.records import Generation

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class RequestCounts:
    """Counts of one request, from the engine or from a server's `meta_info`.

    completion_tokens: output tokens. histogram[n]: verify steps that accepted exactly n of their
    drafts, whole windows of gamma = len(histogram) - 1 drafts.
    """

    completion_tokens: int
    histogram: tuple[int, ...]

    @property
    def steps(self) -> int:
        """Count the verify steps."""
        return sum(self.histogram)

    @property
    def accepted(self) -> int:
        """Count the accepted drafts over all steps."""
        return sum(n * count for n, count in enumerate(self.histogram))

    @classmethod
    def from_generation(cls, generation: Generation, gamma: int) -> RequestCounts:
        """Count an engine's result with full windows of `gamma` drafts."""
        histogram = [0] * (gamma + 1)
        for step in generation.steps:
            histogram[step.accepted] += 1
        return cls(len(generation.tokens), tuple(histogram))


@dataclass(frozen=True)
class Acceptance:
    """Acceptance over a set of requests; definitions at the top of the module.

    tau_low, tau_high: 95% percentile bootstrap over prompts. conditional[k - 1]: share of steps
    that accepted draft k among those that accepted drafts 1..k-1 (NaN if no step did).
    cumulative[k - 1]: share of all steps that accepted drafts 1..k.
    """

    prompts: int
    steps: int
    tokens: int
    tau: float
    tau_low: float
    tau_high: float
    accept_length: float
    conditional: tuple[float, ...]
    cumulative: tuple[float, ...]


def acceptance(requests: Iterable[RequestCounts], *, seed: int = 0) -> Acceptance:
    """Compute acceptance statistics over requests of one gamma.

    Raises ValueError if no request has a verify step or the histograms differ in length.
    """
    counted = [request for request in requests if request.steps > 0]
    if not counted:
        raise ValueError("no request has a verify step")
    if len({len(request.histogram) for request in counted}) > 1:
        raise ValueError("requests of different gamma cannot be counted together")
    steps = np.array([request.steps for request in counted], dtype=np.float64)
    yielded = np.array([request.steps + request.accepted for request in counted], dtype=np.float64)
    tokens = sum(request.completion_tokens for request in counted)
    total = np.sum([request.histogram for request in counted], axis=0)  # [gamma + 1]
    at_least = np.cumsum(total[::-1])[::-1]  # steps that accepted k or more, k = 0..gamma
    with np.errstate(invalid="ignore"):
        conditional = at_least[1:] / at_least[:-1]
    low, high = bootstrap_ratio(yielded, steps, seed=seed)
    return Acceptance(
        prompts=len(counted),
        steps=int(steps.sum()),
        tokens=tokens,
        tau=float(yielded.sum() / steps.sum()),
        tau_low=low,
        tau_high=high,
        accept_length=float(tokens / steps.sum()),
        conditional=tuple(conditional.tolist()),
        cumulative=tuple((at_least[1:] / at_least[0]).tolist()),
    )


def bootstrap_ratio(
    numerator: Floats, denominator: Floats, *, draws: int = 2000, seed: int = 0
) -> tuple[float, float]:
    """Return the 95% percentile interval of sum(numerator) / sum(denominator) over drawn prompts.

    numerator, denominator: [n], one entry a prompt. Steps of one prompt are not independent, so
    prompts, not steps, are drawn. Returns (low, high); for one prompt both are its ratio.
    """
    generator = np.random.default_rng(seed)
    index = generator.integers(0, len(numerator), size=(draws, len(numerator)))  # [draws, n]
    ratios = numerator[index].sum(axis=1) / denominator[index].sum(axis=1)
    low, high = np.percentile(ratios, [2.5, 97.5])
    return float(low), float(high)


@dataclass(frozen=True)
class ConfidencePairs:
    """Survival a_k = c_1 ... c_k against the outcome, one pair for each admitted draft.

    Drafts behind the verify length are censored: their acceptance is unknown unless an earlier one
    failed, and keeping only those would count failures alone.
    survival: [n]; accepted: [n] bool, drafts 1..k all accepted; position: [n], k.
    """

    survival: Floats
    accepted: NDArray[np.bool_]
    position: NDArray[np.int64]

    @classmethod
    def from_generations(cls, generations: Iterable[Generation]) -> ConfidencePairs:
        """Collect the pairs of every step of the engine's results."""
        survival: list[float] = []
        accepted: list[bool] = []
        position: list[int] = []
        for generation in generations:
            for step in generation.steps:
                alive = 1.0
                for k, confidence in enumerate(step.confidence[: step.verify_len], 1):
                    alive *= confidence
                    survival.append(alive)
                    accepted.append(step.accepted >= k)
                    position.append(k)
        return cls(
            np.array(survival, dtype=np.float64),
            np.array(accepted, dtype=np.bool_),
            np.array(position, dtype=np.int64),
        )

    def auc(self) -> float:
        """Return ROC-AUC of survival for acceptance, ties counted half; NaN with one class only."""
        positives = int(self.accepted.sum())
        negatives = len(self.accepted) - positives
        if positives == 0 or negatives == 0:
            return float("nan")
        ranks = _average_ranks(self.survival)
        wins = ranks[self.accepted].sum() - positives * (positives + 1) / 2
        return float(wins / (positives * negatives))

    def ece(self, bins: int = 10) -> float:
        """Return the ECE over `bins` equal-width bins of survival; NaN when empty."""
        if len(self.survival) == 0:
            return float("nan")
        place = np.minimum((self.survival * bins).astype(np.int64), bins - 1)
        gap = np.bincount(place, weights=self.survival - self.accepted, minlength=bins)
        return float(np.abs(gap).sum() / len(self.survival))


def _average_ranks(values: Floats) -> Floats:
    """Rank values from 1, ties sharing their mean: [n] -> [n]."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[inverse]


def relative_difference(ours: float, theirs: float) -> float:
    """Return ours / theirs - 1, in percent."""
    return 100.0 * (ours / theirs - 1.0)

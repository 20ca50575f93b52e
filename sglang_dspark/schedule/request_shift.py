"""Learn a shift of confidence for each request from its accepted drafts so far.

A table calibrates the average request. Some answers, and some whole domains, are easier to draft
throughout than the confidence head can predict. The request's shift s is added to its calibrated
logit z_k: c_k = sigmoid(z_k + s). A priori s is normal around 0 with the variance `spread`. It is
forgotten over `memory` steps, so that a request which changes its subject, or was skipped for some
steps, returns to the average. Each step is one Newton step of its likelihood and one step of
forgetting (a Kalman filter of an Ornstein-Uhlenbeck process, Laplace's approximation for the
Bernoulli outcomes); variance P, keep = exp(-1 / memory):

    P <- 1 / (1 / P + sum of c (1 - c));  s <- keep (s + P sum(y - c))
    P <- keep^2 P + (1 - keep^2) spread

This goes beyond the paper.

Only finished steps of the same request are used, so c_k is a function of values known before x_k
was drawn, and admission by it stays lossless.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sglang_dspark.schedule.compiled import compiled

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

LIMIT = 3.0  # logits; largest shift
SPREADS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6, 0.8)  # candidates of a fit
MEMORY = 200.0  # steps


class RequestShift:
    """Shifts of the requests in a pool of rows; a new generation of a row starts at 0."""

    def __init__(self, spreads: Sequence[float], rows: int, memory: float = MEMORY) -> None:
        """Allocate shifts; spreads: their variance in each regime, 0: no shifts.

        rows: size of the pool. memory: steps after which a shift has faded to 1/e.
        """
        if not spreads or not all(0 <= spread < np.inf for spread in spreads):
            raise ValueError(f"spread must be a variance, found {list(spreads)}")
        if not memory >= 1:
            raise ValueError(f"memory must be at least one step, found {memory}")
        self._spreads = np.array(spreads, np.float64)
        self._keep = float(np.exp(-1.0 / memory))
        self._shift = np.zeros(rows)
        self._variance = np.zeros(rows)
        self._generation = np.full(rows, -1, dtype=np.int64)
        self._out = np.zeros(rows)

    def shifts(self, rows: Ints, generations: Ints) -> Floats:
        """Return the shift of each request [R] float64, in memory that the next call overwrites.

        rows: [R] int64, distinct rows of the pool; generations [R] >= 0 of the rows.
        """
        out = self._out[: len(rows)]
        _shifts(rows, generations, self._shift, self._generation, out)
        return out

    def observe(
        self,
        rows: Ints,
        generations: Ints,
        regimes: Ints,
        confidence: NDArray[np.floating],
        accepted: Ints,
        verified: Ints,
    ) -> None:
        """Learn the outcome of a finished step of requests in distinct rows [R], regimes [R].

        confidence: [R, d] c_k as predicted, the shift included. accepted <= verified <= d: [R].
        Drafts after the first rejected one were not reached and do not count.
        """
        _observe(
            rows, generations, regimes, confidence, accepted, verified, self._spreads, self._keep,
            self._shift, self._variance, self._generation,
        )  # fmt: skip


@compiled
def _shifts(rows, generations, shift, owner, out) -> None:  # type: ignore[no-untyped-def]
    for r in range(rows.shape[0]):
        row = rows[r]
        out[r] = shift[row] if owner[row] == generations[r] else 0.0


@compiled
def _observe(  # type: ignore[no-untyped-def]
    rows,
    generations,
    regimes,
    confidence,
    accepted,
    verified,
    spreads,
    keep,
    shift,
    variance,
    owner,
) -> None:
    for r in range(rows.shape[0]):
        row, spread = rows[r], spreads[regimes[r]]
        if owner[row] != generations[r]:
            owner[row] = generations[r]
            shift[row] = 0.0
            variance[row] = spread
        error, information = 0.0, 0.0
        for k in range(min(verified[r], accepted[r] + 1)):
            c = np.float64(confidence[r, k])
            error += (1.0 if k < accepted[r] else 0.0) - c
            information += c * (1.0 - c)
        known = variance[row] / (1.0 + variance[row] * information)
        moved = min(max(shift[row] + known * error, -LIMIT), LIMIT)
        shift[row] = keep * moved
        variance[row] = keep * keep * known + (1.0 - keep * keep) * spread

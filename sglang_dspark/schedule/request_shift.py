"""A shift of each request's own, learned from what was accepted of it so far.

A table calibrates the average request. Requests differ: one answer is easier to draft throughout
than the confidence head can tell, and a whole domain is. To the calibrated logit z_k of a request
its shift s is added, c_k = sigmoid(z_k + s), where s is the most likely one, a priori normal around
0 with the variance `spread`, given the outcomes of its earlier steps. One Newton step an outcome
keeps it: s += sum(y - c) / (1 / spread + sum of c (1 - c)). This goes beyond the paper.

Only finished steps of the same request are looked at, so c_k stays a function of what was known
before x_k was drawn: admission by it is as lossless as before.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

LIMIT = 3.0  # logits; no request is further from the average
SPREADS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6, 0.8)  # that are tried when fitting


class RequestShift:
    """Shifts of the requests in a pool of rows; a new tenant of a row starts at 0."""

    def __init__(self, spread: float, rows: int) -> None:
        """spread: variance of the requests' shifts, 0 keeps all at 0; rows: size of the pool."""
        if not 0 <= spread < np.inf:
            raise ValueError(f"spread must be a variance, found {spread}")
        self.spread = spread
        self._shift = np.zeros(rows)
        self._information = np.zeros(rows)
        self._tenant = np.full(rows, -1, dtype=np.int64)

    def shifts(self, rows: Ints, tenants: Ints) -> Floats:
        """Shift of each request [R] float64; tenants [R] >= 0 tells who holds a row."""
        return np.where(self._tenant[rows] == tenants, self._shift[rows], 0.0)

    def observe(
        self, rows: Ints, tenants: Ints, confidence: Floats, accepted: Ints, verified: Ints
    ) -> None:
        """Outcome of a finished step of requests in distinct rows [R].

        confidence: [R, d] c_k as predicted, the shift included. accepted <= verified <= d: [R].
        Drafts behind the first rejected one were not reached and say nothing.
        """
        if self.spread == 0:
            return
        fresh = self._tenant[rows] != tenants
        shift = np.where(fresh, 0.0, self._shift[rows])
        information = np.where(fresh, 0.0, self._information[rows])
        column = np.arange(confidence.shape[1])
        reached = column < np.minimum(verified, accepted + 1)[:, None]  # [R, d]
        outcome = column < accepted[:, None]
        information += (confidence * (1 - confidence) * reached).sum(1)
        error = ((outcome - confidence) * reached).sum(1)
        self._shift[rows] = np.clip(shift + error / (1 / self.spread + information), -LIMIT, LIMIT)
        self._information[rows], self._tenant[rows] = information, tenants

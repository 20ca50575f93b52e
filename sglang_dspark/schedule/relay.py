"""Relay confidences of step t - lag to the plan of step t, by pool row and generation.

A pool row is a slot for one request after another; its generation is a number that changes with the
request. Every write has a generation, and a read names one: values of another generation are never
returned. Rows that were never written, have another generation or are too old are reported as not
fresh and filled with the caller's prior.

A read at step t sees writes of steps <= t - lag only, even if a row paused in between: each row
keeps its last lag + 1 writes. Step numbers decide, not the arrival order of copies, so all ranks
that make the same writes read the same values.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sglang_dspark.schedule.budget import Counts, Gains
from sglang_dspark.schedule.compiled import compiled

NEVER = np.int64(-(1 << 62))


class Resolved(NamedTuple):
    """confidence: [R, gamma] float32; fresh: [R] bool, False where the prior is used."""

    confidence: Gains
    fresh: NDArray[np.bool_]


class Relay:
    """Ring of the last lag + 1 confidences of each pool row."""

    def __init__(self, pool_rows: int, gamma: int, *, lag: int = 2, max_age: int = 16) -> None:
        """Allocate the ring.

        lag: steps between a write and the first read that may see it (0: the same step). max_age:
        writes older than this many steps are ignored; at least lag.
        """
        if min(pool_rows, gamma) < 1 or lag < 0 or max_age < lag:
            raise ValueError(f"relay of {pool_rows} rows, gamma {gamma}, {lag=}, {max_age=}")
        self.gamma, self.lag, self.max_age = gamma, lag, max_age
        self._depth = lag + 1
        self._confidence = np.zeros((pool_rows, self._depth, gamma), np.float32)
        self._generation = np.zeros((pool_rows, self._depth), np.int64)
        self._step = np.full((pool_rows, self._depth), NEVER, np.int64)
        self._next = np.zeros(pool_rows, np.int64)

    def publish(self, step: int, rows: Counts, generations: Counts, confidence: Gains) -> None:
        """Record step `step`'s confidences. Steps of a row must not decrease.

        rows, generations: [R] int64, distinct rows; confidence: [R, gamma] float32, calibrated.
        Raises ValueError on mismatched shapes or rows outside the pool.
        """
        if confidence.shape != (len(rows), self.gamma) or generations.shape != rows.shape:
            raise ValueError(f"{confidence.shape} and {generations.shape} for {rows.shape} rows")
        if not _publish(
            step,
            rows,
            generations,
            confidence,
            self._confidence,
            self._generation,
            self._step,
            self._next,
        ):
            raise self._unknown_row(rows)

    def resolve(
        self, step: int, rows: Counts, generations: Counts, prior: Gains, out: Gains | None = None
    ) -> Resolved:
        """Return the confidences that the plan of step `step` may use for these rows.

        rows, generations: [R] int64. prior: [gamma] float32, conditional survival of an unknown
        request by position. out: [R, gamma] float32 to write to.
        """
        if generations.shape != rows.shape or prior.shape != (self.gamma,):
            raise ValueError(
                f"generations {generations.shape}, prior {prior.shape}, rows {rows.shape}"
            )
        result = np.empty((len(rows), self.gamma), np.float32) if out is None else out
        fresh = np.empty(len(rows), np.bool_)
        window = (step - self.max_age, step - self.lag)
        if not _resolve(
            window,
            rows,
            generations,
            prior,
            self._confidence,
            self._generation,
            self._step,
            result,
            fresh,
        ):
            raise self._unknown_row(rows)
        return Resolved(result, fresh)

    def unknown(self, rows: int, prior: Gains) -> Resolved:
        """Return the prior for all requests, for a step whose whole copy is late or missing.

        Ranks must agree on when to use it; it reads no state that they hold separately.
        """
        return Resolved(np.tile(prior, (rows, 1)), np.zeros(rows, np.bool_))

    def _unknown_row(self, rows: Counts) -> ValueError:
        return ValueError(f"pool rows {rows.min()}..{rows.max()} of {len(self._next)}")


@compiled
def _publish(  # type: ignore[no-untyped-def]
    step, rows, generations, values, confidence, owner, written, following
) -> bool:
    """Write confidences; return False, with nothing written, if a row is outside the pool."""
    depth, gamma = confidence.shape[1], confidence.shape[2]
    for r in range(len(rows)):
        if rows[r] < 0 or rows[r] >= len(following):
            return False
    for r in range(len(rows)):
        row = rows[r]
        slot = following[row]
        newest = (slot + depth - 1) % depth
        if written[row, newest] == step:
            slot = newest  # the step ran again: its second write replaces the first
        else:
            following[row] = (slot + 1) % depth
        for j in range(gamma):
            confidence[row, slot, j] = values[r, j]
        owner[row, slot] = generations[r]
        written[row, slot] = step
    return True


@compiled
def _resolve(  # type: ignore[no-untyped-def]
    window, rows, generations, prior, confidence, owner, written, out, fresh
) -> bool:
    """Read confidences; return False, with `out` undefined, if a row is outside the pool."""
    depth, gamma = confidence.shape[1], confidence.shape[2]
    for r in range(len(rows)):
        row = rows[r]
        if row < 0 or row >= len(written):
            return False
        best = -1
        for slot in range(depth):
            at = written[row, slot]
            inside = window[0] <= at <= window[1] and owner[row, slot] == generations[r]
            if inside and (best < 0 or at > written[row, best]):
                best = slot
        fresh[r] = best >= 0
        for j in range(gamma):
            out[r, j] = prior[j] if best < 0 else confidence[row, best, j]
    return True

"""Weight requests by their speed targets: one below its tokens/s weighs more in the next plan.

A request names its target in `sampling_params.custom_params`, {"dspark_speed": tokens/s}; without
one it has the configuration's `schedule.speed_target`, if any. A request's speed is its tokens/s
since its first decode step. The weight (`schedule.gains.speed_weights`) is fixed before a step
drafts and depends only on finished steps, so the schedule stays lossless.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sglang_dspark.schedule.budget import Counts, Gains
from sglang_dspark.schedule.gains import speed_weights

PARAMETER = "dspark_speed"
MOST = 1e9  # tokens/s; a larger number is a mistake


def target_of(custom_params: object) -> float | None:
    """Return a request's target in tokens/s, or None.

    Raises ValueError, with a message for the client, unless it is a positive number below `MOST`.
    """
    if not isinstance(custom_params, dict) or PARAMETER not in custom_params:
        return None
    asked = custom_params[PARAMETER]
    number = isinstance(asked, int | float) and not isinstance(asked, bool)
    if not number or not 0 < asked < MOST:  # false for NaN
        raise ValueError(
            f"custom_params.{PARAMETER} is {asked!r}; give the tokens/s wanted, a positive number"
        )
    return float(asked)


class SpeedTargets:
    """Track target and speed of each pool row's generation; called by one thread."""

    def __init__(
        self,
        pool_rows: int,
        default: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Give requests without a target `default` tokens/s; None: they have none."""
        self._default = default
        self._clock = clock
        self._seen = False  # whether any request ever had a target
        self._generation = np.full(pool_rows, -1, np.int64)
        self._target = np.zeros(pool_rows, np.float32)
        self._speed = np.zeros(pool_rows, np.float32)
        self._began = np.zeros(pool_rows)  # time when its first decode step was handed out
        self._tokens = np.zeros(pool_rows, np.int64)  # its tokens then

    def handed_out(self, reqs: Sequence[Any], generation: Counts) -> None:
        """Record a step's tokens of requests (upstream's `Req`) in pool rows of `generation`."""
        for req in reqs:
            given = req.sampling_params.custom_params
            if given is None and self._default is None:
                continue
            target = target_of(given) or self._default
            if target is not None and not req.finished() and req.kv.holds_kv:
                self._note(req, target, int(generation[req.kv.req_pool_idx]))

    def _note(self, req: Any, target: float, generation: int) -> None:
        now, tokens, row = self._clock(), len(req.output_ids), req.kv.req_pool_idx
        if self._generation[row] != generation:
            self._generation[row], self._target[row] = generation, target
            self._began[row], self._tokens[row] = now, tokens
        passed = now - self._began[row]
        self._speed[row] = (tokens - self._tokens[row]) / passed if passed > 0 else 0.0
        self._seen = True

    def weights(self, rows: Counts, generations: Counts) -> Gains | None:
        """Return w_r [R] float32 of the requests in pool rows `rows`; None without any target."""
        if not self._seen:
            return None
        ours = self._generation[rows] == generations
        if not ours.any():
            return None
        return speed_weights(self._speed[rows], np.where(ours, self._target[rows], np.float32(0)))

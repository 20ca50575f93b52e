"""Compute upper bounds of the rate of any rule, from the current step's survivals.

Every step offers (depth, K) pairs: expected tokens tau and true seconds T. There are two bounds:

`by_load`   at each R by itself, the largest sum(tau) / sum(T) over the steps of that R.
`whole_run` the largest sum(tau) / sum(T) over all steps together.

Both use Dinkelbach's iteration: at rate L each step takes the pair of largest tau - L T, and the
rate of those pairs is the next L. Regret is measured against the first. The second bounds a trace
but is of no use to clients. A trace fixes how many steps each load lasts, so this bound uses short
steps at light loads, where each step yields few tokens, and long steps at heavy ones, and serves
both more slowly than it could. It may even be slower than plain decoding (docs/scheduler.md has the
numbers). A load that lasts for a time, or until its tokens are written, allows no such trade.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sglang_dspark.schedule.gains import gains
from sglang_dspark.schedule.simulation.scenarios import Machine, Trace
from sglang_dspark.schedule.simulation.simulate import Run

Floats = NDArray[np.float64]
ROUNDS = 6  # Dinkelbach converges superlinearly; 4 settle the sixth digit


@dataclass(frozen=True)
class Options:
    """Options of step t: [pairs] expected tokens, [pairs] true seconds. Entry 0 is plain."""

    tokens: Floats
    seconds: Floats


def options_of(machine: Machine, trace: Trace, gamma: int) -> list[Options]:
    """Return every (depth, K) of every step, with its true survivals and costs."""
    return [_options(machine, trace, t, gamma) for t in range(trace.steps)]


def largest_rate(options: Sequence[Options]) -> float:
    """Return the largest tokens / seconds of these steps together, one pair each."""
    rate = 0.0
    for _ in range(ROUNDS):
        chosen = [int(np.argmax(o.tokens - rate * o.seconds)) for o in options]
        tokens = sum(float(o.tokens[i]) for o, i in zip(options, chosen, strict=True))
        rate = tokens / sum(float(o.seconds[i]) for o, i in zip(options, chosen, strict=True))
    return rate


@dataclass(frozen=True)
class Oracle:
    """whole_run: tokens/s over all steps. by_load: tokens/s at each R that occurs.

    requests: [steps] int64, R of each step.
    """

    whole_run: float
    by_load: dict[int, float]
    requests: NDArray[np.int64]

    def regret(self, run: Run) -> float:
        """Return the part of tokens that `run` missed in the time spent at each load; in [0, 1)."""
        best = sum(
            rate * float(run.seconds[self.requests == load].sum())
            for load, rate in self.by_load.items()
        )
        return 1 - float(run.tokens.sum()) / best

    def whole_run_regret(self, run: Run) -> float:
        """Return 1 - the run's rate over the largest rate of the whole run."""
        return 1 - run.rate / self.whole_run


def oracle_of(machine: Machine, trace: Trace, gamma: int) -> Oracle:
    """Compute both rates of a trace on a machine."""
    options = options_of(machine, trace, gamma)
    requests = np.array([len(rows) for rows in trace.rows])
    by_load = {
        int(load): largest_rate([options[t] for t in np.flatnonzero(requests == load)])
        for load in np.unique(requests)
    }
    return Oracle(largest_rate(options), by_load, requests)


def _options(machine: Machine, trace: Trace, t: int, gamma: int) -> Options:
    survivals = gains(trace.confidence[t]).astype(np.float64)
    requests = len(survivals)
    factor = 1 + (machine.drift - 1) * t / trace.steps
    tokens = [np.array([float(requests)])]
    seconds = [machine.tokens[requests : requests + 1] + machine.draft[0]]
    for depth in range(1, gamma + 1):
        best = -np.sort(-survivals[:, :depth].ravel())
        tokens.append(requests + np.concatenate([[0.0], np.cumsum(best)]))
        upto = requests + len(best) + 1
        seconds.append(machine.tokens[requests:upto] + machine.draft[depth])
    return Options(np.concatenate(tokens), np.concatenate(seconds) * factor)

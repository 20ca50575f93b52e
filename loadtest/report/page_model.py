"""Model speculation under load: each policy on a measured machine with a measured drafter.

The page of `dspark report` lets a reader change concurrency, workload and policy. `page_model.js`
computes its content from this data: the step times that the run's server measured and the
acceptance by position of its requests. `page_reference.py` computes the same in Python with the
scheduler's own functions; a test compares the two.

Requests differ in how well they are drafted for, and so do a request's steps. The model draws both
from fixed sequences (no random numbers), as logits around each position's mean:

    c_k = sigmoid(mu_k + spread (sqrt(BETWEEN) z_request + sqrt(1 - BETWEEN) z_step))

mu_k is chosen so that the mean survival of the population equals the measured one at any spread.
spread is the variation that the confidence head can predict; at 0 it predicts by position alone.
Confidence is assumed to be calibrated: c_k is the probability that draft k is accepted, given that
all drafts before it are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_dspark.errors import DSparkError
from sglang_dspark.schedule.cost_table import CostTable, draft_row, monotone, tokens_curve

Floats = NDArray[np.float64]
AGES = 8  # steps of a request in the model
POPULATION = 64  # requests that the means are fitted on
BETWEEN = 0.5  # share of the logits' variance that is between requests
MIX = "mix"  # the workload of all domains, in the shares of the run
WIDEST = 4.0  # largest spread, of logits
# Low-discrepancy sequences: powers of 1 / 1.3247... for domain and level, the golden ratio for
# steps.
_DOMAIN, _LEVEL, _STEP = 0.7548776662466927, 0.5698402909980532, 0.6180339887498949
_LIMIT, _HALVINGS = 16.0, 48  # of the search for mu, in logits


@dataclass(frozen=True)
class Workload:
    """share: part of the run's requests; survival: [gamma] share of steps whose first k drafts
    were accepted, non-increasing; steps: number of steps counted."""

    share: float
    survival: tuple[float, ...]
    steps: int


@dataclass(frozen=True)
class LoadModel:
    """Input of the page's model. Times in seconds.

    tokens: [> most (1 + gamma)] of a pass over B tokens at the mean context; per_request: added by
    a request; draft[R - 1][d]: of drafting d positions for R requests, d = 0: skipping.
    scale: measured throughput of plain decoding over that of its passes alone (prefill, waits and
    the client use the rest); speed_scale: the same of its speed per user.
    acceptance_from, spread_from: sources, in words.
    """

    gamma: int
    most: int
    tokens: tuple[float, ...]
    per_request: float
    draft: tuple[tuple[float, ...], ...]
    workloads: Mapping[str, Workload]
    acceptance_from: str
    spread: float
    spread_from: str
    scale: float
    speed_scale: float

    def __post_init__(self) -> None:
        if len(self.tokens) <= self.most * (1 + self.gamma) or len(self.draft) != self.most:
            raise ValueError("the cost curve does not reach the largest concurrency")
        for name, each in self.workloads.items():
            if len(each.survival) != self.gamma or sorted(each.survival)[::-1] != [*each.survival]:
                raise ValueError(f"survival of {name} must be {self.gamma} falling shares")
        if not 0 <= self.spread <= WIDEST or min(self.scale, self.speed_scale) <= 0:
            raise ValueError(f"spread {self.spread}, scale {self.scale}")

    def as_json(self) -> dict[str, Any]:
        """Return the model as the page embeds it, with the constants of this module."""
        constants = {
            "ages": AGES,
            "population": POPULATION,
            "between": BETWEEN,
            "widest": WIDEST,
            "sequences": [_DOMAIN, _LEVEL, _STEP],
            "limit": _LIMIT,
            "halvings": _HALVINGS,
        }
        return {**asdict(self), "constants": constants}


@dataclass(frozen=True)
class Curve:
    """The measured machine in the model's form; fields as in `LoadModel`."""

    tokens: tuple[float, ...]
    per_request: float
    draft: tuple[tuple[float, ...], ...]

    @classmethod
    def of(cls, table: CostTable, most: int, context: float) -> Curve:
        """Build the curve from a server's step times. context: mean tokens that a request holds."""
        reach = most * (1 + table.gamma)
        seconds = np.asarray(table.seconds)
        # As the scheduler reads it (schedule/cost_model.py): between tiers a drop is noise.
        seconds = seconds if table.padded else monotone(seconds)
        tokens = tokens_curve(table.knots, seconds, table.padded, reach)
        tokens = tokens + table.per_context * context * np.arange(len(tokens))
        rows = [draft_row(table, requests) for requests in range(1, most + 1)]
        return cls(
            tuple(tokens.tolist()),
            table.per_request,
            tuple(tuple(row.tolist()) for row in rows),
        )

    def plain_rate(self, requests: int) -> float:
        """Return tokens/s of plain decoding, with its passes alone counted."""
        seconds = self.tokens[requests] + requests * self.per_request + self.draft[requests - 1][0]
        return requests / seconds


def levels(most: int) -> list[int]:
    """List the concurrencies that curves are drawn at: all to 8, then by about a quarter."""
    found = [*range(1, min(8, most) + 1)]
    while found[-1] < most:
        found.append(min(most, max(found[-1] + 1, round(found[-1] * 1.25))))
    return found


def standard(u: Floats) -> Floats:
    """Return the logistic variable of mean 0 and variance 1 at probability u in (0, 1)."""
    return math.sqrt(3) / math.pi * np.log(u / (1 - u))


def domain_of(requests: NDArray[np.int64], shares: Sequence[float]) -> NDArray[np.int64]:
    """Return the index of each request's domain. shares: of all domains, summing to 1."""
    edges = np.cumsum(shares[:-1])
    return np.searchsorted(edges, (requests + 0.5) * _DOMAIN % 1, side="right")


def deviation(requests: NDArray[np.int64], ages: NDArray[np.int64], spread: float) -> Floats:
    """Compute the offset of a request's logits from the mean at each step: [requests, ages]."""
    who = requests.astype(np.float64)
    level = standard((who + 0.5) * _LEVEL % 1)[:, None]
    step = standard((who[:, None] * AGES + ages + 0.5) * _STEP % 1)
    return spread * (math.sqrt(BETWEEN) * level + math.sqrt(1 - BETWEEN) * step)


def mean_logits(survival: Sequence[float], spread: float) -> Floats:
    """Solve for mu_k: [gamma], such that the population's mean survivals are `survival`."""
    around = deviation(np.arange(POPULATION), np.arange(AGES), spread).ravel()
    running = np.ones_like(around)
    found = np.zeros(len(survival))
    for k, target in enumerate(survival):
        low, high = -_LIMIT, _LIMIT
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            mean = float((running * sigmoid(middle + around)).mean())
            low, high = (middle, high) if mean < target else (low, middle)
        found[k] = (low + high) / 2
        running = running * sigmoid(found[k] + around)
    return found


def sigmoid(x: Floats) -> Floats:
    """Return 1 / (1 + exp(-x))."""
    return 1 / (1 + np.exp(-x))


def normalised(workloads: Mapping[str, Workload]) -> dict[str, Workload]:
    """Normalise shares to sum to 1. Raises DSparkError if no request was drafted for."""
    total = sum(each.share for each in workloads.values())
    if total <= 0:
        raise DSparkError("no request of the run was drafted for: there is no acceptance to model")
    return {n: Workload(w.share / total, w.survival, w.steps) for n, w in workloads.items()}

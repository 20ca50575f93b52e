"""The page's model of speculation under load, computed with the scheduler's own functions.

Requests run `AGES` steps, those of a batch together. A step is scored by its expected tokens, given
the confidences, over its modelled seconds (as in `schedule/simulation/simulate.py`); a policy by
the total of one over the total of the other.

plain       does not draft.
fixed       drafts and verifies `length` positions of every request.
static      drafts gamma, verifies a request's drafts while their confidence is above `threshold`.
algorithm1  the paper's early stop over the present step, true costs, gamma always drafted.
dspark      K and depth by the best Theta over the confidences of two steps ago (of a younger
            request, its mean acceptance); then the K best of the present step.

The scheduler's guard, its corrections of step times and its own time are not modelled.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sglang_dspark.errors import DSparkError
from sglang_dspark.loadtest.report.page_model import (
    AGES,
    MIX,
    POPULATION,
    WIDEST,
    LoadModel,
    Workload,
    deviation,
    domain_of,
    mean_logits,
    sigmoid,
)
from sglang_dspark.schedule.admission import admit
from sglang_dspark.schedule.budget import Costs, Counts, Gains, Workspace, early_stop, search
from sglang_dspark.schedule.gains import gains

POLICIES = ("plain", "fixed", "static", "algorithm1", "dspark")
LAG = 2


@dataclass(frozen=True)
class Choice:
    """The page's controls. length: of fixed; threshold: of static, on conditional confidence."""

    workload: str
    policy: str
    requests: int
    length: int
    threshold: float
    spread: float


@dataclass(frozen=True)
class Outcome:
    """tokens_per_s: of all users; speed: tokens/s/user; tau: tokens a step and request, bonus
    included; drafts: verified a step and request; seconds: of a step; skipped: share of steps that
    drafted nothing; admitted, accepted: drafts a step and request, by position 1..gamma."""

    tokens_per_s: float
    speed: float
    tau: float
    drafts: float
    seconds: float
    skipped: float
    admitted: tuple[float, ...]
    accepted: tuple[float, ...]


def outcome(model: LoadModel, choice: Choice) -> Outcome:
    """Model the policy under the load. Raises DSparkError for an unknown workload or policy."""
    if choice.policy not in POLICIES:
        raise DSparkError(f"no policy {choice.policy!r}; known: {', '.join(POLICIES)}")
    requests = choice.requests
    batches = _batches(model.workloads, choice.workload, requests, choice.spread)
    costs = Costs(
        np.asarray(model.tokens),
        requests * model.per_request,
        np.asarray(model.draft[requests - 1]),
    )
    workspace = Workspace(requests, model.gamma)
    seconds = skipped = 0.0
    steps = 0
    admitted, accepted = np.zeros(model.gamma), np.zeros(model.gamma)
    for confidence, expected in batches:
        for age in range(AGES):
            present = np.ascontiguousarray(confidence[:, age])
            lagged = confidence[:, age - LAG] if age >= LAG else expected
            lengths, depth = _decide(choice, present, lagged, costs, workspace)
            kept = np.arange(model.gamma) < lengths[:, None]
            admitted += kept.sum(axis=0)
            accepted += np.where(kept, gains(present), 0).sum(axis=0, dtype=np.float64)
            batch = requests + int(lengths.sum())
            seconds += float(costs.tokens[batch] + costs.fixed + costs.draft[depth])
            skipped += depth == 0
            steps += 1
    slots = steps * requests
    tokens = slots + float(accepted.sum())
    return Outcome(
        tokens_per_s=model.scale * tokens / seconds,
        speed=model.speed_scale * tokens / seconds / requests,
        tau=tokens / slots,
        drafts=float(admitted.sum()) / slots,
        seconds=seconds / steps,
        skipped=skipped / steps,
        admitted=tuple((admitted / slots).tolist()),
        accepted=tuple((accepted / slots).tolist()),
    )


@functools.lru_cache(maxsize=64)
def _means(survival: tuple[float, ...], spread: float) -> NDArray[np.float64]:
    return mean_logits(survival, spread)


@dataclass(frozen=True)
class Selection:
    """The served scheduler's choice at `requests` users: drafts verified, and accepted of them."""

    requests: int
    verified: float
    accepted: float


def fitted_spread(model: LoadModel, seen: Sequence[Selection]) -> float | None:
    """Fit the spread at which the model's scheduler has the served one's acceptance rate.

    The rate is averaged over the served drafts. 0 if the served scheduler chose no better than by
    position alone; None if it chose better than any spread explains, or `seen` is empty.
    """
    low, high = 0.0, WIDEST
    if not seen or _excess(model, seen, high) < 0:
        return None
    if _excess(model, seen, low) >= 0:
        return 0.0
    for _ in range(9):
        middle = (low + high) / 2
        low, high = (low, middle) if _excess(model, seen, middle) >= 0 else (middle, high)
    return round((low + high) / 2, 2)


def _excess(model: LoadModel, seen: Sequence[Selection], spread: float) -> float:
    """Return the accepted drafts that the model's shares predict beyond the measured ones."""
    total = 0.0
    for each in seen:
        found = outcome(model, Choice(MIX, "dspark", each.requests, model.gamma, 0.0, spread))
        if found.drafts > 0:  # without drafts the model has no share to compare
            total += each.verified * sum(found.accepted) / sum(found.admitted) - each.accepted
    return total


def _batches(
    workloads: Mapping[str, Workload], workload: str, requests: int, spread: float
) -> list[tuple[Gains, Gains]]:
    """Build request generations: (confidence [R, AGES, gamma], expected [R, gamma]), float32."""
    names = list(workloads) if workload == MIX else [workload]
    if any(name not in workloads for name in names):
        known = ", ".join([MIX, *workloads])
        raise DSparkError(f"no workload {workload!r}; the run has {known}")
    means = np.array([_means(workloads[n].survival, spread) for n in names])
    total = sum(workloads[n].share for n in names)
    shares = [workloads[n].share / total for n in names]
    survival = np.array([workloads[n].survival for n in names])  # [domains, gamma]
    before = np.concatenate([np.ones((len(names), 1)), survival[:, :-1]], axis=1)
    usual = np.divide(survival, before, out=np.zeros_like(survival), where=before > 0)
    generations = max(2, -(-POPULATION // requests))
    found = []
    for generation in range(generations):
        who = np.arange(requests) + generation * requests
        domain = domain_of(who, shares)
        around = deviation(who, np.arange(AGES), spread)  # [R, AGES]
        logits = means[domain][:, None, :] + around[:, :, None]
        found.append((sigmoid(logits).astype(np.float32), usual[domain].astype(np.float32)))
    return found


def _decide(
    choice: Choice, present: Gains, lagged: Gains, costs: Costs, workspace: Workspace
) -> tuple[Counts, int]:
    """Return the verify lengths [R] and the depth drafted."""
    rows, gamma = present.shape
    if choice.policy == "plain":
        return np.zeros(rows, np.int64), 0
    if choice.policy == "fixed":
        return np.full(rows, choice.length, np.int64), choice.length
    if choice.policy == "static":
        above: NDArray[np.bool_] = present.astype(np.float64) > choice.threshold
        return np.cumprod(above, axis=1).sum(axis=1), gamma
    survivals = gains(present)
    if choice.policy == "algorithm1":
        budget = early_stop(survivals, costs, workspace)
        return admit(survivals, budget.drafts, workspace), gamma
    budget = search(gains(np.ascontiguousarray(lagged)), costs, workspace)
    limits = np.full(rows, budget.depth, np.int64)
    return admit(survivals, budget.drafts, workspace, limits=limits), budget.depth

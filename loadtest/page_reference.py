"""The page's model of speculation under load, computed with the scheduler's own functions.

Requests live `AGES` steps, all of a batch alike. A step is scored by its expected tokens, given the
confidences, over its modelled seconds (as in `schedule/simulate.py`); a policy by the total of one
over the total of the other.

plain       drafts nothing.
fixed       drafts and verifies `length` positions of every request.
static      drafts gamma, verifies a request's drafts while their confidence is above `threshold`.
algorithm1  the paper's early stop over the present step, true costs, gamma always drafted.
dspark      K and depth by the best Theta over the confidences of two steps ago (where a request is
            younger, its mean acceptance); then the K best of the present step.

The scheduler's guard, its corrections of step times and its own time are not modelled.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sglang_dspark.errors import DSparkError
from sglang_dspark.loadtest.page_model import (
    AGES,
    MIX,
    POPULATION,
    LoadModel,
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
    """tokens_per_s: of all users; tau: tokens a step and request, bonus included; drafts: verified
    a step and request; seconds: of a step; skipped: share of steps that drafted nothing."""

    tokens_per_s: float
    tau: float
    drafts: float
    seconds: float
    skipped: float


def outcome(model: LoadModel, choice: Choice) -> Outcome:
    """What the policy makes of the load. Raises DSparkError for an unknown workload or policy."""
    if choice.policy not in POLICIES:
        raise DSparkError(f"no policy {choice.policy!r}; known: {', '.join(POLICIES)}")
    requests = choice.requests
    costs = Costs(
        np.asarray(model.tokens),
        requests * model.per_request,
        np.asarray(model.draft[requests - 1]),
    )
    workspace = Workspace(requests, model.gamma)
    tokens = seconds = drafts = skipped = 0.0
    steps = 0
    for confidence, expected in _batches(model, choice):
        for age in range(AGES):
            present = np.ascontiguousarray(confidence[:, age])
            lagged = confidence[:, age - LAG] if age >= LAG else expected
            lengths, depth = _decide(choice, present, lagged, costs, workspace)
            survivals = gains(present)
            kept = np.arange(model.gamma) < lengths[:, None]
            tokens += requests + float(survivals[kept].sum(dtype=np.float64))
            batch = requests + int(lengths.sum())
            seconds += float(costs.tokens[batch] + costs.fixed + costs.draft[depth])
            drafts += int(lengths.sum())
            skipped += depth == 0
            steps += 1
    return Outcome(
        tokens_per_s=model.scale * tokens / seconds,
        tau=tokens / (steps * requests),
        drafts=drafts / (steps * requests),
        seconds=seconds / steps,
        skipped=skipped / steps,
    )


@functools.lru_cache(maxsize=64)
def _means(survival: tuple[float, ...], spread: float) -> NDArray[np.float64]:
    return mean_logits(survival, spread)


def _batches(model: LoadModel, choice: Choice) -> list[tuple[Gains, Gains]]:
    """Generations of requests: (confidence [R, AGES, gamma], expected [R, gamma]), float32."""
    names = list(model.workloads) if choice.workload == MIX else [choice.workload]
    if any(name not in model.workloads for name in names):
        known = ", ".join([MIX, *model.workloads])
        raise DSparkError(f"no workload {choice.workload!r}; the run has {known}")
    means = np.array([_means(model.workloads[n].survival, choice.spread) for n in names])
    total = sum(model.workloads[n].share for n in names)
    shares = [model.workloads[n].share / total for n in names]
    survival = np.array([model.workloads[n].survival for n in names])  # [domains, gamma]
    before = np.concatenate([np.ones((len(names), 1)), survival[:, :-1]], axis=1)
    usual = np.divide(survival, before, out=np.zeros_like(survival), where=before > 0)
    generations = max(2, -(-POPULATION // choice.requests))
    found = []
    for generation in range(generations):
        who = np.arange(choice.requests) + generation * choice.requests
        domain = domain_of(who, shares)
        around = deviation(who, np.arange(AGES), choice.spread)  # [R, AGES]
        logits = means[domain][:, None, :] + around[:, :, None]
        found.append((sigmoid(logits).astype(np.float32), usual[domain].astype(np.float32)))
    return found


def _decide(
    choice: Choice, present: Gains, lagged: Gains, costs: Costs, workspace: Workspace
) -> tuple[Counts, int]:
    """Verify lengths [R] and the depth drafted."""
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

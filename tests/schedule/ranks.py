"""What each of two gloo ranks does in the agreement test; a module of its own, as it is spawned.

Every rank has its own planner, fed with its own copies: confidences off in the last digits, relay
data late or missing, step times of its own clock. Only the agreement makes them act alike.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import torch.distributed as dist

from sglang_dspark.errors import DSparkError
from sglang_dspark.schedule.agreement import Agreement, TierAgreement
from sglang_dspark.schedule.cost_model import CostModel
from sglang_dspark.schedule.plan import Plan
from sglang_dspark.schedule.planner import SearchPlanner
from sglang_dspark.schedule.simulation.scenarios import Machine, random_trace, sample_accepted

REQUESTS, GAMMA, RANKS = 8, 5, 2
TIERS = (8, 16, 24, 32, 48)


def rank_main(rank: int, steps: int, folder: str) -> None:
    """Join the group, take all steps, write what happened to `folder/RANK.json`."""
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS
    )
    group = dist.group.WORLD
    assert group is not None
    tensor_parallel = _tensor_parallel(rank, steps, Agreement(REQUESTS, group))
    tiers = _data_parallel(rank, steps // 10, TierAgreement(TIERS, group))
    failure = _failure(Agreement(REQUESTS, group), steps)
    report = {**tensor_parallel, "tiers": tiers, "failure": failure}
    Path(folder, f"{rank}.json").write_text(json.dumps(report))
    dist.destroy_process_group()


def _tensor_parallel(rank: int, steps: int, agreement: Agreement) -> dict[str, object]:
    shared = np.random.default_rng(0)  # the same requests, drafts and verdicts on all ranks
    own = np.random.default_rng(rank + 1)
    batch = np.arange(REQUESTS * (GAMMA + 1) + 1)  # costs at which K depends on confidence
    tokens = 1.0 + 0.06 * batch + 0.2 * (batch // 8)
    draft = np.concatenate([[0.0], 0.1 + 0.02 * np.arange(GAMMA)])
    machine = Machine(tokens, draft, (1, *range(4, len(batch), 4)), padded=False)
    trace = random_trace(shared, REQUESTS, GAMMA, 500)
    planner = SearchPlanner(
        GAMMA, trace.pool_rows, CostModel(machine.profile(own, 0.05), trace.pool_rows)
    )
    digest, differed = hashlib.sha256(), 0
    for step in range(steps):
        t = step % trace.steps
        rows, tenants = trace.rows[t], trace.tenants[t] + step // trace.steps * 10**6
        late = own.random() < 0.1
        mine = planner.plan(step, rows, tenants, 0, relay_arrived=not late)
        plan = agreement.plan(step, len(rows), lambda mine=mine: mine)  # type: ignore[misc]
        jitter = np.exp(1e-3 * own.standard_normal(trace.confidence[t].shape))
        copy = np.clip(trace.confidence[t] * jitter, 0, 1).astype(np.float32)
        lengths_alone = planner.admit(plan, copy)
        lengths = agreement.lengths(plan, lambda found=lengths_alone: found)  # type: ignore[misc]
        differed += plan.budget[:2] != mine.budget[:2] or not np.array_equal(lengths, lengths_alone)
        if plan.speculates and own.random() > 0.05:  # else the copy got lost
            planner.publish(plan, rows, tenants, copy)
        accepted = sample_accepted(shared, trace.confidence[t], lengths)
        tokens = len(rows) + int(lengths.sum())
        seconds = machine.seconds(tokens, plan.budget.depth, 0.0)
        seconds *= float(np.exp(0.03 * own.standard_normal()))
        planner.finished(plan, rows, tenants, accepted, lengths, copy, seconds)
        _note(digest, plan, lengths)
    return {"digest": digest.hexdigest(), "differed": differed, "steps": steps}


def _note(digest: hashlib._Hash, plan: Plan, lengths: np.ndarray) -> None:
    """Everything a rank would act on."""
    digest.update(repr((plan.step, plan.requests, plan.budget, plan.mode, plan.settled)).encode())
    digest.update(plan.limits.tobytes() + lengths.tobytes())


def _data_parallel(rank: int, steps: int, agreement: TierAgreement) -> list[list[int]]:
    """Passes of unlike size, idle steps among them: [own tokens, tier, depth] of each step."""
    own = np.random.default_rng(rank + 7)
    seen = []
    for _ in range(steps):
        idle = own.random() < 0.2
        tokens = 0 if idle else int(own.integers(1, 60))
        tier = agreement.agree(tokens, 0 if idle else int(own.integers(0, GAMMA + 1)))
        seen.append([tokens, tier.tokens, tier.depth])
    return seen


def _failure(agreement: Agreement, step: int) -> str:
    """The leader's planner raises: nobody may hang."""

    def broken() -> Plan:
        raise RuntimeError("no plan today")

    try:
        agreement.plan(step, 1, broken)
    except (RuntimeError, DSparkError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"

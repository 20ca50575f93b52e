"""One decision for all ranks: the leader decides, everyone acts on what the leader sent.

Ranks of one tensor-parallel engine hold copies of the same confidences and measure their own times;
copies differ in the last bit or arrive late, clocks differ always. A budget or a length that was
found twice may therefore be found differently, and ranks that run passes of unlike size wait for
each other for ever. So nothing is found twice: `Agreement` broadcasts the leader's `Plan` before
drafting and its verify lengths after, each as one int64 message of fixed size.

Data-parallel ranks serve requests of their own but run their passes together: `TierAgreement` takes
the largest pass and the deepest draft of all. Both are made of plans, that is fixed before
drafting, so filling the tier keeps the schedule lossless (docs/losslessness.md). Algorithm 1
(`early_stop.py`) finds K after drafting and has no such tier.

Groups must carry CPU tensors (gloo). A leader that fails says so in the message, and every rank
raises; a rank that is at another step raises instead of waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from sglang_dspark.errors import DSparkError
from sglang_dspark.schedule.budget import Budget, Counts
from sglang_dspark.schedule.guard import Mode
from sglang_dspark.schedule.plan import Plan

HEADER = 13
FAILED = -1  # in place of the step: the leader could not decide
_MODES = tuple(Mode)
T = TypeVar("T")


class Agreement:
    """Plans and lengths of one tensor-parallel group; call both methods on every rank, each step.

    Messages use memory that is allocated once: [HEADER + 3 max_requests] int64.
    """

    def __init__(
        self, max_requests: int, group: dist.ProcessGroup | None = None, leader: int = 0
    ) -> None:
        """group: None means no other ranks, and nothing is sent. leader: its global rank."""
        self.max_requests, self.group, self.leader = max_requests, group, leader
        self.leads = group is None or dist.get_rank() == leader
        self._tensor = torch.zeros(HEADER + 3 * max_requests, dtype=torch.int64)
        self._message = self._tensor.numpy()

    def plan(self, step: int, requests: int, decide: Callable[[], Plan]) -> Plan:
        """The leader's plan of step `step` for R requests. Only the leader calls `decide`.

        Raises DSparkError where the leader failed or is at another step or batch.
        """
        if self.group is None:
            return decide()
        if self.leads:
            plan = self._decided(decide)
            encode(plan, self._message)
            self._send()
            return plan
        self._send()
        self._check(step, requests)
        return decode(self._message)

    def lengths(self, plan: Plan, decide: Callable[[], Counts]) -> Counts:
        """The leader's verify lengths, [R] int64, of an agreed plan; as `plan`."""
        if self.group is None:
            return decide()
        if self.leads:
            lengths = self._decided(decide)
            self._message[0], self._message[1] = plan.step, plan.requests
            self._message[HEADER : HEADER + plan.requests] = lengths
            self._send()
            return lengths
        self._send()
        self._check(plan.step, plan.requests)
        return self._message[HEADER : HEADER + plan.requests].copy()

    def _decided(self, decide: Callable[[], T]) -> T:
        """What `decide` returns; if it raises, the others are told before the error goes on."""
        try:
            return decide()
        except BaseException:
            self._message[0] = FAILED
            self._send()
            raise

    def _send(self) -> None:
        dist.broadcast(self._tensor, src=self.leader, group=self.group)

    def _check(self, step: int, requests: int) -> None:
        theirs, batch = int(self._message[0]), int(self._message[1])
        if theirs == FAILED:
            raise DSparkError(f"rank {self.leader} could not plan step {step}; its log says why")
        if (theirs, batch) != (step, requests):
            raise DSparkError(
                f"rank {dist.get_rank()} is at step {step} with {requests} requests, rank "
                f"{self.leader} at step {theirs} with {batch}: restart the server and report this"
            )


class Tier(NamedTuple):
    """tokens: every rank's pass is padded to this many. depth: every rank drafts this deep."""

    tokens: int
    depth: int


class TierAgreement:
    """The common pass of data-parallel ranks; idle ranks take part with 0 tokens."""

    def __init__(self, tiers: Sequence[int], group: dist.ProcessGroup | None = None) -> None:
        """tiers: ascending sizes that passes are padded to; none: passes are not padded."""
        if any(b <= a for a, b in pairwise(tiers)):
            raise ValueError(f"tiers must be ascending: {list(tiers)}")
        self.tiers, self.group = np.asarray(tiers, np.int64), group
        self._tensor = torch.zeros(2, dtype=torch.int64)

    def agree(self, tokens: int, depth: int) -> Tier:
        """tokens: this rank's R + K. Returns the smallest tier that holds every rank's pass.

        Larger than the largest tier: the largest pass itself (such a pass runs without a tier).
        """
        self._tensor[0], self._tensor[1] = tokens, depth
        if self.group is not None:
            dist.all_reduce(self._tensor, op=dist.ReduceOp.MAX, group=self.group)
        most, deepest = int(self._tensor[0]), int(self._tensor[1])
        at = int(np.searchsorted(self.tiers, most))
        return Tier(int(self.tiers[at]) if at < len(self.tiers) else most, deepest)


def encode(plan: Plan, message: Counts) -> None:
    """Write a plan to a message, [HEADER + 3 max_requests] int64; floats keep their bits."""
    budget, requests = plan.budget, plan.requests
    most = (len(message) - HEADER) // 3
    if requests > most:
        raise ValueError(f"a plan for {requests} requests does not fit a message for {most}")
    message[:5] = plan.step, requests, plan.context, budget.drafts, budget.depth
    message[5:8].view(np.float64)[:] = budget.theta, budget.seconds, plan.gain
    message[8:12] = _MODES.index(plan.mode), plan.settled, plan.known, plan.floors is not None
    message[12] = plan.weights is not None
    message[HEADER : HEADER + requests] = plan.limits
    if plan.floors is not None:
        message[HEADER + most : HEADER + most + requests] = plan.floors
    if plan.weights is not None:
        start = HEADER + 2 * most
        message[start : start + requests].view(np.float64)[:] = plan.weights


def decode(message: Counts) -> Plan:
    """The plan in a message; it owns its arrays."""
    step, requests, context, drafts, depth = (int(value) for value in message[:5])
    theta, seconds, gain = (float(value) for value in message[5:8].view(np.float64))
    mode, settled, known, bounded, weighted = (int(value) for value in message[8:13])
    most = (len(message) - HEADER) // 3
    floors = message[HEADER + most : HEADER + most + requests].copy() if bounded else None
    weights = None
    if weighted:
        start = HEADER + 2 * most
        weights = message[start : start + requests].view(np.float64).astype(np.float32)
    return Plan(
        step,
        requests,
        context,
        Budget(drafts, depth, theta, seconds),
        message[HEADER : HEADER + requests].copy(),
        floors,
        _MODES[mode],
        bool(settled),
        known,
        gain,
        weights,
    )

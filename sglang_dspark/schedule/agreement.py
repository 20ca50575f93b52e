"""Decide once for all ranks: the leader decides, and every rank acts on its message.

Ranks of one tensor-parallel engine hold copies of the same confidences and measure their own times.
The copies may differ in the last bit or arrive late, and the clocks always differ. Two ranks may
therefore compute different budgets, and ranks that run passes of different sizes deadlock. So only
the leader plans: `Agreement` broadcasts its `Plan` before drafting, as one int64 message of fixed
size. Verify lengths are on the device and are sent there (`step/ranks.py`).

Groups must support CPU tensors (gloo). If the leader fails, it sends a failure and every rank
raises; a rank with another batch raises instead of waiting.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from zlib import crc32

import numpy as np
import torch
import torch.distributed as dist

from sglang_dspark.errors import DSparkError
from sglang_dspark.schedule.budget import Budget, Counts
from sglang_dspark.schedule.guard import Mode
from sglang_dspark.schedule.plan import Plan

HEADER = 14
FAILED = -1  # in place of the step: the leader could not decide
_MODES = tuple(Mode)


class Agreement:
    """Plans of one tensor-parallel group; every rank sends or receives one in each step.

    Messages use memory that is allocated once: [HEADER + 3 max_requests] int64.
    """

    def __init__(self, max_requests: int, group: dist.ProcessGroup, leader: int = 0) -> None:
        """Allocate the message; leader is the global rank that decides."""
        self.group, self.leader = group, leader
        self.leads = dist.get_rank() == leader
        self._tensor = torch.zeros(HEADER + 3 * max_requests, dtype=torch.int64)
        self._message = self._tensor.numpy()

    def send(self, plan: Plan, rows: Counts) -> None:
        """Send the leader's plan for the requests in pool rows `rows` [R] to all ranks."""
        encode(plan, self._message)
        self._message[HEADER - 1] = crc32(rows.data)
        self._broadcast()

    def receive(self, rows: Counts) -> Plan:
        """Return the leader's plan for the requests in pool rows `rows`, [R] int64.

        Raises DSparkError if the leader failed or decodes another batch.
        """
        self._broadcast()
        step, requests = int(self._message[0]), int(self._message[1])
        if step == FAILED:
            raise failed(self.leader)
        if (requests, int(self._message[HEADER - 1])) != (len(rows), crc32(rows.data)):
            raise DSparkError(
                f"rank {dist.get_rank()} decodes {len(rows)} requests, rank {self.leader} in step "
                f"{step} {requests} others: restart the server and report this"
            )
        return decode(self._message)

    @contextmanager
    def guarding(self) -> Iterator[None]:
        """Guard the leader's decision: if it raises, the other ranks raise too."""
        try:
            yield
        except BaseException:
            self._message[0] = FAILED
            self._broadcast()
            raise

    def _broadcast(self) -> None:
        dist.broadcast(self._tensor, src=self.leader, group=self.group)


def failed(leader: int) -> DSparkError:
    """Make the error of a rank whose leader could not decide."""
    return DSparkError(f"rank {leader} could not decide for all ranks; its log says why")


def encode(plan: Plan, message: Counts) -> None:
    """Write a plan to a message, [HEADER + 3 max_requests] int64; floats are stored exactly."""
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
    """Read the plan in a message; its arrays are copies."""
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

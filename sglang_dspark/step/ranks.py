"""Share plans and windows among the ranks of one tensor-parallel server.

Upstream finds K on every rank and sends rank 0's verify lengths
(sglang/srt/speculative/dspark_components/dspark_planner.py, `SpecTpSyncSite.DSPARK_PLAN`). Here the
leader, rank 0, decides both. It sends its plan over the CPU group before anything is drafted
(`schedule/agreement.py`), and its windows over the group of the device, between admission and
verify pass, and no host reads them. Upstream sends drafts and accepted tokens.

At start the leader profiles: a pass of several ranks needs all of them, and what is timed next
depends on the clock and on what an earlier start saved (`serving/profile.py`). So the leader
announces each pass to the others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from sglang_dspark.schedule.agreement import FAILED, Agreement, failed
from sglang_dspark.schedule.budget import Counts
from sglang_dspark.schedule.online import Floats
from sglang_dspark.schedule.plan import Plan
from sglang_dspark.serving import upstream
from sglang_dspark.serving.profile import Passes
from sglang_dspark.step.engine import ScheduleEngine
from sglang_dspark.step.engine_protocol import Step
from sglang_dspark.step.verify import anchors_alone

logger = logging.getLogger(__name__)

NO_WINDOWS = -1  # indptr[0] where the leader's admission failed
DONE, WARM_UP, VERIFY, DRAFT = range(4)  # what is announced; FAILED: the leader failed
HEADER = 4  # kind, context, requests, depth


class Ranks:
    """The ranks that act on one plan; without an agreement this is the only one."""

    def __init__(
        self,
        agreement: Agreement | None = None,
        broadcast: Callable[[Tensor], Any] | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        """broadcast: overwrites a tensor on `device` with the leader's, on every rank."""
        self.agreement = agreement
        self._broadcast = broadcast
        self._device = torch.device(device)

    @property
    def leads(self) -> bool:
        """Return whether this rank decides."""
        return self.agreement is None or self.agreement.leads

    @property
    def several(self) -> bool:
        """Return whether others act on the same plan."""
        return self.agreement is not None

    def deciding(self) -> AbstractContextManager[None]:
        """Guard the leader's planning: if it raises, the other ranks raise DSparkError."""
        if self.agreement is None or not self.agreement.leads:
            return nullcontext()
        return self.agreement.guarding()

    def send_plan(self, step: Step, rows: Tensor) -> None:
        """Send the leader's plan for rows [R] of the pool; a `Follower` receives it in `begin`."""
        if self.agreement is not None and self.agreement.leads:
            self.agreement.send(step.plan, _slots(rows))

    @contextmanager
    def admitting(self, plan: Plan) -> Iterator[None]:
        """Guard the leader's admission: if it raises, ranks that read the windows on the host raise
        DSparkError. On an accelerator no host reads them: SGLang ends all ranks when one has
        failed."""
        try:
            yield
        except BaseException:
            if self._broadcast is not None and plan.speculates and self._device.type == "cpu":
                self._broadcast(torch.full((plan.requests + 1,), NO_WINDOWS, dtype=torch.int32))
            raise

    def windows(self, plan: Plan, admitted: Tensor | None) -> Tensor:
        """Return the leader's indptr [R + 1] int32 on the device, on every rank.

        admitted: the leader's; None on the others. Nothing is sent where the plan has no drafts.
        """
        indptr = anchors_alone(plan.requests, self._device) if admitted is None else admitted
        if self._broadcast is None or not plan.speculates:
            return indptr
        self._broadcast(indptr)
        if admitted is None and self._device.type == "cpu" and int(indptr[0]) == NO_WINDOWS:
            assert self.agreement is not None
            raise failed(self.agreement.leader)
        return indptr


class Follower:
    """Act on the leader's plans and learn nothing: the engine of a rank that does not lead."""

    def __init__(self, agreement: Agreement) -> None:
        self._agreement = agreement

    def begin(
        self,
        rows: Tensor,
        generation: Tensor,
        seq_lens: Tensor,
        *,
        starts: bool = True,
        limits: Counts | None = None,
    ) -> Step:
        """Receive the leader's plan for rows [R] of the pool; as `Engine.begin`.

        Raises DSparkError where the leader failed or decodes another batch.
        """
        slots = _slots(rows)
        return Step(self._agreement.receive(slots), slots, generation.numpy()[slots])

    def start(self, step: Step) -> None:
        """Do nothing: the leader times its steps."""

    def calibrate(self, step: Step, greedy: Tensor | None) -> tuple[Floats, Floats]:
        """Raise: the leader admits (`Ranks.windows`)."""
        raise AssertionError("the leader admits")

    def admit(self, step: Step, logits: Tensor | None, greedy: Tensor | None) -> Counts:
        """Raise: the leader admits."""
        raise AssertionError("the leader admits")

    def skip_draft(self, step: Step, *, failed: bool) -> None:
        """Raise: with several ranks a planned draft is never skipped."""
        raise AssertionError("the leader plans")

    def landed(self, step: Step, lengths: Counts, accepted: Counts) -> None:
        """Do nothing: the leader learns."""

    def processed(self, reqs: Any, accepted: Any, speculated: bool) -> None:
        """Do nothing: the leader counts."""

    def interrupted(self) -> None:
        """Do nothing: the leader times its steps."""


def _slots(rows: Tensor) -> Counts:
    return rows.numpy().astype(np.int64)


def ranks_of(worker: Any) -> Ranks:
    """Return the ranks with which this worker of upstream's shares its steps."""
    group = upstream.get_parallel().tp_group
    if group.world_size == 1:
        return Ranks()
    slots = int(worker.model_runner.req_to_token_pool.req_to_token.shape[0])
    agreement = Agreement(slots, group.cpu_group, leader=group.ranks[0])
    return Ranks(agreement, group.broadcast, worker.device)


def engine_for(
    ranks: Ranks, passes: Passes, build: Callable[[Passes], ScheduleEngine]
) -> ScheduleEngine | Follower:
    """Build an engine from passes; on a rank that does not lead, return a `Follower`.

    Raises DSparkError if the leader could not build one.
    """
    if ranks.agreement is None:
        return build(passes)
    announcer = _Announcer(ranks.agreement, passes.most_requests)
    if ranks.leads:
        return _led(announcer, passes, build)
    _follow(announcer, passes)
    logger.info("sglang-dspark: acts on the plans of rank %d", ranks.agreement.leader)
    return Follower(ranks.agreement)


def _led(
    announcer: _Announcer, passes: Passes, build: Callable[[Passes], ScheduleEngine]
) -> ScheduleEngine:
    try:
        engine = build(_Announced(passes, announcer))
    except BaseException:
        announcer.send(FAILED)
        raise
    announcer.send(DONE)
    return engine


def _follow(announcer: _Announcer, passes: Passes) -> None:
    """Run what the leader announces until it has measured enough."""
    while True:
        kind, context, requests, depth, *drafts = announcer.receive()
        if kind == WARM_UP:
            passes.warm_up()
        elif kind == VERIFY:
            passes.verify_seconds(drafts[:requests], context)
        elif kind == DRAFT:
            passes.draft_seconds(requests, depth, context)
        elif kind == DONE:
            return
        else:
            raise failed(announcer.agreement.leader)


class _Announcer:
    """Announce the pass that runs next: [HEADER + most requests] int64."""

    def __init__(self, agreement: Agreement, most_requests: int) -> None:
        self.agreement = agreement
        self._message = torch.zeros(HEADER + most_requests, dtype=torch.int64)

    def send(
        self,
        kind: int,
        context: int = 0,
        requests: int = 0,
        depth: int = 0,
        drafts: Sequence[int] = (),
    ) -> None:
        """drafts: [R], of a pass that verifies."""
        header = kind, context, requests, depth
        self._message[: HEADER + len(drafts)] = torch.tensor([*header, *drafts])
        self._broadcast()

    def receive(self) -> list[int]:
        """Return the header, then drafts of the most requests."""
        self._broadcast()
        return self._message.tolist()

    def _broadcast(self) -> None:
        dist.broadcast(self._message, src=self.agreement.leader, group=self.agreement.group)


class _Announced:
    """Announce each of the leader's passes (`profile.Passes`) before it runs."""

    def __init__(self, own: Passes, announcer: _Announcer) -> None:
        self._own, self._announcer = own, announcer
        self.gamma, self.tiers, self.depths = own.gamma, own.tiers, own.depths
        self.most_requests, self.longest = own.most_requests, own.longest

    def warm_up(self) -> None:
        self._announcer.send(WARM_UP)
        self._own.warm_up()

    def verify_seconds(self, drafts: Sequence[int], context: int) -> float:
        self._announcer.send(VERIFY, context, len(drafts), drafts=drafts)
        return self._own.verify_seconds(drafts, context)

    def draft_seconds(self, requests: int, depth: int, context: int) -> float:
        self._announcer.send(DRAFT, context, requests, depth)
        return self._own.draft_seconds(requests, depth, context)

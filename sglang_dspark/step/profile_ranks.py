"""Step times of a server of several ranks: one of them decides what is measured, all run it.

A pass of several ranks needs all of them, and what is timed next depends on the clock and on what
an earlier start kept (`profile.py`). So the leader profiles, and announces each pass to the others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from sglang_dspark.schedule.agreement import FAILED, Agreement, failed
from sglang_dspark.serving.profile import Passes
from sglang_dspark.step.engine import ScheduleEngine
from sglang_dspark.step.ranks import Follower, Ranks

logger = logging.getLogger(__name__)

DONE, WARM_UP, VERIFY, DRAFT = range(4)  # what is announced; FAILED: the leader was
HEADER = 4  # kind, context, requests, depth


def engine_for(
    ranks: Ranks, passes: Passes, build: Callable[[Passes], ScheduleEngine]
) -> ScheduleEngine | Follower:
    """The engine that `build` makes of passes, or on a rank that does not lead what stands there.

    Raises DSparkError where the leader could not build one.
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
    """Messages of what runs next: [HEADER + most requests] int64."""

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
        """The header, then drafts of as many requests as there may be."""
        self._broadcast()
        return self._message.tolist()

    def _broadcast(self) -> None:
        dist.broadcast(self._message, src=self.agreement.leader, group=self.agreement.group)


class _Announced:
    """The leader's passes (`profile.Passes`): every one is announced before it runs."""

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

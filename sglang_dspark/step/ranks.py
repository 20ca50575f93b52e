"""Share plans and windows among the ranks of one tensor-parallel server.

Upstream finds K on every rank and sends rank 0's verify lengths
(sglang/srt/speculative/dspark_components/dspark_planner.py, `SpecTpSyncSite.DSPARK_PLAN`). Here the
leader, rank 0, decides both. It sends its plan over the CPU group before drafting
(`schedule/agreement.py`), and its windows over the device's group before the verify pass. Upstream
sends drafts and accepted tokens.

At start the leader profiles, and announces each pass to the other ranks: the next pass to time
depends on its clock and on the times that an earlier start saved (`serving/profile.py`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from sglang_dspark.schedule.agreement import FAILED, Agreement, failed
from sglang_dspark.schedule.plan import Plan
from sglang_dspark.serving import upstream
from sglang_dspark.serving.profile import Passes
from sglang_dspark.step.engine_protocol import Engine, Step, StepRequests
from sglang_dspark.step.verify import anchors_alone

logger = logging.getLogger(__name__)

NO_WINDOWS = -1  # indptr[0] where the leader's admission failed
DONE = 0  # announced in place of a pass, as FAILED


class Ranks:
    """The ranks that share one plan; without an agreement this is the only one."""

    def __init__(
        self,
        agreement: Agreement | None = None,
        broadcast: Callable[[Tensor], Any] | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        """Send windows by `broadcast`, which overwrites a tensor on `device` with the leader's."""
        self.agreement = agreement
        self._broadcast = broadcast
        self._device = torch.device(device)

    @property
    def leads(self) -> bool:
        """Return whether this rank decides."""
        return self.agreement is None or self.agreement.leads

    @property
    def several(self) -> bool:
        """Return whether other ranks share the plan."""
        return self.agreement is not None

    def deciding(self) -> AbstractContextManager[None]:
        """Guard the leader's planning: if it raises, the other ranks raise DSparkError."""
        if self.agreement is None or not self.agreement.leads:
            return nullcontext()
        return self.agreement.guarding()

    def send_plan(self, step: Step, rows: Tensor) -> None:
        """Send the leader's plan for rows [R] of the pool; a `Follower` receives it in `begin`."""
        if self.agreement is not None and self.agreement.leads:
            self.agreement.send(step.plan, rows.numpy().astype(np.int64))

    @contextmanager
    def admitting(self, plan: Plan) -> Iterator[None]:
        """Guard the leader's admission: if it raises, the other ranks of a CPU raise DSparkError.

        On an accelerator no host reads the windows; SGLang ends all ranks.
        """
        try:
            yield
        except BaseException:
            if self._broadcast is not None and plan.speculates and self._device.type == "cpu":
                self._broadcast(torch.full((plan.requests + 1,), NO_WINDOWS, dtype=torch.int32))
            raise

    def windows(self, plan: Plan, admitted: Tensor | None) -> Tensor:
        """Return the leader's indptr [R + 1] int32 on the device, on every rank.

        admitted: the leader's; None on the others. Without drafts in the plan nothing is sent.
        """
        indptr = anchors_alone(plan.requests, self._device) if admitted is None else admitted
        if self._broadcast is None or not plan.speculates:
            return indptr
        self._broadcast(indptr)
        if admitted is None and self._device.type == "cpu" and int(indptr[0]) == NO_WINDOWS:
            assert self.agreement is not None
            raise failed(self.agreement.leader)
        return indptr


class Follower(Engine):
    """Follow the leader's plans: the engine of a rank that admits and learns nothing."""

    def __init__(self, agreement: Agreement) -> None:
        self._agreement = agreement

    def begin(self, requests: StepRequests, *, starts: bool = True) -> Step:
        """Receive the leader's plan for these requests, as in `Engine.begin`.

        Raises DSparkError where the leader failed or decodes another batch.
        """
        rows, generations = requests.slots()
        return Step(self._agreement.receive(rows), rows, generations)


def ranks_of(worker: Any) -> Ranks:
    """Return the ranks with which upstream's worker shares its steps."""
    group = upstream.get_parallel().tp_group
    if group.world_size == 1:
        return Ranks()
    slots = int(worker.model_runner.req_to_token_pool.req_to_token.shape[0])
    agreement = Agreement(slots, group.cpu_group, leader=group.ranks[0])
    return Ranks(agreement, group.broadcast, worker.device)


def engine_for(ranks: Ranks, passes: Passes, build: Callable[[Passes], Engine]) -> Engine:
    """Build an engine from passes; on a rank that does not lead, return a `Follower`.

    Raises DSparkError if the leader could not build one.
    """
    agreement = ranks.agreement
    if agreement is None:
        return build(passes)
    if not agreement.leads:
        while (announced := _send(agreement)) != DONE:
            if announced == FAILED:
                raise failed(agreement.leader)
            name, given = announced
            getattr(passes, name)(*given)
        logger.info("sglang-dspark: acts on the plans of rank %d", agreement.leader)
        return Follower(agreement)
    end = FAILED
    try:
        engine = build(_Announced(passes, agreement))  # type: ignore[arg-type]  # has all of them
        end = DONE
    finally:
        _send(agreement, end)
    return engine


class _Announced:
    """The leader's passes (`profile.Passes`); each is announced before it runs."""

    def __init__(self, own: Passes, agreement: Agreement) -> None:
        self._own, self._agreement = own, agreement

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._own, name)
        if not callable(found):
            return found

        def run(*given: Any) -> Any:
            _send(self._agreement, (name, given))
            return found(*given)

        return run


def _send(agreement: Agreement, message: Any = None) -> Any:
    """Send the leader's message to every rank, as JSON, and return it."""
    text = json.dumps(message, default=int).encode()
    size = torch.tensor([len(text)])
    dist.broadcast(size, src=agreement.leader, group=agreement.group)
    held = torch.frombuffer(bytearray(text.ljust(int(size))[: int(size)]), dtype=torch.uint8)
    dist.broadcast(held, src=agreement.leader, group=agreement.group)
    return json.loads(bytes(held.tolist()))

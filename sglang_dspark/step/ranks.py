"""What the ranks of one tensor-parallel server tell each other in a step: the plan, the windows.

Upstream finds K on every rank and sends rank 0's verify lengths
(sglang/srt/speculative/dspark_components/dspark_planner.py, `SpecTpSyncSite.DSPARK_PLAN`). Here the
leader, rank 0, decides both. Its plan goes over the CPU group before anything is drafted
(`schedule/agreement.py`); its windows go over the group of the device, behind the admission and in
front of the verify pass, and no host reads them. Drafts and accepted tokens are sent by upstream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sglang_dspark.schedule.agreement import Agreement, failed
from sglang_dspark.schedule.budget import Counts
from sglang_dspark.schedule.online import Floats
from sglang_dspark.schedule.plan import Plan
from sglang_dspark.serving import upstream
from sglang_dspark.step.engine import ScheduleEngine, Step
from sglang_dspark.step.layout import anchors_alone
from sglang_dspark.step.verify_all import VerifyAll

FAILED = -1  # in place of where the first window begins


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
        """Whether this rank decides."""
        return self.agreement is None or self.agreement.leads

    @property
    def several(self) -> bool:
        """Whether others act on the same plan."""
        return self.agreement is not None

    def deciding(self) -> AbstractContextManager[None]:
        """Around the leader's planning: where it raises, the other ranks raise DSparkError."""
        if self.agreement is None or not self.agreement.leads:
            return nullcontext()
        return self.agreement.telling()

    def send_plan(self, step: Step, rows: Tensor) -> None:
        """Send the leader's plan for rows [R] of the pool; a `Follower` receives it in `begin`."""
        if self.agreement is not None and self.agreement.leads:
            self.agreement.send(step.plan, _seats(rows))

    @contextmanager
    def admitting(self, plan: Plan) -> Iterator[None]:
        """Around the leader's admission: where it raises, ranks that read the windows on the host
        raise DSparkError. On an accelerator no host reads them: SGLang ends all ranks when one has
        failed."""
        try:
            yield
        except BaseException:
            if self._broadcast is not None and plan.speculates and self._device.type == "cpu":
                self._broadcast(torch.full((plan.requests + 1,), FAILED, dtype=torch.int32))
            raise

    def windows(self, plan: Plan, admitted: Tensor | None) -> Tensor:
        """Return the leader's indptr [R + 1] int32 on the device, on every rank.

        admitted: the leader's; None on the others. Nothing is sent where the plan has no drafts.
        """
        indptr = anchors_alone(plan.requests, self._device) if admitted is None else admitted
        if self._broadcast is None or not plan.speculates:
            return indptr
        self._broadcast(indptr)
        if admitted is None and self._device.type == "cpu" and int(indptr[0]) == FAILED:
            assert self.agreement is not None
            raise failed(self.agreement.leader)
        return indptr


class Follower:
    """Where the leader has its engine: this rank acts on the leader's plans and learns nothing."""

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
        """The leader's plan for rows [R] of the pool; as `ScheduleEngine.begin`.

        Raises DSparkError where the leader failed or decodes another batch.
        """
        seats = _seats(rows)
        return Step(self._agreement.receive(seats), seats, generation.numpy()[seats])

    def start(self, step: Step) -> None:
        """The leader times its steps."""

    def calibrate(self, step: Step, greedy: Tensor | None) -> tuple[Floats, Floats]:
        """Never asked (`Ranks.windows`)."""
        raise AssertionError("the leader admits")

    def admit(self, step: Step, logits: Tensor | None, greedy: Tensor | None) -> Counts:
        """Never asked either."""
        raise AssertionError("the leader admits")

    def leave_out_draft(self, step: Step, *, failed: bool) -> None:
        """Nor does one rank of several leave out what was planned for all."""
        raise AssertionError("the leader plans")

    def landed(self, step: Step, lengths: Counts, accepted: Counts) -> None:
        """The leader learns what came of the step."""

    def processed(self, reqs: Any, accepted: Any, speculated: bool) -> None:
        """The leader counts what was handed out."""

    def interrupted(self) -> None:
        """The leader knows."""


Engine = ScheduleEngine | VerifyAll | Follower


def _seats(rows: Tensor) -> Counts:
    return rows.numpy().astype(np.int64)


def ranks_of(worker: Any) -> Ranks:
    """The ranks that this worker of upstream's shares its steps with."""
    group = upstream.get_parallel().tp_group
    if group.world_size == 1:
        return Ranks()
    seats = int(worker.model_runner.req_to_token_pool.req_to_token.shape[0])
    agreement = Agreement(seats, group.cpu_group, leader=group.ranks[0])
    return Ranks(agreement, group.broadcast, worker.device)

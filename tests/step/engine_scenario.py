"""Run the engine over the real planner, with a clock that a test moves."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import torch

from sglang_dspark.schedule.calibration import Calibration
from sglang_dspark.schedule.cost_model import CostModel
from sglang_dspark.schedule.cost_table import CostTable, ProfileKey
from sglang_dspark.schedule.first_drafts import MOST_OF_ONE, WINDOW, FirstDrafts
from sglang_dspark.schedule.guard import SERVING_GUARD
from sglang_dspark.schedule.guarded import SearchPlanner
from sglang_dspark.schedule.online import OnlineCalibration
from sglang_dspark.schedule.plan import Plan, PlannerConfig
from sglang_dspark.serving.metrics import StepMetrics
from sglang_dspark.serving.speed_targets import SpeedTargets
from sglang_dspark.step.drafter_fit import DrafterFit
from sglang_dspark.step.engine import ScheduleEngine
from sglang_dspark.step.engine_protocol import StepRequests
from sglang_dspark.step.timing import HostClock

GAMMA, SLOTS = 3, 9
KEY = ProfileKey("target", "drafter", "float32", "cpu", "tp1", "dspark_cpu", "1", 3)


def looked_at(minimum: float | None = None) -> FirstDrafts:
    """Return first drafts after a window of good ones, so that no step is planned for a look."""
    drafts, one = FirstDrafts(SLOTS, minimum), np.ones(1, np.int64)
    for outcome in range(WINDOW):
        drafts.observe(0 * one, outcome // MOST_OF_ONE * one, one, one)
    return drafts


class Scenario:
    """An engine whose clock is moved by hand; drafts are accepted as far as `good` says."""

    def __init__(
        self,
        token: float = 1e-3,
        floor: int = 0,
        speeds: SpeedTargets | None = None,
        minimum: float | None = None,
    ) -> None:
        table = CostTable(
            key=KEY,
            knots=(1, 64),
            seconds=(20e-3, 20e-3 + 63 * token),
            padded=False,
            per_request=0.0,
            per_context=0.0,
            draft_requests=(1,),
            draft_seconds=((0.0, 2e-3, 3e-3, 4e-3),),
        )
        config = PlannerConfig(guard=replace(SERVING_GUARD, probe=4))
        self.planner = SearchPlanner(GAMMA, SLOTS, CostModel(table, SLOTS), config)
        table = Calibration((1.0,) * GAMMA, spread=0.3)
        self.calibration = OnlineCalibration([table] * 2, pool_rows=SLOTS)
        self.now = 0.0
        self.engine = ScheduleEngine(
            self.planner,
            self.calibration,
            StepMetrics(self.planner, self.calibration),
            clock=HostClock(lambda: self.now),
            fit=DrafterFit(looked_at(minimum)),
            floor=floor,
            speeds=speeds or SpeedTargets(SLOTS),
        )
        self.generation = torch.ones(SLOTS, dtype=torch.int64)

    def step(
        self,
        rows: list[int],
        logit: float = 2.0,
        good: int = 2,
        seconds: float | None = None,
        limits: list[int] | None = None,
        *,
        ahead: bool = False,
    ) -> tuple[Plan, list[int]]:
        """One decode step, as long as planned unless told; returns plan and verify lengths."""
        slots, context = torch.tensor(rows), torch.full((len(rows),), 10)
        most = None if limits is None else np.array(limits)
        step = self.engine.begin(
            StepRequests(slots, self.generation, context, limits=most), starts=not ahead
        )
        if ahead:
            self.engine.start(step)
        plan = step.plan
        drafted = (len(rows), plan.budget.depth)
        logits = torch.full(drafted, logit) if plan.speculates else None
        lengths = self.engine.admit(step, logits)
        self.engine.landed(step, lengths, np.minimum(lengths, good))
        self.now += plan.budget.seconds if seconds is None else seconds
        return plan, lengths.tolist()


@dataclass
class Request:
    """The fields of SGLang's request that the engine reads."""

    rid: str
    output_ids: list[int]
    finished_len: int | None = None
    row: int = 0
    speed: float | None = None

    @property
    def sampling_params(self) -> SimpleNamespace:
        asked = None if self.speed is None else {"dspark_speed": self.speed}
        return SimpleNamespace(custom_params=asked)

    @property
    def kv(self) -> SimpleNamespace:
        return SimpleNamespace(req_pool_idx=self.row, holds_kv=True)

    def finished(self) -> bool:
        return self.finished_len is not None

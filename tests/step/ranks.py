"""Run each of two gloo ranks in the tests of several ranks; a module of its own, as ranks are
spawned.

Each rank has its own copies of the confidences, off in the last digits, results that come late, and
a clock of its own; drafts, verdicts and requests are the same everywhere, as upstream sends them.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from sglang_dspark.errors import DSparkError
from sglang_dspark.schedule.agreement import Agreement
from sglang_dspark.schedule.budget import Counts, Gains
from sglang_dspark.schedule.calibration import Calibration
from sglang_dspark.schedule.cost_model import CostModel
from sglang_dspark.schedule.cost_table import ProfileKey
from sglang_dspark.schedule.first_drafts import FirstDrafts
from sglang_dspark.schedule.guarded import SearchPlanner
from sglang_dspark.schedule.online import OnlineCalibration
from sglang_dspark.schedule.plan import PlannerConfig
from sglang_dspark.schedule.simulation.scenarios import Machine, random_trace, sample_accepted
from sglang_dspark.serving import profile
from sglang_dspark.serving.metrics import StepMetrics
from sglang_dspark.serving.speed_targets import SpeedTargets
from sglang_dspark.step import plan
from sglang_dspark.step.drafter_fit import DrafterFit
from sglang_dspark.step.engine import ScheduleEngine, confidence_by
from sglang_dspark.step.engine_protocol import Step
from sglang_dspark.step.ranks import Follower, Ranks, engine_for
from sglang_dspark.step.state import StepState
from sglang_dspark.step.timing import HostClock
from sglang_dspark.step.verify import anchors_alone
from tests.step.windows import indptr_of

REQUESTS, GAMMA, RANKS = 8, 5, 2
ALONE = 2_000  # steps of the control
PATIENCE = 240  # seconds that a rank waits for the other
EASY = 350  # steps of 500 in which drafting pays
KEY = ProfileKey("target", "drafter", "float32", "a cpu", "tp2", "gloo", "1", GAMMA)


def rank_main(rank: int, steps: int, folder: str) -> None:
    """Join the group, do all of it, write what happened to `folder/RANK.json`."""
    store = f"file://{folder}/meet"
    dist.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=PATIENCE)
    )
    group = dist.group.WORLD
    assert group is not None
    agreement = Agreement(REQUESTS + 2, group)
    together = Ranks(agreement, lambda values: dist.broadcast(values, src=0))
    os.environ["XDG_CACHE_HOME"] = f"{folder}/{rank}"
    report = {
        "together": Rank(rank, together).take(steps),
        "alone": Rank(rank, Ranks()).take(min(steps, ALONE)),
        "profiles": [_profile(rank, together) for _ in range(2)],
        "failures": _failures(together),
    }
    Path(folder, f"{rank}.json").write_text(json.dumps(report))
    dist.barrier()  # a rank whose partner has gone already is aborted by gloo
    os._exit(0)  # and now and then by a thread of gloo's at the interpreter's end


class Rank:
    """One rank's side of a load that all of them serve."""

    def __init__(self, rank: int, ranks: Ranks) -> None:
        self.shared = np.random.default_rng(0)  # the same requests, drafts and verdicts everywhere
        self.own = np.random.default_rng(rank + 1)
        batch = np.arange(REQUESTS * (GAMMA + 1) + 1)  # costs at which K depends on confidence
        tokens = 1.0 + 0.06 * batch + 0.2 * (batch // 8)
        draft = np.concatenate([[0.0], 0.1 + 0.02 * np.arange(GAMMA)])
        self.machine = Machine(tokens, draft, (1, *range(4, len(batch), 4)), padded=False)
        self.trace = random_trace(self.shared, REQUESTS, GAMMA, 500)
        self.now, self.pace = 0.0, 1.0 + 0.1 * rank  # its clock runs at another pace
        self.flying: deque[tuple[Step, Counts, Counts]] = deque()
        self.generation = torch.zeros(self.trace.pool_rows, dtype=torch.int64)
        self.engine = (
            self._engine() if ranks.leads else Follower(ranks.agreement)  # type: ignore[arg-type]
        )
        pool = SimpleNamespace(req_generation=self.generation)
        worker = SimpleNamespace(gamma=GAMMA, model_runner=SimpleNamespace(req_to_token_pool=pool))
        self.state = StepState(worker, self.engine, None, ranks)  # type: ignore[arg-type]

    def _engine(self) -> ScheduleEngine:
        rows = self.trace.pool_rows
        costs = CostModel(self.machine.profile(self.own, 0.05), rows)
        planner = SearchPlanner(GAMMA, rows, costs, PlannerConfig(lag=2))
        calibration = OnlineCalibration([Calibration.identity(GAMMA)] * 2, pool_rows=rows)
        metrics = StepMetrics(planner, calibration)
        fit = DrafterFit(FirstDrafts(rows), metrics)
        clock, speeds = HostClock(lambda: self.now), SpeedTargets(rows)
        return ScheduleEngine(planner, calibration, metrics, clock, fit, speeds)

    def take(self, steps: int) -> dict[str, Any]:
        """Steps under the overlap loop; a digest of what each did, and how many of each kind."""
        digests, cut, repeated = [], 0, 0
        for step in range(steps):
            did, lengths = self._step(step)
            budget = did.plan.budget
            said = repr((did.plan.step, did.plan.requests, budget, did.plan.mode, did.plan.known))
            arrays = did.plan.limits.tobytes() + lengths.tobytes()
            digests.append(crc32(said.encode() + arrays))
            cut += 0 < int(lengths.sum()) < GAMMA * len(lengths)
            repeated += did.repeated
        return {"digests": digests, "cut": cut, "repeated": repeated}

    def _step(self, number: int) -> tuple[Step, Counts]:
        t = number % self.trace.steps
        rows, confidence = self.trace.rows[t], self.trace.confidence[t]
        if t > EASY:
            confidence = 0.2 * confidence
        lap = number // self.trace.steps * 10**6
        self.generation[torch.from_numpy(rows)] = torch.from_numpy(self.trace.generations[t] + lap)
        batch = _batch(rows)
        plan.plan_ahead(self.state, batch)
        step = plan.take_plan(self.state, batch)
        copy = np.clip(confidence * np.exp(1e-3 * self.own.standard_normal(confidence.shape)), 0, 1)
        logits = np.log(np.maximum(copy, 1e-6) / np.maximum(1 - copy, 1e-6)).astype(np.float32)
        indptr = _windows(self.state.ranks, step, lambda: self._admit(step, logits))
        found = np.diff(indptr.numpy().astype(np.int64)) - 1
        accepted = sample_accepted(self.shared, confidence, found)
        self._pass_time(len(rows) + int(found.sum()), step.plan.budget.depth)
        self.flying.append((step, found, accepted))
        late = self.own.random() < 0.1
        while len(self.flying) > 1 + late:
            landing, drafts, came = self.flying.popleft()
            self.engine.landed(landing, drafts, came)
        return step, found

    def _admit(self, step: Step, logits: Gains) -> Tensor:
        """indptr [R + 1] by this rank's copy of the logits, if it has an engine."""
        if not step.plan.speculates:
            return anchors_alone(step.plan.requests)
        assert isinstance(self.engine, ScheduleEngine)
        step.arriving = torch.from_numpy(logits)
        confidence = confidence_by(logits, *self.engine.calibrate(step))
        lengths = self.engine.planner.admit(step.plan, confidence)
        return indptr_of(lengths.tolist())

    def _pass_time(self, tokens: int, depth: int) -> None:
        seconds = self.machine.seconds(tokens, depth, 0.0)
        self.now += self.pace * seconds * float(np.exp(0.03 * self.own.standard_normal()))


def _windows(ranks: Ranks, step: Step, admit: Callable[[], Tensor]) -> Tensor:
    """As `step.plan.admit` does."""
    admitted = None
    if ranks.leads:
        with ranks.admitting(step.plan):
            admitted = admit()
    return ranks.windows(step.plan, admitted)


def _batch(rows: Counts) -> Any:
    """The fields of upstream's `ScheduleBatch` that planning reads."""
    return SimpleNamespace(
        forward_mode=SimpleNamespace(is_extend=lambda: False),
        is_extend_in_batch=False,
        spec_info=object(),
        batch_size=lambda: len(rows),
        reqs=[SimpleNamespace(custom_logit_processor=None)] * len(rows),
        req_pool_indices_cpu=torch.from_numpy(rows),
        seq_lens_cpu=torch.full((len(rows),), 10),
    )


class Passes:
    """Passes (`profile.Passes`) that need every rank; what ran is written down."""

    gamma, most_requests, longest = GAMMA, REQUESTS, 100
    tiers: tuple[int, ...] = ()
    depths: tuple[int, ...] = (1, GAMMA)

    def __init__(self) -> None:
        self.ran: list[list[Any]] = []

    def warm_up(self) -> None:
        self._run("warm up")

    def verify_seconds(self, drafts: Sequence[int], context: int) -> float:
        return self._run("verify", list(drafts), context)

    def draft_seconds(self, requests: int, depth: int, context: int) -> float:
        return self._run("draft", requests, depth, context)

    def _run(self, *what: Any) -> float:
        self.ran.append(list(what))
        together = torch.ones(1)
        dist.all_reduce(together)
        assert float(together) == RANKS
        return 1e-3 * (1 + len(self.ran) % 3)


def _profile(rank: int, ranks: Ranks) -> dict[str, Any]:
    """The profile of one start. The follower would time nothing: it has no time."""
    passes = Passes()

    def build(announced: profile.Passes) -> Any:
        seconds = 60.0 if rank == 0 else 0.0
        return profile.table_for(KEY, announced, seconds, lambda line: None).source

    built = engine_for(ranks, passes, build)
    return {"ran": passes.ran, "built": built if ranks.leads else type(built).__name__}


def _failures(ranks: Ranks) -> list[str]:
    """Collect the errors where the leader fails at each place, and where batches differ."""
    state = Rank(0, ranks)
    step = plan.take_plan(state.state, _batch(np.array([1, 2])))

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no more today")

    if ranks.leads:
        state.engine.begin = broken  # type: ignore[method-assign]
    wrong = _batch(np.array([1, 2] if ranks.leads else [1, 3]))
    raised = [_raised(lambda: _windows(ranks, step, broken))]
    raised.append(_raised(lambda: plan.take_plan(state.state, wrong)))
    raised.append(_raised(lambda: engine_for(ranks, Passes(), broken)))
    if ranks.leads:
        del state.engine.begin
    raised.append(_raised(lambda: plan.take_plan(state.state, wrong)))
    return raised


def _raised(act: Callable[[], Any]) -> str:
    try:
        act()
    except (RuntimeError, DSparkError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"

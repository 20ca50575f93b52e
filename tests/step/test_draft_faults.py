"""A draft that fails: its step decodes plainly, teaches nothing, and drafting comes back."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from sglang_dspark.step import draft
from sglang_dspark.step import plan as planning
from sglang_dspark.step.build import broken_weight
from sglang_dspark.step.engine_protocol import Step, StepRequests
from sglang_dspark.step.ranks import Ranks
from sglang_dspark.step.state import DraftFaults, StepState
from tests.step.engine_scenario import Scenario

ROWS = torch.tensor([1, 2])


def state_in(world: Scenario, ranks: Ranks | None = None) -> StepState:
    """Of a worker whose steps the world's engine plans."""
    pool = SimpleNamespace(req_generation=world.generation)
    worker = SimpleNamespace(gamma=3, model_runner=SimpleNamespace(req_to_token_pool=pool))
    return StepState(worker, world.engine, cast(Any, BROKEN), ranks or Ranks())


class BrokenDraft:
    """A device whose next drafts end with `errors`; then each is named after its depth."""

    def __init__(self) -> None:
        self.errors: list[str] = []

    def draft(self, batch: Any, window: Any, depth: int, seeds: Any) -> str:
        if self.errors:
            raise RuntimeError(self.errors.pop())
        return f"{depth} drafts"


BROKEN = BrokenDraft()
BATCH = SimpleNamespace(
    req_pool_indices_cpu=ROWS,
    seq_lens_cpu=torch.tensor([10, 10]),
    reqs=[SimpleNamespace(custom_logit_processor=None)] * 2,
)


def finished(world: Scenario, step: Step, logits: Tensor | None = None) -> list[int]:
    """The step admits, verifies, lands and takes its time: its verify lengths."""
    lengths = world.engine.admit(step, logits)
    world.engine.landed(step, lengths, lengths)
    world.now += step.plan.budget.seconds or 0.02
    return list(lengths)


@pytest.fixture
def broken_draft(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Errors that the next drafts end with."""
    monkeypatch.setattr(BROKEN, "errors", [])
    monkeypatch.setattr(draft, "skip", lambda state, batch: "no drafts")
    return BROKEN.errors


def test_a_step_whose_draft_fails_verifies_none_and_teaches_nothing(
    broken_draft: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    world = Scenario()
    for _ in range(6):
        world.step([1, 2])
    state = state_in(world)
    step = planning.take_plan(state, BATCH)
    assert step.plan.speculates
    world.engine._learn_all()
    known, gaps = world.planner.costs.steps, world.calibration.gaps().copy()
    broken_draft.append("out of luck")
    assert draft.propose(state, BATCH, None, step, None) == "no drafts"
    assert not step.plan.speculates
    assert finished(world, step) == [0, 0]
    world.now += 5.0  # a failing draft may take long
    after = planning.take_plan(state, BATCH)
    assert after.undrafted, "drafting rests for a step"
    assert finished(world, after) == [0, 0]
    again = planning.take_plan(state, BATCH)
    assert again.plan.speculates
    assert "drafts" in draft.propose(state, BATCH, None, again, None)
    world.engine._learn_all()
    assert world.planner.costs.steps == known
    assert (world.calibration.gaps() == gaps).all()
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert "RuntimeError: out of luck" in said[0]
    assert "after 1 failures" in said[1]


def test_of_several_ranks_a_failure_is_the_servers(broken_draft: list[str]) -> None:
    world = Scenario()
    world.step([1, 2])
    state = state_in(world, Ranks(cast(Any, SimpleNamespace(leads=True))))
    step = world.engine.begin(StepRequests(ROWS, world.generation, torch.tensor([10, 10])))
    broken_draft.append("out of luck")
    with pytest.raises(RuntimeError, match="out of luck"):
        draft.propose(state, BATCH, None, step, None)


def test_rests_double_and_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    faults, rests = DraftFaults(), []
    for _ in range(14):
        faults.failed(RuntimeError("again"))
        rests.append(0)
        while faults.rests():
            rests[-1] += 1
    assert rests == [1, 2, 4, 8, 16, 32, 64, 128, 256] + [512] * 5
    assert len(caplog.records) == 1, "failures in a row are said once"
    faults.drafted()
    faults.failed(RuntimeError("anew"))
    assert faults.rest == 1
    assert len(caplog.records) == 3


def test_what_the_counters_say_of_a_failure() -> None:
    from prometheus_client import CollectorRegistry

    from sglang_dspark.serving.metrics import Collector

    world, registry = Scenario(), CollectorRegistry()
    metrics = world.engine.metrics
    metrics._collector = Collector({"model": "m"}, registry)
    for failed in (True, False):
        step = world.engine.begin(StepRequests(ROWS, world.generation, torch.tensor([10, 10])))
        world.engine.skip_draft(step, failed=failed)
        finished(world, step)
    world.engine._interrupted = True
    world.engine.begin(StepRequests(ROWS, world.generation, torch.tensor([10, 10])))
    world.engine._learn_all()
    metrics.hand_over()

    def value(name: str, reason: str) -> float | None:
        labels = {"model": "m", "reason": reason}
        return registry.get_sample_value(f"sglang:dspark_{name}_total", labels)

    assert value("fallbacks", "draft failed") == 1
    assert value("draft_skips", "draft failed") == 2
    assert registry.get_sample_value("sglang:dspark_step_seconds_count", {"model": "m"}) == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_weight_that_is_not_finite_is_named(value: float, dtype: torch.dtype) -> None:
    drafter = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 5)).to(dtype)
    target = nn.Linear(5, 2)
    assert broken_weight(drafter, target) is None
    with torch.no_grad():
        dict(drafter.named_parameters())["1.weight"][4, 2] = value
    assert broken_weight(drafter, target) == "1.weight"


def test_a_weight_of_the_target_is_not_the_drafters() -> None:
    drafter, target = nn.Linear(4, 3), nn.Linear(4, 3)
    with torch.no_grad():
        target.weight[0, 0] = float("nan")
    drafter.weight = target.weight
    drafter.register_parameter("empty", nn.Parameter(torch.empty(0, 4)))
    assert broken_weight(drafter, target) is None


@pytest.mark.parametrize(
    "text", ["CUDA error: device-side assert triggered", "Triton Error [CUDA]"]
)
def test_a_device_that_failed_ends_the_server(broken_draft: list[str], text: str) -> None:
    """All later work on it fails too, so plain decoding is impossible."""
    world = Scenario()
    for _ in range(6):
        world.step([1, 2])
    state = state_in(world)
    step = planning.take_plan(state, BATCH)
    broken_draft.append(text)
    with pytest.raises(RuntimeError, match="CUDA"):
        draft.propose(state, BATCH, None, step, None)


def test_which_failures_are_the_devices() -> None:
    assert draft.of_device(torch.AcceleratorError("unspecified launch failure"))
    assert not draft.of_device(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"))
    assert not draft.of_device(ValueError("a shape does not fit"))

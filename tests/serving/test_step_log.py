"""Finished steps as lines of a file, and stages of a step by name in a profiler's trace."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch

from sglang_dspark.serving.metrics import StepMetrics
from sglang_dspark.serving.step_log import StepLog
from sglang_dspark.step.timing import span
from tests.serving.test_exported_metrics import steps_of
from tests.step.engine_scenario import Scenario


def logged(world: Scenario, path: Path, count: int) -> None:
    """Log `count` steps of the world, as a server without /metrics does."""
    metrics = StepMetrics(world.planner, world.calibration, log=StepLog(path))
    for step in steps_of(world, count, logit=3.0, good=1):
        metrics.step(step.plan, step.lengths, step.accepted, step.seconds)
    metrics.hand_over()
    metrics.hand_over()  # nothing twice


def test_every_step_is_a_line(tmp_path: Path) -> None:
    world, path = Scenario(), tmp_path / "steps.jsonl"
    steps = steps_of(world, 5, logit=3.0, good=1)
    metrics = StepMetrics(world.planner, world.calibration, log=StepLog(path))
    for step in steps:
        metrics.step(step.plan, step.lengths, step.accepted, step.seconds)
    metrics.step(steps[-1].plan, steps[-1].lengths, steps[-1].accepted, None, undrafted=True)
    metrics.hand_over()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines[:5]] == [step.plan.step for step in steps]
    for line, step in zip(lines, steps, strict=False):
        assert line["requests"] == step.plan.requests == 2
        assert line["tokens"] == 2 + int(step.lengths.sum())
        assert line["depth"] == step.plan.budget.depth
        assert line["context"] == step.plan.context
        assert line["accepted"] == int(step.accepted.sum())
        assert line["gain"] == pytest.approx(step.plan.gain)
        assert line["mode"] == step.plan.mode.value
        assert line["predicted_s"] == pytest.approx(step.plan.budget.seconds)
        assert line["measured_s"] == pytest.approx(step.seconds)
    assert lines[5]["measured_s"] is None
    assert any(line["tokens"] > 2 for line in lines)
    assert any(line["accepted"] for line in lines)


def test_lines_are_appended_and_none_comes_twice(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    for _ in range(2):
        logged(Scenario(), path, 3)
    assert len(path.read_text().splitlines()) == 6


def test_a_file_that_cannot_be_written_to_is_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log = StepLog(tmp_path / "missing" / "steps.jsonl")
    with caplog.at_level(logging.WARNING):
        log.write(["{}"])
        log.write(["{}"])
    [said] = [record.getMessage() for record in caplog.records]
    assert said == "sglang-dspark: no more steps are logged (No such file or directory)"


def test_stages_are_named_in_a_trace_alone() -> None:
    with span("draft") as nothing:
        pass
    assert nothing is None
    assert span("draft") is span("verify")
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu) as seen, span("draft"):
        torch.zeros(2).add_(1)
    assert "dspark:draft" in {event.name for event in seen.events()}

"""The planner of a server is the one that the configuration names."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("sglang")

from sglang_dspark.schedule.plan import PlannerConfig
from sglang_dspark.serving.config import CONFIG_VARIABLE
from sglang_dspark.step.build import _planner, _signal
from tests.step.engine_scenario import GAMMA, Scenario


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("{}", "confidence, algorithm search"),
        ("{algorithm: search}", "confidence, algorithm search"),
        ("{algorithm: early-stop}", "confidence, algorithm early-stop"),
        ("{threshold: 0.25}", "a threshold of 0.25 on confidence alone"),
    ],
)
def test_the_configuration_chooses_the_planner(
    asked: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "dspark.yaml"
    file.write_text(f"schedule: {asked}\n", encoding="utf-8")
    monkeypatch.setenv(CONFIG_VARIABLE, str(file))
    assert _planner(GAMMA, Scenario().planner.costs, PlannerConfig()).describe() == said


@pytest.mark.parametrize(
    ("head", "signal", "logged"), [(True, "confidence", 0), (False, "draft probability", 1)]
)
def test_a_drafter_without_a_head_is_scheduled_by_its_probabilities(
    head: bool,
    signal: str,
    logged: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    worker = SimpleNamespace(
        draft_model=SimpleNamespace(confidence_head=object() if head else None)
    )
    with caplog.at_level(logging.INFO):
        assert _signal(worker) == signal
    lines = [record.message for record in caplog.records]
    assert len(lines) == logged
    assert all("enable_confidence_head" in line for line in lines)

"""The planner of a server is the one that the configuration names."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("sglang")

from sglang_dspark.schedule.plan import PlannerConfig
from sglang_dspark.serving.config import CONFIG_VARIABLE
from sglang_dspark.step.build import _planner
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

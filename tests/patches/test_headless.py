"""SGLang loads a drafter without a confidence head in the mode that schedules."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

from sglang.srt.models import dspark

from sglang_dspark.patches.step.drafters import SEAMS, plan_without_head
from sglang_dspark.serving.config import CONFIG_VARIABLE
from sglang_dspark.serving.mode import COMPACT, VARIABLE
from tests.patches.hooked import put_in


@pytest.fixture(autouse=True)
def scheduled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start that our planner schedules."""
    monkeypatch.setenv(CONFIG_VARIABLE, "")
    monkeypatch.setenv(VARIABLE, COMPACT)


def config(**head: bool) -> Any:
    return SimpleNamespace(hidden_size=8, markov_rank=4, **head)


def test_a_head_is_built_where_the_checkpoint_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    put_in(monkeypatch, SEAMS[1:2])
    assert dspark.build_confidence_head(config(enable_confidence_head=True)) is not None
    assert dspark.build_confidence_head(config()) is not None, "SGLang's own default"
    assert dspark.build_confidence_head(config(enable_confidence_head=False)) is None


def test_sglangs_own_modes_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "cap-accept")
    put_in(monkeypatch, SEAMS[1:2])
    assert dspark.build_confidence_head(config(enable_confidence_head=False)) is not None


def constructor(planner: Any, *, draft_model: Any, gamma: int) -> None:
    """Read the draft model's head as upstream's constructor does."""
    if draft_model.confidence_head is None:
        raise ValueError("schedules per-request verify lengths from the draft confidence head")
    planner.draft_model, planner.gamma = draft_model, gamma
    planner._confidence_head = draft_model.confidence_head


@pytest.mark.parametrize("head", [None, object()])
def test_the_planner_is_made_and_knows_whether_there_is_a_head(head: object) -> None:
    planner, model = SimpleNamespace(), SimpleNamespace(confidence_head=head)
    plan_without_head(constructor, planner, draft_model=model, gamma=5)
    assert planner.draft_model is model
    assert planner._confidence_head is head
    assert planner.gamma == 5


def test_the_planner_of_sglangs_own_mode_still_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "cap-accept")
    model = SimpleNamespace(confidence_head=None)
    with pytest.raises(ValueError, match="confidence head"):
        plan_without_head(constructor, SimpleNamespace(), draft_model=model, gamma=5)

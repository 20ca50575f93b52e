"""Check the ends of each setting: the last value accepted and the first refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from sglang_dspark.schedule.budget import Workspace
from sglang_dspark.schedule.cost_model import CostModel, UpdateConfig
from sglang_dspark.schedule.early_exit import ExitConfig
from sglang_dspark.schedule.estimator import EstimatorConfig
from sglang_dspark.schedule.online import OnlineConfig
from sglang_dspark.schedule.plan import PlannerConfig
from sglang_dspark.schedule.request_shift import RequestShift
from tests.schedule.test_costs import TABLE

LITTLE = 1e-9
BELOW_ONE = 1 - LITTLE


@pytest.mark.parametrize(
    ("config", "field", "taken", "refused"),
    [
        (EstimatorConfig, "memory", 1.0, BELOW_ONE),
        (EstimatorConfig, "start_strength", LITTLE, 0.0),
        (EstimatorConfig, "start", LITTLE, 0.0),
        (EstimatorConfig, "start", BELOW_ONE, 1.0),
        (OnlineConfig, "memory", 1.0, BELOW_ONE),
        (OnlineConfig, "start", 1.0, BELOW_ONE),
        (OnlineConfig, "alarm_memory", 1.0, BELOW_ONE),
        (OnlineConfig, "bound", LITTLE, 0.0),
        (OnlineConfig, "alarm", LITTLE, 0.0),
        (OnlineConfig, "keep", 0.0, -LITTLE),
        (OnlineConfig, "keep", 1.0, 1 + LITTLE),
        (ExitConfig, "surprise", LITTLE, 0.0),
        (ExitConfig, "surprise", BELOW_ONE, 1.0),
        (ExitConfig, "first_rest", 1, 0),
        (ExitConfig, "first_rest", 256, 257),  # the longest rest
        (UpdateConfig, "rate", LITTLE, 0.0),
        (UpdateConfig, "rate", 1.0, 1 + LITTLE),
        (UpdateConfig, "clip", LITTLE, 0.0),
        (UpdateConfig, "outlier", LITTLE, 0.0),
        (UpdateConfig, "spread", LITTLE, 0.0),
        (UpdateConfig, "persistent", 1, 0),
        (UpdateConfig, "refresh", 1, 0),
        (UpdateConfig, "window", 1, 0),
        (PlannerConfig, "lag", 1, 0),
        (PlannerConfig, "look_deep", 1, 0),
        (PlannerConfig, "deep_share", 0.0, -LITTLE),
    ],
)
def test_the_ends_of_what_is_taken(config: Any, field: str, taken: Any, refused: Any) -> None:
    assert getattr(config(**{field: taken}), field) == taken
    with pytest.raises(ValueError, match=field):
        config(**{field: refused})


def test_sizes_begin_at_one() -> None:
    assert CostModel(TABLE, 1).costs(1, 0).tokens[1] > 0
    workspace = Workspace(1, 255)
    assert workspace.check(np.zeros((1, 255), np.float32)) == 1
    for requests, gamma in ((0, 1), (1, 0), (1, 256)):
        with pytest.raises(ValueError, match=f"workspace for {requests} requests of {gamma}"):
            Workspace(requests, gamma)
    with pytest.raises(ValueError, match="at least 1: 0"):
        CostModel(TABLE, 0)


@pytest.mark.parametrize("rows", [0, 3])
def test_a_workspace_is_for_the_requests_it_was_made_for(rows: int) -> None:
    workspace = Workspace(2, 4)
    assert workspace.check(np.zeros((2, 4), np.float32)) == 2
    for shape in ((rows, 4), (2, 3), (2, 5)):
        with pytest.raises(ValueError, match="gains"):
            workspace.check(np.zeros(shape, np.float32))


@pytest.mark.parametrize("requests", [0, 5])
def test_a_model_costs_the_requests_it_was_made_for(requests: int) -> None:
    model = CostModel(TABLE, 4)
    assert [len(model.costs(each, 0).draft) for each in (1, 4)] == [3, 3]
    with pytest.raises(ValueError, match=f"{requests} requests, the model was made for 4"):
        model.costs(requests, 0)


def test_a_shift_is_by_a_variance_and_a_memory() -> None:
    assert RequestShift([0.0], 1, memory=1.0).shifts(np.array([0]), np.array([7])).tolist() == [0.0]
    for spreads in ([-LITTLE], [math.inf], [math.nan], []):
        with pytest.raises(ValueError, match="variance"):
            RequestShift(spreads, 1)
    for memory in (BELOW_ONE, math.nan):
        with pytest.raises(ValueError, match="memory"):
            RequestShift([0.0], 1, memory=memory)

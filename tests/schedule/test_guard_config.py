"""Check the ends of each guard setting: the last value accepted and the first refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sglang_dspark.schedule.guard import LONGEST_PAUSE, SERVING_GUARD, SETTLE


@pytest.mark.parametrize(
    ("field", "taken", "refused"),
    [
        ("min_gain", 0.0, -1e-9),
        ("doubt", 0.0, -1e-9),
        ("probe_start_cost", 0.0, -1e-9),
        ("untried_loss", 1e-9, 0.0),
        ("untried_loss", 1 - 1e-9, 1.0),
        ("probe_cost", 1e-9, 0.0),
        ("probe_cost", 1 - 1e-9, 1.0),
        ("probe", SETTLE + 1, SETTLE),
        ("first_pause", 1, 0),
        ("first_pause", LONGEST_PAUSE, LONGEST_PAUSE + 1),
        ("memory", 1.0, 1 - 1e-9),
        ("plain_every", 1, 0),
        ("visit_steps", 1, 0),
    ],
)
def test_the_ends_of_what_is_taken(field: str, taken: Any, refused: Any) -> None:
    assert getattr(replace(SERVING_GUARD, **{field: taken}), field) == taken
    with pytest.raises(ValueError, match=field):
        replace(SERVING_GUARD, **{field: refused})

"""Figures computed from chunks and counts, on numbers worked out by hand."""

from __future__ import annotations

import math

import pytest

from sglang_dspark.loadtest.client.metrics import (
    Chunk,
    Completion,
    SpecStats,
    per_user_speed,
    step_ms,
)


def completion(*steps: tuple[float, int], spec: SpecStats | None = None) -> Completion:
    return Completion(tuple(Chunk(at, "x" * n, n) for at, n in steps), 3, "length", spec)


def test_speed_excludes_the_first_token() -> None:
    fast = completion((1.0, 1), (1.5, 2), (2.0, 3))  # 5 tokens in 1 s
    slow = completion((1.0, 1), (5.0, 5))  # 5 tokens in 4 s
    assert fast.tokens_per_s == pytest.approx(5.0)
    assert per_user_speed([fast, slow]) == pytest.approx(2.0)  # not the mean 3.125 of the speeds
    assert math.isnan(completion((1.0, 1)).tokens_per_s)


def test_step_time_uses_verify_steps() -> None:
    spec = SpecStats(steps=2, accepted=3, histogram=(0, 1, 1))
    drafted = completion((1.0, 1), (1.5, 2), (2.0, 3), spec=spec)
    plain = completion((1.0, 1), (1.5, 1), (2.0, 1), (2.5, 1), (3.0, 1))
    assert step_ms([drafted]) == pytest.approx(500.0)
    assert step_ms([plain]) == pytest.approx(500.0)
    assert drafted.drafted() == [0, 1, 2]
    assert plain.drafted() == [0] * 5


def test_counts_add_up_over_requests() -> None:
    total = SpecStats.total([SpecStats(3, 4, (1, 0, 2)), SpecStats(2, 1, (1, 1))])
    assert total == SpecStats(5, 5, (2, 1, 2))
    assert total.tau == pytest.approx(2.0)
    assert total.acceptance(3) == pytest.approx([0.6, 0.4, 0.0])
    assert math.isnan(SpecStats.total([]).tau)

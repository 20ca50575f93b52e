"""The delivered share of emitted tokens, and the guard's use of it."""

from __future__ import annotations

import pytest

from sglang_dspark.schedule.wasted_tokens import MEMORY, Delivered


def test_nothing_lost_is_all_delivered() -> None:
    delivered = Delivered()
    assert delivered.share(True) == delivered.share(False) == 1.0
    delivered.emitted(True, 400)
    assert delivered.share(True) == 1.0


@pytest.mark.parametrize("losing", [True, False])
def test_the_share_is_that_of_each_kind_of_step(losing: bool) -> None:
    delivered = Delivered()
    for _ in range(400):
        delivered.emitted(losing, 40)
        delivered.lost(losing, 2)
        delivered.emitted(not losing, 40)
    assert delivered.share(losing) == pytest.approx(0.95, abs=0.005)
    assert delivered.share(not losing) == 1.0


def test_one_answer_does_not_decide() -> None:
    delivered = Delivered()
    delivered.emitted(True, 8)
    delivered.lost(True, 8)
    assert delivered.share(True) > 0.9


def test_losses_are_forgotten() -> None:
    delivered = Delivered()
    delivered.emitted(True, 1000)
    delivered.lost(True, 500)
    before = delivered.share(True)
    for _ in range(100):
        delivered.emitted(True, int(MEMORY / 20))
    assert before < 0.7 < 0.98 < delivered.share(True)


def test_more_lost_than_emitted_leaves_a_share_above_zero() -> None:
    delivered = Delivered()
    delivered.lost(True, 1000)
    assert delivered.share(True) == 1.0
    delivered.emitted(True, 10)
    assert 0 < delivered.share(True) <= 1

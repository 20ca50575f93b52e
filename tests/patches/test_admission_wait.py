"""A request is not held back without end while a slot is free."""

from __future__ import annotations

import pytest

pytest.importorskip("sglang")

from sglang.srt.managers.min_free_slots_delayer import MinFreeSlotsDelayer

from sglang_dspark.patches.step import admission_wait
from sglang_dspark.patches.step.admission_wait import LONGEST_S, should_delay

DELAY = MinFreeSlotsDelayer.should_delay


class Loop:
    """A scheduler's loop in which requests wait."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.delayer = 100.0, MinFreeSlotsDelayer(4)
        monkeypatch.setattr(admission_wait.time, "monotonic", lambda: self.now)

    def delays(self, after_s: float, running: int, free: int) -> bool:
        self.now += after_s
        return should_delay(DELAY, self.delayer, running_bs=running, num_allocatable_reqs=free)


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Loop:
    return Loop(monkeypatch)


def test_a_request_waits_for_more_slots_at_most_so_long(loop: Loop) -> None:
    assert loop.delays(0.0, running=7, free=1)
    assert loop.delays(0.9 * LONGEST_S, running=7, free=1)
    assert not loop.delays(0.2 * LONGEST_S, running=7, free=1)
    assert loop.delays(0.0, running=7, free=1), "the next one waits as long"
    assert loop.delays(0.9 * LONGEST_S, running=7, free=2)
    assert not loop.delays(0.2 * LONGEST_S, running=7, free=2)


def test_enough_slots_or_no_other_request_admit_at_once(loop: Loop) -> None:
    assert not loop.delays(0.0, running=4, free=4)
    assert not loop.delays(0.0, running=0, free=1)
    assert loop.delays(0.0, running=5, free=3)
    assert not loop.delays(0.5 * LONGEST_S, running=4, free=4)
    assert loop.delays(0.9 * LONGEST_S, running=5, free=3), "a new wait begins"


def test_without_a_free_slot_no_time_is_counted(loop: Loop) -> None:
    for _ in range(3):
        assert loop.delays(2 * LONGEST_S, running=8, free=0)
    assert loop.delays(0.0, running=7, free=1)

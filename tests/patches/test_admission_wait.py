"""A request is not held back without end while a slot is free."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("sglang")

from sglang.srt.managers.min_free_slots_delayer import MinFreeSlotsDelayer

from sglang_dspark.patches import registry
from sglang_dspark.patches.step import admission_wait
from sglang_dspark.patches.step.admission_wait import MOST_ROUNDS


class Loop:
    """A scheduler's loop in which requests wait for four free slots."""

    def __init__(self) -> None:
        delayer = registry.derive(MinFreeSlotsDelayer, admission_wait.MinFreeSlotsDelayer)
        self.delayer: Any = delayer(4)  # type: ignore[call-arg]

    def delays(self, running: int, free: int, rounds: int = 1) -> list[bool]:
        return [
            self.delayer.should_delay(running_bs=running, num_allocatable_reqs=free)
            for _ in range(rounds)
        ]


@pytest.fixture
def loop() -> Loop:
    return Loop()


def test_a_request_waits_for_more_slots_at_most_so_many_rounds(loop: Loop) -> None:
    for free in (1, 2):  # the next one waits as long
        assert loop.delays(running=7, free=free, rounds=MOST_ROUNDS) == [True] * MOST_ROUNDS
        assert loop.delays(running=7, free=free) == [False]


def test_enough_slots_or_no_other_request_admit_at_once(loop: Loop) -> None:
    assert loop.delays(running=4, free=4) == [False]
    assert loop.delays(running=0, free=1) == [False]
    assert all(loop.delays(running=5, free=3, rounds=MOST_ROUNDS))
    assert loop.delays(running=4, free=4) == [False]
    assert all(loop.delays(running=5, free=3, rounds=MOST_ROUNDS)), "a new wait begins"


def test_without_a_free_slot_no_round_is_counted(loop: Loop) -> None:
    assert all(loop.delays(running=8, free=0, rounds=3 * MOST_ROUNDS))
    assert all(loop.delays(running=7, free=1, rounds=MOST_ROUNDS))


def test_ranks_decide_alike_at_any_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensor-parallel ranks that admit in different rounds would wait for each other for ever."""
    free = [1, 2, 0, 3] * MOST_ROUNDS
    decided = []
    for clock in ([0.0] * len(free), [1e6 * n for n in range(len(free))]):
        times = iter([*clock, *clock])
        monkeypatch.setattr("time.monotonic", lambda times=times: next(times))
        rank = Loop()
        decided.append([rank.delays(running=7, free=each) for each in free])
        monkeypatch.undo()
    assert decided[0] == decided[1]
    assert [False] in decided[0]
    assert not hasattr(admission_wait, "time")

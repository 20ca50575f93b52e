"""Measuring a cost table: on a machine whose times are known, within its time, kept and refused."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sglang_dspark.common.file_lock import turn
from sglang_dspark.schedule.cost_model import CostModel, Step
from sglang_dspark.schedule.cost_table import ProfileKey, cache_path
from sglang_dspark.serving import profile
from sglang_dspark.serving.fallbacks import Fallback

KEY = ProfileKey("target", "drafter", "float32", "a cpu", "tp1", "dspark_cpu", "1", 3)
PASS, TOKEN, REQUEST, CONTEXT, BLOCK, DRAFT, ROW = 20e-3, 1e-3, 2e-4, 5e-6, 4e-3, 3e-3, 5e-4


class Machine:
    """A machine whose seconds are a formula; no time passes unless `slow`."""

    gamma = 3
    tiers: tuple[int, ...] = ()
    depths: tuple[int, ...] = (1, 2, 3)

    def __init__(self, requests: int = 8, slow: float = 0.0, slow_draft: float = 0.0) -> None:
        self.most_requests, self.longest = requests, 4096
        self.slow, self.slow_draft = slow, slow_draft
        self.calls = self.verified = 0

    def warm_up(self) -> None:
        self.calls += 1

    def verify_seconds(self, drafts: Sequence[int], context: int) -> float:
        self.calls += 1
        self.verified += 1
        if self.slow:
            time.sleep(self.slow)
        tokens = len(drafts) + sum(drafts)
        blocks = -(-tokens // 4)
        rows = TOKEN * tokens + BLOCK * blocks + CONTEXT * context * tokens
        return PASS + rows + REQUEST * len(drafts)

    def draft_seconds(self, requests: int, depth: int, context: int) -> float:
        self.calls += 1
        if self.slow_draft:
            time.sleep(self.slow_draft)
        return DRAFT + ROW * requests * depth


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_the_model_predicts_what_the_machine_takes() -> None:
    machine, told = Machine(), []
    table = profile.measure(KEY, machine, 5.0, told.append)
    model = CostModel(table, machine.most_requests)
    for drafts in ([0], [3], [0] * 5, [3, 1, 0], [3] * 8, [1] * 8):
        tokens = len(drafts) + sum(drafts)
        step = Step(len(drafts), tokens, 300 * len(drafts), max(drafts))
        true = machine.verify_seconds(drafts, 300)
        true += machine.draft_seconds(len(drafts), step.depth, 0) if step.depth else 0.0
        assert model.predict(step) == pytest.approx(true, rel=0.02)
    assert table.per_context == pytest.approx(CONTEXT)
    assert table.per_request == pytest.approx(REQUEST)
    assert "measuring" in told[0]


def test_drafts_of_many_requests_follow_the_slope() -> None:
    table = profile.measure(KEY, Machine(requests=24), 5.0, lambda line: None)
    assert table.draft_requests == (1, 2, 4, 8, 16, 24)
    assert table.draft_seconds[-1] == pytest.approx(
        [0.0, *(DRAFT + ROW * 24 * d for d in (1, 2, 3))]
    )


def test_a_single_slot_is_enough() -> None:
    table = profile.measure(KEY, Machine(requests=1), 5.0, lambda line: None)
    assert table.knots == (1, 2, 3, 4)
    assert table.draft_requests == (1,)


class Graphs(Machine):
    """Passes are padded to tiers whose seconds are no line, and only whole drafts are captured."""

    tiers = (4, 8, 12, 16, 32)
    depths = (3,)
    stairs = (0.020, 0.021, 0.034, 0.035, 0.060)

    def tier_seconds(self, tokens: int) -> float:
        return self.stairs[next(i for i, tier in enumerate(self.tiers) if tier >= tokens)]

    def verify_seconds(self, drafts: Sequence[int], context: int) -> float:
        return self.tier_seconds(len(drafts) + sum(drafts))

    def draft_seconds(self, requests: int, depth: int, context: int) -> float:
        assert depth == 3, "another depth is in no graph"
        return DRAFT + ROW * requests


def test_a_staircase_of_captured_tiers_is_found_as_one() -> None:
    machine = Graphs(requests=8)
    table = profile.measure(KEY, machine, 5.0, lambda line: None)
    assert table.padded
    assert table.knots == machine.tiers
    assert table.seconds == pytest.approx(machine.stairs)
    assert table.draft_seconds[-1] == pytest.approx([0.0, *[DRAFT + ROW * 8] * 3])
    model = CostModel(table, machine.most_requests)
    for tokens in (1, 4, 5, 9, 17):
        step = Step(min(tokens, 8), tokens, 0, 0)
        assert model.predict(step) == pytest.approx(machine.tier_seconds(tokens))


def test_it_stops_when_the_time_is_up() -> None:
    machine = Machine(requests=16, slow=0.02)
    table = profile.measure(KEY, machine, 0.2, lambda line: None)
    assert machine.verified <= 12  # of 20 ms or more each
    assert profile.LEAST_KNOTS <= len(table.knots) < 20
    assert table.draft_requests[0] == 1


def test_a_request_has_its_price_even_when_the_time_is_up() -> None:
    table = profile.measure(KEY, Machine(requests=16, slow=0.02), 0.2, lambda line: None)
    assert table.knots[-1] < 16
    assert table.per_request == pytest.approx(REQUEST)


class Unsteady(Machine):
    """Every other second of its own clock, which passes move, it takes 1.3 times as long."""

    now = 0.0

    def verify_seconds(self, drafts: Sequence[int], context: int) -> float:
        return self._pass(super().verify_seconds(drafts, context))

    def draft_seconds(self, requests: int, depth: int, context: int) -> float:
        return self._pass(super().draft_seconds(requests, depth, context))

    def _pass(self, seconds: float) -> float:
        taken = seconds * (1.3 if int(self.now) % 2 else 1.0)
        self.now += taken
        return taken


def test_a_slow_second_is_in_no_figure() -> None:
    """Were the repeats of a pass made one after the other, it would be in some."""
    steady, unsteady = (
        profile.measure(KEY, machine, 5.0, lambda line: None) for machine in (Machine(), Unsteady())
    )
    assert unsteady.seconds == pytest.approx(steady.seconds)
    assert unsteady.draft_seconds == pytest.approx(np.array(steady.draft_seconds))


class Settling(Machine):
    """A machine whose passes take `factor` times as long in each round."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor, self.repeats = factor, 0

    def verify_seconds(self, drafts: Sequence[int], context: int) -> float:
        if list(drafts) == [2]:
            self.repeats += 1
        return super().verify_seconds(drafts, context) * self.factor**self.repeats


@pytest.mark.parametrize(("factor", "repeats"), [(1.0, 3), (0.9, 5)])
def test_rounds_end_once_they_change_nothing(factor: float, repeats: int) -> None:
    machine = Settling(factor)
    profile.measure(KEY, machine, 60.0, lambda line: None)
    assert machine.repeats == repeats


def test_windows_hold_the_tokens_in_as_few_requests_as_can_be() -> None:
    for tokens in range(1, 30):
        drafts = profile.windows(tokens, 3)
        assert len(drafts) + sum(drafts) == tokens
        assert len(drafts) == -(-tokens // 4)
        assert 0 <= min(drafts) <= max(drafts) <= 3
        assert max(drafts) - min(drafts) <= 1


def test_the_second_start_reads_what_the_first_measured(cache: Path) -> None:
    first = profile.table_for(KEY, Machine(), 5.0, lambda line: None)
    machine = Machine()
    second = profile.table_for(KEY, machine, 5.0, lambda line: None)
    assert machine.calls == 0
    assert second.table == first.table
    assert first.source.startswith("measured in")
    assert first.fallbacks == second.fallbacks == ()
    assert second.source == f"read from {cache_path(KEY)}"


def test_another_key_is_measured_and_a_wrong_file_is_replaced(cache: Path) -> None:
    profile.table_for(KEY, Machine(), 5.0, lambda line: None)
    other = replace(KEY, device="another cpu")
    machine = Machine()
    profile.table_for(other, machine, 5.0, lambda line: None)
    assert machine.calls > 0

    cache_path(KEY).write_text(cache_path(other).read_text())  # copied from another machine
    told: list[str] = []
    again = profile.table_for(KEY, Machine(), 5.0, told.append)
    assert "was measured elsewhere" in told[0]
    assert "another cpu" in told[0]
    assert again.table.key == KEY
    assert again.fallbacks == (Fallback.TIMES_REFUSED,)
    assert profile.table_for(KEY, Machine(), 5.0, told.append).source.startswith("read from")


def test_a_cache_that_cannot_be_written_does_no_harm(cache: Path) -> None:
    (cache / "sglang-dspark").write_text("in the way")
    told: list[str] = []
    found = profile.table_for(KEY, Machine(), 5.0, told.append)
    assert found.table.knots[0] == 1
    assert any("cannot write" in line for line in told)
    assert found.fallbacks == (Fallback.TIMES_NOT_SAVED,)


def test_a_hurried_table_is_not_kept(cache: Path) -> None:
    found = profile.table_for(KEY, Machine(requests=64, slow=0.05), 0.05, lambda line: None)
    assert "too few to be kept" in found.source
    assert not cache_path(KEY).exists()


def test_drafts_of_one_request_alone_tell_too_little(cache: Path) -> None:
    machine = Machine(requests=16, slow_draft=0.1)
    found = profile.table_for(KEY, machine, 0.2, lambda line: None)
    assert found.table.draft_requests == (1, 16)
    assert "too few to be kept" in found.source


class Clocked(Machine):
    """Writes down when its passes begin and end, after its process has waited for the other."""

    def __init__(self, file: Path) -> None:
        super().__init__(slow=0.01)
        self.file = file

    def verify_seconds(self, drafts: Sequence[int], context: int) -> float:
        began = time.monotonic()
        seconds = super().verify_seconds(drafts, context)
        with self.file.open("a") as file:
            file.write(f"{began} {time.monotonic()}\n")
        return seconds


def _replica(folder: str, number: int, device: str, start: Any) -> None:
    """A replica's first start: it measures, or reads, once all are there."""
    os.environ["XDG_CACHE_HOME"] = folder
    told: list[str] = []
    start.wait(60)
    machine = Clocked(Path(folder, f"{number}.passes"))
    found = profile.table_for(replace(KEY, device=device), machine, 30.0, told.append)
    Path(folder, f"{number}.source").write_text("\n".join([found.source, *told]))


def _both_start(folder: Path, *devices: str) -> list[list[str]]:
    """Return the source of each replica's table, and its lines in the log."""
    spawn = multiprocessing.get_context("spawn")
    start = spawn.Barrier(len(devices))
    both = [
        spawn.Process(target=_replica, args=(str(folder), number, device, start))
        for number, device in enumerate(devices)
    ]
    for each in both:
        each.start()
    for each in both:
        each.join(120)
    assert [each.exitcode for each in both] == [0] * len(both)
    return [
        (folder / f"{number}.source").read_text().splitlines() for number in range(len(devices))
    ]


def test_of_replicas_that_start_together_one_measures(tmp_path: Path) -> None:
    """The other waits, and reads what that one has kept."""
    first, second = sorted(_both_start(tmp_path, "a cpu", "a cpu"))
    assert first[0].startswith("measured in")
    assert "kept in" in first[0]
    assert second[0].startswith("read from")
    assert second[1:] in (["waiting: another process measures step times"], [])  # it came late
    assert len(list(tmp_path.glob("*.passes"))) == 1
    assert len(list(tmp_path.glob("sglang-dspark/costs/*.json"))) == 1


def test_servers_that_start_together_measure_in_turn(tmp_path: Path) -> None:
    """Of other devices, models, settings: on the same cores all the same."""
    sources = _both_start(tmp_path, "a cpu", "another cpu")
    assert all(source[0].startswith("measured in") for source in sources)
    spans = []
    for number in range(2):
        lines = (tmp_path / f"{number}.passes").read_text().splitlines()
        spans.append((float(lines[0].split()[0]), float(lines[-1].split()[1])))
    (_, first_ended), (second_began, _) = sorted(spans)
    assert first_ended <= second_began


def test_who_does_not_end_is_not_waited_for(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "PATIENCE", 0.2)
    monkeypatch.setattr(profile, "OTHERS", 0)
    told: list[str] = []
    lock = cache / "sglang-dspark" / "costs" / profile.LOCK
    with turn(lock, 0.0, lambda: None):  # another descriptor of the file is another process
        found = profile.table_for(KEY, Machine(), 5.0, told.append)
    assert "kept in" in found.source
    assert any("measured beside it" in line for line in told)

"""Test the seams of a step: they use a worker's state if it has one; else upstream's code runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

from sglang_dspark.patches.step import worker as seams
from sglang_dspark.step import decode, plan
from sglang_dspark.step.state import STATE

Calls = list[Any]


def worker_with_state() -> tuple[Any, Calls]:
    """Make an upstream worker whose engine records its calls."""
    calls: Calls = []
    engine = SimpleNamespace(interrupted=lambda: calls.append("interrupted"))
    worker = SimpleNamespace()
    worker.__dict__[STATE] = SimpleNamespace(worker=worker, engine=engine)
    return worker, calls


def batch_of(*, idle: bool = False) -> Any:
    mode = SimpleNamespace(is_idle=lambda: idle)
    return SimpleNamespace(forward_mode=mode, spec_info=object())


def theirs(*arguments: Any) -> tuple[str, tuple[Any, ...]]:
    return "theirs", arguments


def test_without_a_state_upstream_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "learn", lambda *_: pytest.fail("nothing to learn here"))
    alone, batch = SimpleNamespace(), batch_of()
    assert seams.planner_of(theirs, alone) == ("theirs", (alone,))
    assert seams.note_prefill(theirs, alone, batch, 1) == ("theirs", (alone, batch, 1))
    asked = (alone, batch, None, None, None)
    assert seams.forward_decode(theirs, *asked) == ("theirs", asked)
    seams.process_decode(None, SimpleNamespace(model_worker=alone), batch, object())


def test_a_prefill_interrupts_and_runs() -> None:
    worker, calls = worker_with_state()
    assert seams.note_prefill(theirs, worker, SimpleNamespace(sampling_info=None))[0] == "theirs"
    assert calls == ["interrupted"]


def test_decode_steps_are_ours_unless_the_rank_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "decode", lambda *arguments: ("ours", arguments))
    worker, _ = worker_with_state()
    batch = batch_of()
    ours = seams.forward_decode(theirs, worker, batch, "publish", "grammar")
    assert ours == ("ours", (worker.__dict__[STATE], batch, "publish", "grammar"))
    assert seams.forward_decode(theirs, worker, batch_of(idle=True), None)[0] == "theirs"


def test_plans_and_results_go_to_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: Calls = []
    monkeypatch.setattr(plan, "plan_ahead", lambda *arguments: seen.append(arguments))
    monkeypatch.setattr(plan, "learn", lambda *arguments: seen.append(arguments))
    worker, _ = worker_with_state()
    state = worker.__dict__[STATE]
    seams.planner_of(theirs, worker)("batch", "future map")
    seams.process_decode(None, SimpleNamespace(model_worker=worker), "batch", "result")
    assert seen == [(state, "batch"), (state, "batch", "result")]

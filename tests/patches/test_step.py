"""Test our worker over a fake of upstream's: with a state it runs our step, else upstream's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

from sglang_dspark.patches import registry
from sglang_dspark.patches.step import worker as seams
from sglang_dspark.step import decode, plan
from sglang_dspark.step.state import StepState

Calls = list[Any]


class Theirs:
    """Upstream's worker: each method returns its name and arguments."""

    _hosts_draft, _decode_graph_allowed = True, True
    draft_model: Any = SimpleNamespace()

    def init_cuda_graphs(self) -> None:
        self.ready, self.captured = True, self._decode_graph_allowed

    def get_confidence_budget_prepare(self) -> str:
        return "theirs"

    def _forward_decode(self, *given: Any) -> tuple[str, tuple[Any, ...]]:
        return "theirs", given

    def _forward_prefill(self, *given: Any) -> tuple[str, tuple[Any, ...]]:
        return "theirs", given


def new_worker(*, calls: Calls | None = None) -> Any:
    """Make a worker. calls: it has a state, whose engine records its calls there."""
    worker = registry.derive(Theirs, seams.DSparkWorker)()
    if calls is not None:
        engine: Any = SimpleNamespace(interrupted=lambda: calls.append("interrupted"))
        device: Any = SimpleNamespace(begin_prefill=lambda batch: calls.append(batch))
        worker.dspark_step = StepState(worker, engine, device)  # type: ignore[attr-defined]
    return worker


def batch_of(*, idle: bool = False) -> Any:
    mode = SimpleNamespace(is_idle=lambda: idle)
    return SimpleNamespace(forward_mode=mode, spec_info=object())


def test_without_a_state_upstream_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "learn", lambda *_: pytest.fail("nothing to learn here"))
    alone, batch = new_worker(), batch_of()
    assert alone.get_confidence_budget_prepare() == "theirs"
    assert alone._forward_prefill(batch, 1) == ("theirs", (batch, 1, None))
    assert alone._forward_decode(batch, 1) == ("theirs", (batch, 1, None, None))
    for other in (alone, SimpleNamespace()):
        seams.process_decode(None, SimpleNamespace(model_worker=other), batch, object())


@pytest.mark.parametrize(("device", "state"), [("cpu", "cpu"), ("cuda", "cuda"), ("none", None)])
def test_the_state_is_the_devices_once_upstream_is_ready(
    monkeypatch: pytest.MonkeyPatch, device: str, state: str | None
) -> None:
    for each in ("cpu", "cuda"):
        attach = f"sglang_dspark.backends.{each}.attach.attach"
        monkeypatch.setattr(attach, lambda worker, each=each: worker.ready and each)
    reduced: list[bool] = []
    reduce = "sglang_dspark.backends.cuda.reduced_vocabulary.reduce"
    monkeypatch.setattr(reduce, lambda worker: reduced.append(hasattr(worker, "captured")))
    monkeypatch.setattr(seams, "active_device", lambda: device)
    worker = new_worker()
    worker.init_cuda_graphs()
    assert worker.dspark_step == state
    assert reduced == ([False] if device == "cuda" else []), "before graphs are captured"


@pytest.mark.parametrize(
    ("hosts", "model", "wanted", "captured"),
    [
        (True, SimpleNamespace(capturable=True), True, True),
        (True, SimpleNamespace(capturable=False), True, False),
        (True, SimpleNamespace(capturable=True), False, False),
        (True, SimpleNamespace(), True, True),  # a model of SGLang's own
        (False, None, True, True),  # a stage that has no draft
    ],
)
def test_a_draft_that_no_graph_may_hold_is_not_captured(
    monkeypatch: pytest.MonkeyPatch, hosts: bool, model: Any, wanted: bool, captured: bool
) -> None:
    monkeypatch.setattr(seams, "active_device", lambda: "none")
    worker = new_worker()
    worker._hosts_draft, worker._decode_graph_allowed = hosts, wanted
    worker.draft_model = model
    worker.init_cuda_graphs()
    assert worker.captured is captured


def test_a_prefill_interrupts_and_runs() -> None:
    calls: Calls = []
    worker = new_worker(calls=calls)
    batch = SimpleNamespace(sampling_info=None, reqs=[])
    assert worker._forward_prefill(batch, None)[0] == "theirs"
    assert calls == ["interrupted", batch]


def test_decode_steps_are_ours_unless_the_rank_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "decode", lambda *arguments: ("ours", arguments))
    worker, batch = new_worker(calls=[]), batch_of()
    ours = worker._forward_decode(batch, "publish", "grammar")
    assert ours == ("ours", (worker.dspark_step, batch, "publish", "grammar"))
    assert worker._forward_decode(batch_of(idle=True), None)[0] == "theirs"


def test_plans_and_results_go_to_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: Calls = []
    monkeypatch.setattr(plan, "plan_ahead", lambda *arguments: seen.append(arguments))
    monkeypatch.setattr(plan, "learn", lambda *arguments: seen.append(arguments))
    worker = new_worker(calls=[])
    assert worker.get_confidence_budget_prepare() is None, "a CPU plans at the launch"
    monkeypatch.setattr(seams, "active_device", lambda: "cuda")
    worker.get_confidence_budget_prepare()("batch", "future map")
    seams.process_decode(None, SimpleNamespace(model_worker=worker), "batch", "result")
    assert seen == [(worker.dspark_step, "batch"), (worker.dspark_step, "batch", "result")]

"""Test the passes timed at a GPU's start: arguments as upstream's kernels read them."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang_dspark.backends.cuda import passes
from sglang_dspark.backends.cuda.accept_warm_up import Shape
from sglang_dspark.backends.cuda.device import GraphDevice
from sglang_dspark.backends.cuda.passes import GraphPasses
from sglang_dspark.serving.profile_passes import draft_once

GAMMA = 5


class Clock:
    """Notes what is asked of it."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def lead(self) -> None:
        self.asked.append("lead")

    def mark(self) -> float:
        self.asked.append("mark")
        return 0.0

    def seconds(self, begin: float, end: float) -> float:
        return 0.25


class DummyBatches:
    """Room for 64 made-up requests."""

    most_requests, longest = 64, 100

    def __init__(self, worker: Any) -> None: ...

    @contextmanager
    def batch(self, requests: int, context: int) -> Any:
        yield SimpleNamespace(seq_lens=torch.full((requests,), context))


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> GraphPasses:
    """Passes of a server that overlaps steps unless told not to; graphs of up to four requests."""
    from sglang.srt import runtime_context

    overlaps = getattr(request, "param", True)
    schedule = SimpleNamespace(disable_overlap_schedule=not overlaps)
    monkeypatch.setattr(runtime_context, "get_schedule", lambda: schedule)
    monkeypatch.setattr(passes, "DummyBatches", DummyBatches)
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(synchronize=int))
    device = SimpleNamespace(
        clock=Clock(),
        tiers=(4, 8),
        in_graph=lambda requests, admitted: requests <= 4,
        pass_tokens=lambda requests, admitted: requests + admitted,
        accepts_in_graph=lambda requests, admitted: False,
        with_confidence=lambda proposal: proposal,
    )
    worker: Any = SimpleNamespace(
        gamma=GAMMA,
        device="cpu",
        _proposer=None,
        model_runner=SimpleNamespace(model_config=SimpleNamespace(vocab_size=1000)),
    )
    monkeypatch.setattr(passes, "draft_once", lambda *_: device.clock.asked.append("draft"))
    found = GraphPasses(worker, device)  # type: ignore[arg-type]
    monkeypatch.setattr(found, "_verify", lambda *_: device.clock.asked.append("verify"))
    return found


def asked(timed: GraphPasses) -> list[str]:
    clock: Any = timed._device.clock
    return clock.asked


def test_what_is_timed_is_of_the_servers_graphs_and_pool(timed: GraphPasses) -> None:
    assert (timed.gamma, timed.depths, timed.tiers) == (GAMMA, (GAMMA,), (4, 8))
    assert (timed.most_requests, timed.longest) == (64, 100)


def test_rows_of_the_verify_pass_begin_at_the_anchors(timed: GraphPasses) -> None:
    """One row for the anchor and one for each draft, the first request's from row 0 on."""
    layout = timed._asked([0, 2, 5]).layout
    assert layout.verify_lens.tolist() == [1, 3, 6]
    assert layout.qo_indptr_device.tolist() == [0, 1, 4, 10]


def test_rows_of_a_made_up_pass_differ(timed: GraphPasses) -> None:
    """A mixture of experts would read the experts of one row for all."""
    ids = timed._asked([0, 2, 5]).ids
    assert ids.shape == (3, GAMMA + 1)
    assert len(ids.unique()) == ids.numel()
    assert 0 <= int(ids.min()) <= int(ids.max()) < 1000


def test_a_graph_is_timed_behind_a_lead_and_nothing_else_is(timed: GraphPasses) -> None:
    assert timed.verify_seconds([2, 1], 8) == 0.25
    assert timed.draft_seconds(1, GAMMA, 8) == 0.25
    assert asked(timed) == ["lead", "mark", "verify", "mark", "lead", "mark", "draft", "mark"]
    asked(timed).clear()
    timed.verify_seconds([1] * 5, 8)  # more requests than graphs have
    timed.draft_seconds(5, GAMMA, 8)
    assert asked(timed) == ["mark", "verify", "mark", "mark", "draft", "mark"]


def test_operators_of_every_size_with_graphs_compile_at_the_start(
    timed: GraphPasses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are compiled anew for each power of two of requests: the pool has 64, the graphs 24."""
    made: list[int] = []
    monkeypatch.setattr(timed._device, "slots", 24, raising=False)
    monkeypatch.setattr(timed, "_compile", lambda requests, context: made.append(requests))
    monkeypatch.setattr(timed, "_compile_accept", lambda requests, context: made.append(-requests))
    timed.warm_up()
    assert made == [], "there is nothing to compile on a CPU"
    monkeypatch.setattr(passes, "runs_on", lambda device: True)
    timed._warm = False
    timed.warm_up()
    assert made == [1, 2, 4, 8, 16, 24, -24]
    timed.warm_up()
    assert made == [1, 2, 4, 8, 16, 24, -24], "once a start"


def test_without_graphs_operators_of_up_to_64_requests_compile(
    timed: GraphPasses, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    timed.most_requests = 100
    monkeypatch.setattr(timed._device, "slots", 0, raising=False)
    monkeypatch.setattr(timed, "_compile", lambda requests, context: made.append(requests))
    monkeypatch.setattr(timed, "_compile_accept", lambda requests, context: made.append(-requests))
    monkeypatch.setattr(passes, "runs_on", lambda device: True)
    timed.warm_up()
    assert made == [1, 2, 4, 8, 16, 32, 64, -64]


@pytest.mark.parametrize(("most", "drafts"), [(1, [5]), (64, [5, 5])])
def test_the_first_passes_verify_anchors_then_whole_windows_then_draft(
    timed: GraphPasses, monkeypatch: pytest.MonkeyPatch, most: int, drafts: list[int]
) -> None:
    """Of 8 tokens of context, or as many as the pool has."""
    run: list[tuple[Any, ...]] = []
    timed.most_requests, timed.longest = most, 6
    monkeypatch.setattr(timed, "verify_seconds", lambda *given: run.append(given))
    monkeypatch.setattr(timed, "draft_seconds", lambda *given: run.append(given))
    timed.warm_up()
    assert run == [([0], 6), (drafts, 6), (1, GAMMA, 6)]
    timed._warm, timed.longest = False, 100
    run.clear()
    timed.warm_up()
    assert run == [([0], 8), (drafts, 8), (1, GAMMA, 8)]


def test_operators_compile_on_rows_as_they_are_served(
    timed: GraphPasses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Admission without a draft, and a pass of anchors."""
    launched: list[tuple[Any, ...]] = []
    confidence = torch.zeros(3, GAMMA)
    proposal = SimpleNamespace(confidence_raw=confidence)
    verified: list[list[int]] = []
    monkeypatch.setattr(passes, "draft_once", lambda *_: proposal)
    monkeypatch.setattr(passes, "admit_triton", lambda *given: launched.append(given))
    monkeypatch.setattr(timed, "_asked", lambda drafts: drafts)
    monkeypatch.setattr(timed, "_verify", lambda batch, drafts: verified.append(drafts))
    timed._compile(3, 8)
    assert verified == [[0, 0, 0]], "rows are indexed by a kernel for each number of slots"
    ((logits, terms, drafts),) = launched
    assert (logits is confidence, drafts) == (True, 0)
    assert (terms.shape, terms.dtype) == ((3, 2 * GAMMA + 3), torch.float64)


def test_accept_rules_compile_on_a_step_of_one_request(
    timed: GraphPasses, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[tuple[int, int]] = []
    warmed: list[tuple[Any, Shape, int]] = []
    batch_of = timed._dummies.batch

    def noted(requests: int, context: int) -> Any:
        taken.append((requests, context))
        return batch_of(requests, context)

    block, packed = object(), torch.arange(8.0).view(4, 2)
    spread: list[Any] = []
    windows = torch.ones(GAMMA + 1, 2)
    monkeypatch.setattr(timed._dummies, "batch", noted)
    monkeypatch.setattr(passes, "draft_once", lambda *_: SimpleNamespace(draft_block=block))
    monkeypatch.setattr(timed, "_verify", lambda *_: SimpleNamespace(next_token_logits=packed))
    monkeypatch.setattr(passes, "strided", lambda *given: spread.append(given) or windows)
    monkeypatch.setattr(passes, "warm_up", lambda *given: warmed.append(given))
    timed._compile_accept(24, 8)
    assert taken == [(1, 8)]
    ((device, shape, most),) = warmed
    assert (device, shape.gamma, shape.block, most) == (timed._device, GAMMA, block, 24)
    assert torch.equal(shape.logits, windows[:1])
    ((scattered, layout, width),) = spread
    assert scattered is packed
    assert (len(layout.verify_lens), width) == (1, GAMMA + 1)


@pytest.mark.parametrize(("commits", "graph"), [(False, True), (True, True), (True, False)])
def test_a_made_up_pass_writes_its_rows_once(
    timed: GraphPasses, monkeypatch: pytest.MonkeyPatch, commits: bool, graph: bool
) -> None:
    """Windows of 1, 3 and 6 rows; where the graph commits, nothing is left to write."""
    written: list[Any] = []
    table = torch.arange(4 * 20, dtype=torch.int32).view(4, 20)
    worker, device = timed._worker, timed._device
    monkeypatch.setattr(device, "slots", 4, raising=False)
    monkeypatch.setattr(passes.graph_epilogue, "commits", lambda epilogue: commits)
    monkeypatch.setattr(device, "accepts_in_graph", lambda *_: graph, raising=False)
    worker.model_runner.req_to_token_pool = SimpleNamespace(req_to_token=table)
    epilogue = SimpleNamespace(begin_step=lambda lens, armed: None)
    worker._verify_executor = SimpleNamespace(verify_epilogue=epilogue)
    device.committer = SimpleNamespace(write=written.append)  # type: ignore[assignment]
    device._chain = None
    device.write_context = partial(GraphDevice.write_context, device)  # type: ignore[method-assign]
    outputs = SimpleNamespace(hidden_states=torch.arange(10.0)[:, None])
    monkeypatch.setattr(passes, "ragged_forward", lambda *_: outputs)
    rows, lens = torch.tensor([1, 3, 2]), torch.tensor([8, 5, 9])
    batch = SimpleNamespace(req_pool_indices=rows, seq_lens=lens)
    assert GraphPasses._verify(timed, batch, timed._asked([0, 2, 5])) is outputs
    assert len(written) == (not (commits and graph))
    for each in written:
        assert each.hidden[:, 0].tolist() == list(range(10))
        assert each.positions.tolist() == [8, 5, 6, 7, 9, 10, 11, 12, 13, 14]
        expected = torch.cat(
            [table[r, n : n + k] for r, n, k in zip(rows, lens, (1, 3, 6), strict=True)]
        )
        assert each.slots.tolist() == expected.tolist()


@pytest.mark.parametrize("timed", [False], indirect=True)
def test_steps_that_wait_for_the_host_are_timed_with_it(timed: GraphPasses) -> None:
    timed.verify_seconds([2, 1], 8)
    assert asked(timed) == ["mark", "verify", "mark"]


def test_a_made_up_draft_runs_among_the_drafts_ranks() -> None:
    """As a step's: SGLang narrows the ranks while the draft's model runs."""
    inside: list[bool] = []

    @contextmanager
    def context() -> Any:
        inside.append(True)
        yield
        inside.pop()

    def propose(**given: Any) -> str:
        assert inside, "the draft ran among the target's ranks"
        return "proposal"

    runner = SimpleNamespace(model=None)
    worker = SimpleNamespace(
        device="cpu",
        _draft_context=context,
        target_worker=SimpleNamespace(model_runner=runner),
    )
    batch = SimpleNamespace(seq_lens=torch.ones(2), window=None, spec_info=None, sampling_info=None)
    assert draft_once(worker, SimpleNamespace(propose=propose), batch) == "proposal"
    assert not inside


def test_a_draft_is_timed_with_the_estimate_of_its_confidence(timed: GraphPasses) -> None:
    """A profile without it would promise drafts that cost less than a step's."""
    device: Any = timed._device
    device.with_confidence = lambda proposal: asked(timed).append("confidence")
    timed.draft_seconds(5, GAMMA, 8)
    assert asked(timed) == ["mark", "draft", "confidence", "mark"]

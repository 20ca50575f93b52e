"""A worker that cannot be scheduled after its graphs were captured: why, and what serves it."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.speculative.ragged_verify import RaggedVerifyMode

from sglang_dspark.backends.cuda import attach
from sglang_dspark.backends.cuda.device import EventClock
from sglang_dspark.step.build import verify_everything
from sglang_dspark.step.engine import ScheduleEngine
from sglang_dspark.step.penalties import OutputCounts
from sglang_dspark.step.ranks import Ranks
from sglang_dspark.step.state import StepState


class Attention:
    """A backend, and whether it reads lengths on the host."""

    def __init__(self, waits: bool) -> None:
        self.needs_cpu_seq_lens = waits


def worker_of(
    *,
    target_waits: bool = False,
    draft_waits: bool = False,
    backed: bool = True,
    head: bool = True,
    greedy_draft: bool = False,
    ring: int | None = None,
) -> Any:
    """Loaded for compact verification, its graphs captured."""
    pool = SimpleNamespace(post_capture_active=not backed)
    runner = SimpleNamespace(attn_backend=Attention(target_waits), token_to_kv_pool=pool)
    return SimpleNamespace(
        _verify_planner=SimpleNamespace(is_compact_mode=True),
        draft_model=SimpleNamespace(confidence_head=object() if head else None),
        _greedy_draft=greedy_draft,
        _kv_injector=SimpleNamespace(swa_ring_size=ring),
        model_runner=runner,
        draft_model_runner=SimpleNamespace(attn_backend=Attention(draft_waits)),
    )


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt import runtime_context

    parallel = SimpleNamespace(attn_dp_enabled=False, pp_size=1)
    monkeypatch.setattr(runtime_context, "get_parallel", lambda: parallel)
    monkeypatch.setattr(attach, "obstacle", lambda worker: None)


@pytest.mark.parametrize("waits", [True, False])
def test_two_equal_backends_block_nothing(waits: bool) -> None:
    assert attach._obstacle(worker_of(target_waits=waits, draft_waits=waits)) is None
    assert attach._obstacle(worker_of(target_waits=True)) is None


def test_a_draft_that_waits_for_the_host_beside_a_target_that_does_not() -> None:
    why = attach._obstacle(worker_of(draft_waits=True))
    assert why is not None
    assert "(Attention) waits for lengths on the host" in why
    assert "--speculative-draft-attention-backend" in why


@pytest.mark.parametrize(
    ("parallel", "why"),
    [((False, 2), "last of several stages"), ((True, 1), "data-parallel attention")],
)
def test_stages_and_data_parallel_attention_stand_in_the_way(
    parallel: tuple[bool, int], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt import runtime_context

    found = SimpleNamespace(attn_dp_enabled=parallel[0], pp_size=parallel[1])
    monkeypatch.setattr(runtime_context, "get_parallel", lambda: found)
    assert why in str(attach._obstacle(worker_of()))


def test_a_cache_without_memory_is_not_written_to() -> None:
    why = attach._obstacle(worker_of(backed=False))
    assert why is not None
    assert "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING" in why


def test_a_cache_that_is_a_ring_of_each_request_is_not_profiled() -> None:
    assert "--enable-encoder-swa-bounded-replay" in str(attach._obstacle(worker_of(ring=256)))


def test_greedy_drafts_leave_nothing_to_estimate_confidence_from() -> None:
    assert attach._obstacle(worker_of(head=False)) is None
    assert attach._obstacle(worker_of(greedy_draft=True)) is None
    why = attach._obstacle(worker_of(head=False, greedy_draft=True))
    assert "SGLANG_DSPARK_USE_GREEDY_DRAFT" in str(why)


@pytest.mark.parametrize(("device", "freed"), [("cuda", ["profiled", "freed"]), ("cpu", [])])
def test_what_the_profile_cached_is_freed_behind_it(
    monkeypatch: pytest.MonkeyPatch, device: str, freed: list[str]
) -> None:
    """And counts of output tokens are allocated for all slots, row 0 being padding."""
    done: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("freed"))
    monkeypatch.setattr(attach, "engine_for", lambda *_: done.append("profiled"))
    monkeypatch.setattr(attach, "ranks_of", lambda worker: None)
    for name in ("GraphDevice", "GraphPasses", "_key", "use_blockwise_rejection"):
        monkeypatch.setattr(attach, name, lambda *_: None)
    asked: list[tuple[int, int, str]] = []
    monkeypatch.setattr(
        OutputCounts, "reserve", lambda counts, *given: asked.append((*given[:2], given[2].type))
    )
    pool = SimpleNamespace(req_to_token=torch.zeros(49, 8))
    runner = SimpleNamespace(
        req_to_token_pool=pool, model_config=SimpleNamespace(vocab_size=151_936)
    )
    worker: Any = SimpleNamespace(device=device, gamma=3, _proposer=None, model_runner=runner)
    state = attach.take_over(worker, EventClock())
    assert done == (freed or ["profiled"])
    assert asked == [(48, 151_936, device)]
    assert isinstance(state, StepState)


@pytest.mark.parametrize("graphs", [True, False])
def test_graphs_of_ragged_windows_keep_running(graphs: bool) -> None:
    """In static mode SGLang gives a pass no layout, and such graphs run none without."""
    planner = SimpleNamespace(
        _budget_planner=object(),
        _is_verify_all=False,
        _ragged_verify_mode=RaggedVerifyMode.COMPACT,
    )
    runner = SimpleNamespace(decode_cuda_graph_runner=object() if graphs else None)
    verify_everything(SimpleNamespace(_verify_planner=planner, model_runner=runner))
    expected = RaggedVerifyMode.COMPACT if graphs else RaggedVerifyMode.STATIC
    assert planner._ragged_verify_mode is expected
    assert planner._budget_planner is None
    assert planner._is_verify_all


@pytest.mark.parametrize(
    ("hosts", "ours", "why", "compact", "done"),
    [
        (False, True, None, True, []),
        (True, True, None, True, ["broken?", "taken over"]),
        (True, True, "no lengths", True, ["broken?", "all verified"]),
        (True, True, "static models", False, ["broken?"]),
        (True, False, None, True, ["broken?"]),
    ],
)
def test_a_worker_is_scheduled_or_verifies_every_draft_or_is_left_alone(
    hosts: bool,
    ours: bool,
    why: str | None,
    compact: bool,
    done: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    found: list[str] = []
    for name, said in (
        ("refuse_broken", "broken?"),
        ("verify_everything", "all verified"),
        ("take_over", "taken over"),
    ):
        monkeypatch.setattr(attach, name, lambda *_, _said=said: found.append(_said) or _said)
    monkeypatch.setattr(attach, "_obstacle", lambda worker: why)
    chosen = SimpleNamespace(ours=ours, reason="as asked")
    monkeypatch.setattr(attach.mode, "choice", lambda: chosen)
    planner = SimpleNamespace(is_compact_mode=compact, mode_value="compact")
    epilogue = SimpleNamespace(**{attach.graph_epilogue._TAIL: object()})
    executor = SimpleNamespace(verify_epilogue=epilogue)
    worker = SimpleNamespace(
        _hosts_draft=hosts,
        _verify_planner=planner,
        _verify_executor=executor,
        draft_model=object(),
    )
    state = attach.attach(worker)
    assert (executor.verify_epilogue is None) == ("all verified" in done)
    assert state == ("taken over" if "taken over" in done else None)
    assert found == done
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == (hosts and "taken over" not in done)
    for line in lines:
        assert (why or "as asked") in line
        assert ("every draft is verified" in line) == ("all verified" in done)


@pytest.mark.parametrize(("ours", "why"), [(True, "no lengths"), (False, None)])
def test_a_chain_drafter_that_is_not_scheduled_ends_the_start(
    ours: bool, why: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """SGLang's own step would draft from the wrong positions."""
    monkeypatch.setattr(attach, "refuse_broken", lambda worker: None)
    monkeypatch.setattr(attach, "_obstacle", lambda worker: why)
    chosen = SimpleNamespace(ours=ours, reason="as asked")
    monkeypatch.setattr(attach.mode, "choice", lambda: chosen)
    monkeypatch.setattr(attach, "context_of", lambda worker: object())
    with pytest.raises(SystemExit):
        attach.attach(SimpleNamespace(_hosts_draft=True))
    assert f"only where drafts are scheduled: {why or 'as asked'}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("device", "before", "after"),
    [("cuda", None, "noise of seed 7"), ("cuda", "upstream's", "upstream's"), ("cpu", None, None)],
)
def test_the_noise_of_blockwise_rejection_is_made_where_upstream_made_none(
    device: str, before: str | None, after: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.kernels.ops.speculative.dspark import blockwise_rejection

    monkeypatch.setattr(
        blockwise_rejection, "make_rejection_noise", lambda seed, device: f"noise of seed {seed}"
    )
    executor = SimpleNamespace(_rejection_noise=before)
    worker: Any = SimpleNamespace(
        device=device, _verify_executor=executor, target_worker=SimpleNamespace(random_seed=7)
    )
    attach.use_blockwise_rejection(worker)
    assert executor._rejection_noise == after
    assert getattr(worker, "_rejection_noise", before) == after


def test_compilations_count_from_the_first_users_request_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those of the made-up requests before it are what a start takes."""
    engine = object.__new__(ScheduleEngine)
    engine.metrics = cast(Any, SimpleNamespace(kernel_compiled="counted"))
    watched: list[str] = []
    for name in ("use_blockwise_rejection", "GraphDevice", "GraphPasses", "_key"):
        monkeypatch.setattr(attach, name, lambda *_: None)
    monkeypatch.setattr(attach, "ranks_of", lambda worker: Ranks())
    monkeypatch.setattr(attach, "engine_for", lambda *_: engine)
    monkeypatch.setattr(attach, "watch", watched.append)
    worker = worker_of()
    worker.device = "cpu"
    worker.model_runner.req_to_token_pool = SimpleNamespace(req_to_token=torch.zeros(3, 4))
    worker.model_runner.model_config = SimpleNamespace(vocab_size=8)
    state = attach.take_over(worker, EventClock())
    monkeypatch.setattr(state, "device", mock.Mock())
    state.prefills(SimpleNamespace(reqs=[SimpleNamespace(rid="dspark-warm-up-0-0")]))
    assert watched == []
    state.prefills(SimpleNamespace(reqs=[SimpleNamespace(rid="a")]))
    assert watched == ["counted"]

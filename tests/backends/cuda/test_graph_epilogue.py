"""A captured verify pass ends with outcomes as upstream's, and with its rows committed."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.speculative.dspark_components import dspark_verify
from sglang.srt.speculative.dspark_components.dspark_verify import TargetVerifyExecutor

from sglang_dspark.backends.cuda import graph_epilogue
from sglang_dspark.step.verify import layout_of
from tests.kernels.processes import output_of
from tests.step.windows import indptr_of


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    printed = output_of("tests.backends.cuda.interpreted_graph_epilogue")
    found: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return found


def test_outcomes_are_upstreams(report: dict[str, Any]) -> None:
    assert report["different"] == []
    assert report["ran"] == 16
    assert report["kept"] > 40


def test_rows_are_committed_and_nothing_else(report: dict[str, Any]) -> None:
    assert report["commits"]
    assert report["off"] < 1e-5


def test_no_window_of_logits_is_allocated(report: dict[str, Any]) -> None:
    """Scratch is made once: what is made in a capture is that graph's own."""
    assert not report["windows"]
    assert report["tails"] == 1


def test_upstream_accepts_where_its_epilogue_does_more(report: dict[str, Any]) -> None:
    """Log it once; the graph commits all the same."""
    assert report["by_upstream"]
    for reason, found in report["refused"].items():
        assert len(found["told"]) == 1, reason
        assert reason in found["told"][0]
        assert found["commits"], reason


def test_a_translated_slot_is_left_to_the_step(report: dict[str, Any]) -> None:
    assert report["translated"] == {"commits": False, "untouched": True}


CHANGES = ["draft worker", "static graph", "another mode", "no logits", "SGLang's step"]


@pytest.mark.parametrize("changed", CHANGES)
def test_other_passes_are_upstreams(changed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_epilogue, "runs_on", lambda device: True)
    choice = SimpleNamespace(ours=changed != "SGLang's step")
    monkeypatch.setattr(graph_epilogue.mode, "choice", lambda: choice)
    target = SimpleNamespace(is_draft_worker=changed == "draft worker")
    runner = SimpleNamespace(ragged_verify_mode=changed != "static graph", model_runner=target)
    verifies = changed != "another mode"
    batch = SimpleNamespace(forward_mode=SimpleNamespace(is_target_verify=lambda: verifies))
    logits = None if changed == "no logits" else torch.zeros(1, 2)
    out = SimpleNamespace(next_token_logits=logits, hidden_states=torch.zeros(1, 2))
    called: list[tuple[Any, ...]] = []
    graph_epilogue.run(lambda *given: called.append(given), "epilogue", runner, out, batch, 1)
    assert called == [("epilogue", runner, out, batch, 1)]


def test_a_server_without_graphs_commits_in_the_step() -> None:
    assert not graph_epilogue.commits(None)
    assert not graph_epilogue.commits(SimpleNamespace())


@pytest.mark.parametrize("replayed", [True, False])
def test_sglangs_step_runs_behind_our_graphs(replayed: bool) -> None:
    """Of a worker that is not scheduled: it reads windows that our graphs do not fill."""
    packed = torch.arange(4.0)[:, None]
    outputs = SimpleNamespace(next_token_logits=packed, hidden_states=-packed)
    executor = TargetVerifyExecutor.__new__(TargetVerifyExecutor)
    executor.verify_num_draft_tokens, executor.model_runner = 2, None
    tail = SimpleNamespace(commits=True)
    executor.verify_epilogue = SimpleNamespace(
        strided_logits=None, strided_hidden=None, begin_step=lambda lens, armed: None
    )
    executor.verify_epilogue.__dict__[graph_epilogue._TAIL] = tail
    executor._run_ragged = lambda **_: SimpleNamespace(
        logits_output=outputs, can_run_cuda_graph=replayed
    )
    graph_epilogue.detach(executor)
    layout = layout_of(indptr_of([0, 1]), 4)
    with mock.patch.object(dspark_verify, "BuildRaggedVerifyWindow"):
        _, hidden = executor.run_compact(
            batch=None,
            layout=layout,
            draft_block_ids=None,
            draft_tokens=None,
            bs=2,
            device="cpu",
            sampling_info=None,
            verify_window=SimpleNamespace(kv_loc_plan=None),
        )
    assert outputs.next_token_logits[:, 0].tolist() == [0, 0, 1, 2]
    assert hidden[:, 0].tolist() == [0, 0, -1, -2]


def test_another_epilogue_stays() -> None:
    executor = SimpleNamespace(verify_epilogue=SimpleNamespace())
    graph_epilogue.detach(executor)
    assert executor.verify_epilogue is not None

"""A captured verify pass ends with outcomes as upstream's, and with its rows committed."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang_dspark.backends.cuda import graph_epilogue
from tests.kernels.processes import output_of


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    printed = output_of("tests.backends.cuda.interpreted_graph_epilogue")
    found: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return found


def test_outcomes_are_upstreams(report: dict[str, Any]) -> None:
    assert report["different"] == []
    assert report["ran"] == 40
    assert report["kept"] > 100


def test_rows_are_committed_and_nothing_else(report: dict[str, Any]) -> None:
    assert report["commits"]
    assert report["off"] < 1e-5


def test_no_window_of_logits_is_allocated(report: dict[str, Any]) -> None:
    assert not report["windows"]


def test_upstream_accepts_where_its_epilogue_does_more(report: dict[str, Any]) -> None:
    """Log it once; the graph commits all the same."""
    assert report["by_upstream"]
    for reason, found in report["refused"].items():
        assert len(found["told"]) == 1, reason
        assert reason in found["told"][0]
        assert found["commits"], reason


def test_a_translated_slot_is_left_to_the_step(report: dict[str, Any]) -> None:
    assert report["translated"] == {"commits": False, "untouched": True}


@pytest.mark.parametrize("changed", ["draft worker", "static graph", "another mode", "no logits"])
def test_other_passes_are_upstreams(changed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_epilogue, "runs_on", lambda device: True)
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

"""One decision for all ranks: two gloo processes through the engine, with copies of their own."""

from __future__ import annotations

import json
import multiprocessing
from typing import Any

import pytest

from tests.serving.ranks import ALONE, RANKS, rank_main

STEPS = 10_000
PATIENCE = 600  # seconds, after which a rank is taken to hang


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank wrote."""
    folder = tmp_path_factory.mktemp("ranks")
    start = multiprocessing.get_context("spawn")
    ranks = [
        start.Process(target=rank_main, args=(rank, STEPS, str(folder)), daemon=True)
        for rank in range(RANKS)
    ]
    for rank in ranks:
        rank.start()
    for _ in range(PATIENCE):
        for rank in ranks:
            rank.join(0.5)
        ended = [rank.exitcode is not None for rank in ranks]
        if all(ended) or any(rank.exitcode for rank in ranks):
            break
    codes = [rank.exitcode for rank in ranks]
    for rank in ranks:
        rank.kill()
    assert codes == [0] * RANKS, "a rank hung (None) or failed"
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


def test_two_ranks_never_disagree(reports: list[dict[str, Any]]) -> None:
    first, second = (report["together"] for report in reports)
    assert len(first["digests"]) == STEPS
    assert first["digests"] == second["digests"]
    assert first["cut"] > STEPS // 4
    assert first["rested"] > STEPS // 50, "steps that repeat the plan before them are sent too"


def test_alone_they_would_have(reports: list[dict[str, Any]]) -> None:
    """The control: the same ranks, copies and clocks, each acting on its own engine."""
    first, second = (report["alone"]["digests"] for report in reports)
    differed = sum(mine != theirs for mine, theirs in zip(first, second, strict=True))
    assert differed > ALONE // 4


def test_every_rank_runs_the_passes_that_the_leader_times(reports: list[dict[str, Any]]) -> None:
    """And none where the leader alone has kept its table: its start decides."""
    first, again = zip(*(report["profiles"] for report in reports), strict=True)
    assert first[0]["ran"] == first[1]["ran"]
    assert {kind for kind, *_ in first[0]["ran"]} == {"warm up", "verify", "draft"}
    assert "measured" in first[0]["built"]
    assert [each["ran"] for each in again] == [[], []]
    assert "read from" in again[0]["built"]
    assert first[1]["built"] == again[1]["built"] == "Follower"


def test_where_the_leader_fails_all_raise(reports: list[dict[str, Any]]) -> None:
    leader, follower = (report["failures"] for report in reports)
    assert leader[:3] == ["RuntimeError: no more today"] * 3
    told = "DSparkError: rank 0 could not decide for all ranks; its log says why"
    assert follower[:3] == [told] * 3


def test_another_batch_is_noticed(reports: list[dict[str, Any]]) -> None:
    _, follower = (report["failures"] for report in reports)
    assert follower[3].startswith("DSparkError: rank 1 decodes 2 requests, rank 0 in step 1 2 oth")

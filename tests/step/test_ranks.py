"""One decision for all ranks: two gloo processes through the engine, with copies of their own."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from tests.step.ranks import ALONE, RANKS, rank_main

# One process: its module is slow to set up.
pytestmark = pytest.mark.xdist_group("plan-ranks")

STEPS = 4_000
LIMIT = 1800  # seconds for all of them; a rank that waits for another raises sooner


def ranks_in(folder: Path, steps: int) -> list[dict[str, Any]]:
    """Run two ranks for so many steps; what each wrote."""
    start = multiprocessing.get_context("spawn")
    ranks = [
        start.Process(target=rank_main, args=(rank, steps, str(folder)), daemon=True)
        for rank in range(RANKS)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(LIMIT)
    codes = [rank.exitcode for rank in ranks]
    for rank in ranks:
        rank.kill()
    assert codes == [0] * RANKS
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return ranks_in(tmp_path_factory.mktemp("load"), STEPS)


@pytest.fixture(scope="module")
def edges(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """After a few steps: what happens beside them."""
    return ranks_in(tmp_path_factory.mktemp("edges"), 100)


def test_two_ranks_never_disagree(load: list[dict[str, Any]]) -> None:
    first, second = (report["together"] for report in load)
    assert len(first["digests"]) == STEPS
    assert first["digests"] == second["digests"]
    assert first["cut"] > STEPS // 4
    assert first["repeated"] > STEPS // 50, "steps that repeat the plan before them are sent too"


def test_alone_they_would_have(load: list[dict[str, Any]]) -> None:
    """The control: the same ranks, copies and clocks, each acting on its own engine."""
    first, second = (report["alone"]["digests"] for report in load)
    differed = sum(mine != theirs for mine, theirs in zip(first, second, strict=True))
    assert differed > ALONE // 4


def test_every_rank_runs_the_passes_that_the_leader_times(edges: list[dict[str, Any]]) -> None:
    """And none where the leader alone has kept its table: its start decides."""
    first, again = zip(*(report["profiles"] for report in edges), strict=True)
    assert first[0]["ran"] == first[1]["ran"]
    assert {kind for kind, *_ in first[0]["ran"]} == {"warm up", "verify", "draft"}
    assert "measured" in first[0]["built"]
    assert [each["ran"] for each in again] == [[], []]
    assert "read from" in again[0]["built"]
    assert first[1]["built"] == again[1]["built"] == "Follower"


def test_where_the_leader_fails_all_raise(edges: list[dict[str, Any]]) -> None:
    leader, follower = (report["failures"] for report in edges)
    assert leader[:3] == ["RuntimeError: no more today"] * 3
    told = "DSparkError: rank 0 could not decide for all ranks; its log says why"
    assert follower[:3] == [told] * 3


def test_another_batch_is_noticed(edges: list[dict[str, Any]]) -> None:
    _, follower = (report["failures"] for report in edges)
    assert follower[3].startswith("DSparkError: rank 1 decodes 2 requests, rank 0 in step 1 2 oth")

"""Two ranks of one server, on CUDA's side of the step: scheduled, and as one rank answers."""

from __future__ import annotations

import json
import os
import re
import time

import httpx
import pytest

from tests.faults.live import await_that
from tests.integration import tiny_models
from tests.integration.serving import Served, ServerPool
from tests.rehearsal.conftest import Rehearsed, start_rehearsed
from tests.rehearsal.test_graphs import GRAPHS, PROMPTS, answers
from tests.rehearsal.test_overlap_steps import TOKENS

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("rehearsal")]

PATIENCE = 300  # seconds for a server to end


def start(
    pool: ServerPool, name: str, pair: tiny_models.TinyPair, *arguments: str, **world: str
) -> Rehearsed:
    """Two ranks, each on a core of its own where there are two."""
    world = {
        "SGLANG_CPU_OMP_THREADS_BIND": bound_cores(),
        "DSPARK_REHEARSAL_STAIR": "8e-3",
        **world,
    }
    return start_rehearsed(pool, name, pair, "--tp-size", "2", *arguments, **world)


def bound_cores() -> str:
    """A core for each of two ranks."""
    cores = sorted(os.sched_getaffinity(0))
    return f"{cores[0]}|{cores[-1]}"


@pytest.fixture(scope="module")
def two(pool: ServerPool, pair: tiny_models.TinyPair) -> Rehearsed:
    """Start two ranks: in graphs up to 8 requests, eager beyond; a larger tier is slower."""
    sizes = ("--cuda-graph-bs-decode", *(str(size) for size in GRAPHS))
    return start(pool, "two", pair, "--enable-metrics", *sizes, DSPARK_REHEARSAL_GRAPHS="1")


@pytest.mark.parametrize("users", [1, 4, 12])
def test_greedy_answers_are_those_of_one_plain_rank(
    plain: Served, two: Rehearsed, users: int
) -> None:
    expected = answers(plain, users)
    before = len(two.passes())
    assert answers(two.server, users) == expected
    emitted = sum(each["pass"] for each in two.passes()[before:])
    assert emitted < 0.9 * len(PROMPTS) * TOKENS, "too few drafts were accepted"


def test_ranks_run_the_same_passes(two: Rehearsed) -> None:
    """Of greedy and sampled requests; lengths were cut, and differ within a pass."""
    two.server.generate_all(
        PROMPTS, 4, max_new_tokens=TOKENS, sampling_params={"temperature": 1.0, "ignore_eos": True}
    )
    passes = two.passes()
    await_that(lambda: len(two.passes(rank=1)) >= len(passes), "rank 1 has fewer passes")
    assert passes == two.passes(rank=1)
    assert any(each["folded"] for each in passes)
    assert any(not each["replayed"] for each in passes), "no pass was eager"
    assert [each for each in two.launches() if each["reads"]] == []
    lengths = [each["lengths"][: each["pass"]] for each in passes]
    assert sum(len(set(each)) > 1 for each in lengths) > TOKENS
    assert sum(0 < sum(each) < 5 * len(each) for each in lengths) > TOKENS


def test_the_first_rank_decides(two: Rehearsed) -> None:
    """It alone profiles, plans, learns and counts; by the other's clock nothing would pay."""
    assert re.search(r"TP0\] sglang-dspark: mode compact, scheduled by confidence", two.server.log)
    assert re.search(r"TP1\] sglang-dspark: acts on the plans of rank 0", two.server.log)
    assert not re.search(r"TP1\] sglang-dspark: (mode|measuring|every draft)", two.server.log)
    kept = (two.folder / "sglang-dspark" / "costs").glob("*.json")
    assert [json.loads(file.read_text())["key"]["parallel"] for file in kept] == ["tp2 pp1 dp1 ep1"]
    before = len(two.passes()) - counted(two)
    answers(two.server, 4)
    await_that(lambda: len(two.passes()) - counted(two) == before, "passes that are not counted")
    assert len(two.passes()) > TOKENS


def counted(two: Rehearsed) -> int:
    """Steps that the server has counted, all of them by rank 0."""
    metrics = two.server.request("GET", "/metrics").text
    counts = re.findall(r"^sglang:dspark_steps_total\{(.*?)\} (\S+)", metrics, re.MULTILINE)
    assert all('tp_rank="0"' in labels for labels, _ in counts)
    return sum(int(float(count)) for _, count in counts)


@pytest.mark.slow
def test_a_leader_that_fails_ends_the_server(pool: ServerPool, pair: tiny_models.TinyPair) -> None:
    failing = start(pool, "two-failing", pair, DSPARK_REHEARSAL_FAIL="3")
    with pytest.raises(httpx.HTTPError):
        failing.server.generate(PROMPTS[0], TOKENS, sampling_params={"ignore_eos": True})
    deadline = time.monotonic() + PATIENCE
    while failing.server.process.alive() and time.monotonic() < deadline:
        time.sleep(0.5)
    assert not failing.server.process.alive()
    assert "RuntimeError: the rehearsal's leader fails" in failing.server.log
    assert "rank 0 could not decide for all ranks" in failing.server.log

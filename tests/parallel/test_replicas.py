"""Two ranks, and two replicas, of one machine: the commands of the page, to the letter."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration import tiny_models
from tests.integration.serving import Served, ServerPool
from tests.parallel.counters import counted
from tests.parallel.documented import documented
from tests.rehearsal.conftest import SLOTS
from tests.rehearsal.test_graphs import PROMPTS, answers
from tests.rehearsal.test_overlap_steps import GREEDY

pytestmark = [
    pytest.mark.server,
    pytest.mark.slow,
    pytest.mark.xdist_group("parallel"),
]

USERS = [1, 4, 8]


def start(pool: ServerPool, name: str, pair: tiny_models.TinyPair, config: Path) -> Served:
    """The server of the page's block; beside it only what a test needs."""
    words = documented(name, TARGET=str(pair.target), DRAFTER=str(pair.drafter))
    head = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(pair.target)]
    assert words[: len(head)] == head
    more = ("--dspark-config", str(config), "--max-running-requests", SLOTS, "--enable-metrics")
    cache = str(pool.folder / f"{name}-cache")
    server = pool.start(name, pair.target, *words[len(head) :], *more, XDG_CACHE_HOME=cache)
    print(f"two {name} ready after {server.process.ready_after:.0f} s")
    return server


def page(server: Served) -> str:
    return server.request("GET", "/metrics").text


@pytest.fixture(scope="module")
def ranks(pool: ServerPool, pair: tiny_models.TinyPair, by_confidence: Path) -> Iterator[Served]:
    yield start(pool, "ranks", pair, by_confidence)
    pool.stop("ranks")


@pytest.fixture(scope="module")
def replicas(pool: ServerPool, pair: tiny_models.TinyPair, by_confidence: Path) -> Iterator[Served]:
    yield start(pool, "replicas", pair, by_confidence)
    pool.stop("replicas")


@pytest.mark.parametrize("users", USERS)
def test_two_ranks_answer_as_one_plain(plain: Served, ranks: Served, users: int) -> None:
    assert answers(ranks, users) == answers(plain, users)


def test_two_ranks_are_scheduled_by_the_first(ranks: Served) -> None:
    answers(ranks, 4)
    assert "TP0] sglang-dspark: mode compact, scheduled by" in ranks.log
    assert "TP1] sglang-dspark: acts on the plans of rank 0" in ranks.log
    (only,) = counted(page(ranks)).values()
    assert only.cut_by_confidence(tiny_models.GAMMA)
    assert {address for address, _ in ranks.listens()} == {"127.0.0.1"}


@pytest.mark.parametrize("users", USERS)
def test_two_replicas_answer_as_one_plain(plain: Served, replicas: Served, users: int) -> None:
    assert answers(replicas, users) == answers(plain, users)


@pytest.mark.parametrize("replica", [0, 1])
def test_each_replica_answers_as_one_plain(plain: Served, replicas: Served, replica: int) -> None:
    expected = answers(plain, 4)
    before = counted(page(replicas))
    found = replicas.generate_all(PROMPTS, 4, routed_dp_rank=replica, **GREEDY)
    assert [each["output_ids"] for each in found] == expected
    after = counted(page(replicas))
    other = str(1 - replica)
    assert after[str(replica)].steps > before[str(replica)].steps
    assert after[other] == before[other]


def test_both_replicas_schedule_and_count(replicas: Served) -> None:
    answers(replicas, 4)
    for replica in range(2):
        line = rf"DP{replica}[^\]]*\] sglang-dspark: mode compact, scheduled by"
        assert re.search(line, replicas.log)
    each = counted(page(replicas))
    assert each.keys() == {"0", "1"}
    assert all(replica.cut_by_confidence(tiny_models.GAMMA) for replica in each.values())


def test_one_replica_measures_and_the_other_reads(pool: ServerPool, replicas: Served) -> None:
    """At their first start, with nothing kept: both come to it at about the same time."""
    assert len(re.findall("sglang-dspark: measuring step times", replicas.log)) == 1
    assert len(re.findall("drafts of .* measured in .* kept in", replicas.log)) == 1
    assert len(re.findall("drafts of .* read from", replicas.log)) == 1
    kept = list((pool.folder / "replicas-cache" / "sglang-dspark" / "costs").glob("*.json"))
    assert [json.loads(file.read_text())["key"]["parallel"] for file in kept] == ["tp1 pp1 dp2 ep1"]

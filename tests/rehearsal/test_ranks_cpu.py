"""Two ranks of a CPU server, on its own side of the step: scheduled, and as one rank answers."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.integration import tiny_models
from tests.integration.serving import DSPARK_FLAGS, Served, ServerPool
from tests.rehearsal.conftest import SLOTS
from tests.rehearsal.test_graphs import PROMPTS, answers
from tests.rehearsal.test_overlap_steps import TOKENS
from tests.rehearsal.test_ranks import bound_cores

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("rehearsal")]

SAMPLED = {"temperature": 1.0, "ignore_eos": True}


def two_ranks(
    pool: ServerPool, pair: tiny_models.TinyPair, name: str, config_text: str
) -> Iterator[Served]:
    config = pool.folder / f"{name}.yaml"
    config.write_text(config_text)
    arguments = ("--max-running-requests", SLOTS, "--enable-metrics", "--tp-size", "2")
    yield pool.start(
        name,
        pair.target,
        *DSPARK_FLAGS,
        str(pair.drafter),
        *("--dspark-config", str(config), *arguments),
        XDG_CACHE_HOME=str(pool.folder / f"{name}-cache"),
        SGLANG_CPU_OMP_THREADS_BIND=bound_cores(),
    )
    pool.stop(name)


@pytest.fixture(scope="module")
def two(pool: ServerPool, pair: tiny_models.TinyPair) -> Iterator[Served]:
    """Lengths by confidence alone: whether drafting pays on this machine is not asked."""
    yield from two_ranks(pool, pair, "two-cpu", "schedule: {threshold: 0.5}\n")


@pytest.fixture(scope="module")
def two_static(pool: ServerPool, pair: tiny_models.TinyPair) -> Iterator[Served]:
    yield from two_ranks(pool, pair, "two-static", "schedule: {mode: static}\n")


@pytest.mark.parametrize("users", [1, 4, 12])
def test_greedy_answers_are_those_of_one_plain_rank(plain: Served, two: Served, users: int) -> None:
    assert answers(two, users) == answers(plain, users)


def test_sampled_requests_end_on_both_ranks(two: Served) -> None:
    """Ranks that drew tokens of their own would soon wait for passes of unlike size."""
    found = two.generate_all(PROMPTS, 4, max_new_tokens=TOKENS, sampling_params=SAMPLED)
    assert [len(answer["output_ids"]) for answer in found] == [TOKENS] * len(PROMPTS)


def test_the_first_rank_decides(two: Served) -> None:
    assert re.search(r"TP0\] sglang-dspark: mode compact, scheduled by a threshold", two.log)
    assert re.search(r"TP1\] sglang-dspark: acts on the plans of rank 0", two.log)
    metrics = two.request("GET", "/metrics").text
    verified = _counts(metrics, "admitted_drafts_total")
    accepted = _counts(metrics, "accepted_drafts_total")
    steps = _counts(metrics, "steps_total")
    assert 0 < accepted < verified < 5 * steps


def test_the_ranks_meet_on_loopback(two: Served) -> None:
    assert len(two.listens()) > 2
    assert {address for address, _ in two.listens()} == {"127.0.0.1"}


@pytest.mark.slow
@pytest.mark.parametrize("users", [1, 12])
def test_ranks_that_verify_all_answer_as_one_plain_rank(
    plain: Served, two_static: Served, users: int
) -> None:
    assert answers(two_static, users) == answers(plain, users)
    assert re.search(r"TP0\] sglang-dspark: mode static", two_static.log)
    sampled = two_static.generate_all(PROMPTS, 4, max_new_tokens=TOKENS, sampling_params=SAMPLED)
    assert [len(answer["output_ids"]) for answer in sampled] == [TOKENS] * len(PROMPTS)


def _counts(metrics: str, name: str) -> float:
    """A counter of ours, all of whose series are rank 0's."""
    found = re.findall(rf"^sglang:dspark_{name}\{{(.*?)\}} (\S+)", metrics, re.MULTILINE)
    assert found, name
    assert all('tp_rank="0"' in labels for labels, _ in found)
    return sum(float(count) for _, count in found)

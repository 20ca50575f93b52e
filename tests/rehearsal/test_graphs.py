"""CUDA's side of the step in captured graphs, under the overlap loop: tiers, accept, aliasing."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_dspark.serving.warm_up import batch_sizes
from tests.integration import tiny_models
from tests.integration.serving import Served, ServerPool
from tests.rehearsal.conftest import SLOTS, Rehearsed, start_rehearsed
from tests.rehearsal.on_cpu import TIER
from tests.rehearsal.test_overlap_steps import GREEDY, TOKENS
from tests.rehearsal.test_sampling_rules import PENALTIES, SEEDED, accepted, tokens
from tests.rehearsal.test_sampling_rules import answers as sampled

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("rehearsal")]

GRAPHS = (1, 2, 4, 8)  # requests; a larger batch runs eagerly
GREEDY_SAMPLING = {"max_new_tokens": TOKENS, "ignore_eos": True}
PROMPTS = [[5 + (7 * i + 3 * j) % 200 for j in range(3 + 4 * i)] for i in range(12)]


def start(
    pool: ServerPool, name: str, pair: tiny_models.TinyPair, *, warm_up: bool = False, **world: str
) -> Rehearsed:
    """Start a server whose passes are captured; a larger tier costs 8 ms more."""
    sizes = ["--cuda-graph-bs-decode", *(str(size) for size in GRAPHS)]
    world = {"DSPARK_REHEARSAL_STAIR": "8e-3", "DSPARK_REHEARSAL_GRAPHS": "1", **world}
    return start_rehearsed(pool, name, pair, *sizes, warm_up=warm_up, **world)


@pytest.fixture(scope="module")
def captured(pool: ServerPool, pair: tiny_models.TinyPair) -> Rehearsed:
    return start(pool, "captured", pair, warm_up=True)


@pytest.fixture(scope="module")
def made_up(captured: Rehearsed) -> int:
    """Count the passes of the warm-up: later ones are of users."""
    return len(captured.passes())


def answers(server: Served, users: int) -> list[list[int]]:
    return [each["output_ids"] for each in server.generate_all(PROMPTS, users, **GREEDY)]


def tier_of(tokens: int) -> int:
    """The smallest captured size that holds them."""
    return min(TIER * size for size in GRAPHS if TIER * size >= tokens)


def in_graphs(passes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [each for each in passes if each["pass"] <= GRAPHS[-1]]


def test_made_up_requests_come_first(captured: Rehearsed, made_up: int) -> None:
    """Each number of requests that a kernel may be compiled for has run before the first user's."""
    assert "warmed up with batches of 1 to 16 made-up requests" in captured.server.log
    passes = captured.passes()[:made_up]
    assert {each["pass"] for each in passes} >= set(batch_sizes(int(SLOTS)))
    assert {each["folded"] for each in in_graphs(passes)} == {True, False}, "greedy, sampled"


@pytest.mark.parametrize("users", [1, 4, 8])
def test_greedy_answers_are_the_plain_servers(
    plain: Served, captured: Rehearsed, users: int
) -> None:
    expected = answers(plain, users)
    before = len(captured.passes())
    assert answers(captured.server, users) == expected
    passes = captured.passes()[before:]
    emitted = sum(each["pass"] for each in passes)
    # Of several users' drafts, step times measured on a busy machine may stop the most.
    share = 0.8 if users == 1 else 1.0
    assert emitted < share * len(PROMPTS) * TOKENS, "too few drafts were accepted"


def test_passes_replay_the_tiers_that_hold_them(captured: Rehearsed, made_up: int) -> None:
    answers(captured.server, 4)
    passes = in_graphs(captured.passes()[made_up:])
    for each in passes:
        tier = tier_of(each["pass"] + each["verified"])
        assert each["tokens"] == tier
        assert each["replayed"] == [tier]
        assert each["folded"], "greedy requests are accepted inside the graph"
    assert len({each["tokens"] for each in passes}) >= 3
    partly = [each for each in passes if 0 < each["verified"] < (TIER - 1) * each["pass"]]
    assert partly, "windows must be ragged, or the layout is not tested"


def test_drafts_replay_graphs_by_requests(captured: Rehearsed, made_up: int) -> None:
    answers(captured.server, 4)
    passes = captured.passes()[made_up:]
    drafted = [each for each in in_graphs(passes) if each["verified"]]
    assert drafted
    for each in drafted:
        assert each["drafts_replayed"] == [min(size for size in GRAPHS if size >= each["pass"])]


def test_more_requests_than_any_graph_run_eagerly(plain: Served, captured: Rehearsed) -> None:
    together = {"input_ids": PROMPTS, "sampling_params": {"temperature": 0.0, **GREEDY_SAMPLING}}
    before = len(captured.passes())
    got = captured.server.request("POST", "/generate", json=together).json()
    expected = plain.request("POST", "/generate", json=together).json()
    assert [each["output_ids"] for each in got] == [each["output_ids"] for each in expected]
    large = [each for each in captured.passes()[before:] if each["pass"] > GRAPHS[-1]]
    assert large
    for each in large:
        assert each["tokens"] == each["pass"] + each["verified"]
        assert (each["replayed"], each["folded"]) == ([], False)


def test_sampled_requests_are_accepted_outside_the_graph(captured: Rehearsed) -> None:
    before = len(captured.passes())
    captured.server.generate(
        PROMPTS[0], TOKENS, sampling_params={"temperature": 1.0, "ignore_eos": True}
    )
    passes = captured.passes()[before:]
    assert passes
    assert all(each["replayed"] and not each["folded"] for each in passes)


def test_penalties_and_seeds_act_behind_the_graph(plain: Served, captured: Rehearsed) -> None:
    before = len(captured.passes())
    got = sampled(captured.server, PENALTIES, 4)
    assert tokens(got) == tokens(sampled(plain, PENALTIES, 4))
    seeded = sampled(captured.server, SEEDED, 4, seeds=77)
    assert tokens(seeded) == tokens(sampled(plain, SEEDED, 4, seeds=77))
    assert accepted(got) > TOKENS
    assert accepted(seeded) > TOKENS
    passes = captured.passes()[before:]
    assert all(each["replayed"] for each in passes)
    assert sum(not each["folded"] for each in passes) > TOKENS


@pytest.mark.slow
def test_a_step_without_drafts_stays_in_the_graph(
    plain: Served, pool: ServerPool, pair: tiny_models.TinyPair
) -> None:
    slow = start(pool, "captured-slow", pair, DSPARK_REHEARSAL_DRAFT="0.2")
    assert answers(slow.server, 4) == answers(plain, 4)
    skipped = [each for each in slow.passes() if not each["verified"]]
    assert len(skipped) > TOKENS
    for each in skipped:
        assert (each["replayed"], each["folded"]) == ([tier_of(each["pass"])], True)
        assert each["drafts_replayed"] == []


@pytest.mark.slow
def test_a_result_that_is_not_copied_changes_the_text(
    plain: Served, pool: ServerPool, pair: tiny_models.TinyPair
) -> None:
    """The comparison with the plain server can fail: a step's outputs are the next one's too."""
    aliased = start(pool, "captured-aliased", pair, DSPARK_REHEARSAL_ALIAS="tokens")
    assert answers(aliased.server, 4) != answers(plain, 4)

"""The screen's comparison: what differs is found, and only a near tie explains it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from sglang_dspark.errors import DSparkError
from sglang_dspark.loadtest.bench import screen
from sglang_dspark.loadtest.bench.copy_tasks import ASKED, KINDS, copy_tasks
from sglang_dspark.loadtest.bench.screen import (
    NEAR_TIE,
    WAVE,
    Answered,
    Coverage,
    Journal,
    Plan,
    WaveAnswers,
    as_metrics,
    compare,
    explain,
    kept_runs,
)
from sglang_dspark.loadtest.results import write_document

TASKS = 2 * WAVE + 30


@pytest.fixture
def plan() -> Plan:
    return Plan.of(copy_tasks(TASKS, 16, seed=3), users=8, seed=3)


def answers(plan: Plan) -> list[WaveAnswers]:
    """Build possible answers of a server, each different from the others."""
    return [
        WaveAnswers(
            tuple(
                Answered(tuple(range(i, i + task.tokens)), "length", 300 + i, 100 * (i % 2), 5, 3)
                for i, task in enumerate(wave.tasks)
            ),
            retracted=2,
        )
        for wave in plan.waves
    ]


def exchanged(waves: list[WaveAnswers], wave: int, index: int, **fields: Any) -> list[WaveAnswers]:
    """The same with one answer changed."""
    changed = list(waves[wave].answers)
    changed[index] = replace(changed[index], **fields)
    return [*waves[:wave], replace(waves[wave], answers=tuple(changed)), *waves[wave + 1 :]]


def test_tasks_are_of_all_kinds_and_share_prefixes() -> None:
    tasks = copy_tasks(600, 24, seed=1)
    assert len(tasks) == 600
    assert {task.kind for task in tasks} == set(KINDS)
    assert copy_tasks(600, 24, seed=1) == tasks != copy_tasks(600, 24, seed=2)
    lists = {task.prompt.rsplit("\n\n", 1)[0] for task in tasks}
    assert len(lists) <= 600 / ASKED + 1
    assert len({task.prompt for task in tasks}) < 600 * 0.97, "nothing was asked again"
    assert min(task.tokens for task in tasks) == 4
    assert max(task.tokens for task in tasks) == 24
    for task in tasks[:50]:
        lines = [line.split(": ", 1)[1] for line in task.prompt.split("\n\n")[0].splitlines()]
        assert len({len(line) for line in lines}) == 1, "lines of a list are each other's likes"
        assert len(set(lines)) > 1
    with pytest.raises(DSparkError, match="a screen needs"):
        copy_tasks(0, 24, seed=1)


def test_waves_are_of_all_kinds(plan: Plan) -> None:
    assert plan.requests == TASKS
    assert [len(wave.tasks) for wave in plan.waves] == [WAVE, WAVE, 30]
    assert len({(wave.users, wave.gap_s > 0) for wave in plan.waves}) == 3
    longer = Plan.of(copy_tasks(8 * WAVE, 16, seed=3), 8, 3)
    assert {wave.cold for wave in longer.waves} == {True, False}


def test_equal_answers_have_no_difference(plan: Plan) -> None:
    assert compare(plan, answers(plan), answers(plan)) == []


@pytest.mark.parametrize(
    ("fields", "position", "dspark"),
    [
        ({"ids": (4, 5, 999, 7)}, 2, 999),
        ({"ids": (4, 5)}, 2, None),
        ({"finish": "stop"}, 4, None),
    ],
)
def test_one_answer_among_all_is_found(
    plan: Plan, fields: dict[str, Any], position: int, dspark: int | None
) -> None:
    plain = exchanged(answers(plan), 1, 4, ids=(4, 5, 6, 7))
    ours = exchanged(plain, 1, 4, **fields)
    (found,) = compare(plan, plain, ours)
    assert (found.wave, found.index, found.kind) == (1, 4, plan.waves[1].tasks[4].kind)
    assert (found.position, found.dspark, found.explained) == (position, dspark, False)
    assert found.plain == ((4, 5, 6, 7)[position] if position < 4 else None)
    assert "UNEXPLAINED" in str(found)


class LogprobServer:
    """A server's log-probabilities: token 6 is the likeliest, or one that neither answer has."""

    def __init__(self, logprobs: dict[int, float], top: float):
        self.logprobs, self.top = logprobs, top
        self.asked: list[dict[str, Any]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        body = screen.json.loads(request.content)
        if request.url.path == "/tokenize":
            return httpx.Response(200, json={"tokens": [50, 51]})
        self.asked.append(body)
        rows = [[self.logprobs[token], token, None] for token in body["token_ids_logprob"]]
        meta = {
            "prompt_tokens": 4,
            "finish_reason": {"type": "length"},
            "output_token_ids_logprobs": [rows],
            "output_top_logprobs": [[[self.top, 1, None]]],
        }
        return httpx.Response(200, json={"text": "x", "output_ids": [6], "meta_info": meta})


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> LogprobServer:
    server = LogprobServer({}, 0.0)
    whole = httpx.AsyncClient.__init__

    def planted(client: httpx.AsyncClient, **options: Any) -> None:
        whole(client, transport=httpx.MockTransport(server), **options)

    monkeypatch.setattr(httpx.AsyncClient, "__init__", planted)
    return server


@pytest.mark.parametrize(
    ("theirs", "ours", "top", "explained"),
    [
        (-1.0, -1.0 - NEAR_TIE / 2, -1.0, True),
        (-1.0 - NEAR_TIE / 2, -1.0, -1.0, True),  # rounding took the other one this time
        (-1.0, -1.0 - 2 * NEAR_TIE, -1.0, False),
        (-3.0, -3.0, -1.0, False),  # a tie of two tokens that greedy decoding takes neither of
    ],
)
def test_a_near_tie_alone_explains(
    plan: Plan, told: LogprobServer, theirs: float, ours: float, top: float, explained: bool
) -> None:
    told.logprobs, told.top = {6: theirs, 999: ours}, top
    plain = exchanged(answers(plan), 0, 7, ids=(4, 5, 6, 7))
    found = compare(plan, plain, exchanged(plain, 0, 7, ids=(4, 5, 999, 7)))
    (one,) = asyncio.run(explain("http://nowhere", plan, plain, found, NEAR_TIE))
    assert told.asked[0]["input_ids"] == [50, 51, 4, 5]  # the prompt and what both have said
    assert one.gap == pytest.approx(theirs - ours)
    assert one.explained is explained


def test_an_answer_that_ends_early_is_never_explained(plan: Plan, told: LogprobServer) -> None:
    plain = exchanged(answers(plan), 0, 7, ids=(4, 5, 6, 7))
    found = compare(plan, plain, exchanged(plain, 0, 7, ids=(4, 5)))
    assert asyncio.run(explain("http://nowhere", plan, plain, found, NEAR_TIE)) == found
    assert told.asked == []


def test_what_was_not_met_is_said(plan: Plan) -> None:
    waves = answers(plan)
    whole = Coverage.of(plan, waves, chunk=256)
    assert whole.missing() == []
    assert (whole.retracted, whole.cold) == (6, 3)
    assert whole.cached == sum(i % 2 for wave in plan.waves for i in range(len(wave.tasks)))
    assert whole.chunked < whole.requests  # a cached prefix is not prefilled
    bare = [
        WaveAnswers(
            tuple(replace(a, cached=0, accepted=0, prompt_tokens=9) for a in wave.answers), 0
        )
        for wave in waves
    ]
    missing = Coverage.of(plan, bare, chunk=256).missing()
    assert len(missing) == 4
    assert "no request was retracted" in missing


def test_a_journal_goes_on_and_knows_its_plan(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "dspark.jsonl"
    head = {"plan": plan.fingerprint()}
    journal = Journal(path, head)
    for wave in answers(plan)[:2]:
        journal.add(wave)
    assert Journal(path, head).waves == answers(plan)[:2]
    other = Plan.of(copy_tasks(TASKS, 16, seed=4), users=8, seed=3)
    with pytest.raises(DSparkError, match="another plan"):
        Journal(path, {"plan": other.fingerprint()})
    path.write_text(path.read_text() + '{"answers": 3}\n')
    with pytest.raises(DSparkError, match="no journal"):
        Journal(path, head)


def test_figures_and_runs_of_other_names(plan: Plan, tmp_path: Path) -> None:
    plain = exchanged(answers(plan), 1, 4, ids=(4, 5, 6, 7))
    found = compare(plan, plain, exchanged(plain, 1, 4, ids=(4, 5, 999, 7)))
    cover = Coverage.of(plan, plain, 256)
    metrics = as_metrics(found, cover, cover, NEAR_TIE, plan)
    assert (metrics["requests"], metrics["unexplained"], metrics["near_ties"]) == (TASKS, 1, 0)
    assert sum(metrics["kinds"].values()) == TASKS
    assert metrics["found"][0]["dspark"] == 999
    assert kept_runs(tmp_path / "absent.json") == {}
    write_document(tmp_path / "screen.json", {"metrics": {"runs": {"tiny": metrics}}})
    assert kept_runs(tmp_path / "screen.json")["tiny"]["requests"] == TASKS
    write_document(tmp_path / "other.json", {"metrics": {}})
    with pytest.raises(DSparkError, match="screen's result"):
        kept_runs(tmp_path / "other.json")

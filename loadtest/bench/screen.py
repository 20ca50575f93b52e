"""The corruption screen: greedy copies by a server that drafts, token for token the plain one's.

What corrupts a speculating server is not the plain case but its edges, so the tasks
(`copy_tasks`) come in waves: closed loops, bursts and arrivals one by one; cold caches and warm
ones; prompts longer than a chunk of the prefill; a KV pool that is too small for those at once, so
that requests are retracted. Each server answers all waves, one server after the other. What
`Coverage` lacks did not happen, and was not screened.

A difference is *explained* by a near tie alone: sums of floating-point numbers depend on how many
rows a product has, so two tokens closer than that noise may swap. The plain server is asked for
its log-probabilities behind the prefix that both share; if both tokens lie less than `near_tie`
below its likeliest one, they do. Behind a difference the two texts go their own ways.

Answers are kept in a journal for each server, so that a run that was cut off goes on where it was.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from sglang_dspark.common.files import load_json, reading
from sglang_dspark.errors import DSparkError
from sglang_dspark.loadtest.bench.copy_tasks import Task
from sglang_dspark.loadtest.bench.journal import Head, keep_row, open_journal
from sglang_dspark.loadtest.client.client import Sampling, SGLangClient
from sglang_dspark.loadtest.client.metrics import Completion

WAVE = 96  # requests of a wave
NEAR_TIE = 1e-3  # nats; float32's noise on the models here is below 1e-4
_RETRACTED = "sglang:num_retracted_requests_total"
_MEAN_GAP_S = 0.02


@dataclass(frozen=True)
class Wave:
    """Tasks that are sent together. users: at once at most; gap_s: mean time between arrivals, 0
    where all are there at once; cold: the prefix cache is emptied before."""

    tasks: tuple[Task, ...]
    users: int
    gap_s: float
    cold: bool


@dataclass(frozen=True)
class Plan:
    """List the waves that both servers get. seed: of arrival times."""

    waves: tuple[Wave, ...]
    seed: int

    @classmethod
    def of(cls, tasks: Sequence[Task], users: int, seed: int) -> Plan:
        """Waves of the tasks: a closed loop of `users`, a burst, arrivals one by one, in turn; a
        quarter of them meets the cache as the wave before has left it."""
        if users < 1 or not tasks:
            raise DSparkError("a screen needs a user at least, and a task")
        kinds = ((users, 0.0), (WAVE, 0.0), (WAVE, _MEAN_GAP_S))
        waves = []
        for number, first in enumerate(range(0, len(tasks), WAVE)):
            at_once, gap_s = kinds[number % len(kinds)]
            own = tuple(tasks[first : first + WAVE])
            waves.append(Wave(own, at_once, gap_s, cold=number % 4 != 3))
        return cls(tuple(waves), seed)

    @property
    def requests(self) -> int:
        """Of all waves."""
        return sum(len(wave.tasks) for wave in self.waves)

    def fingerprint(self) -> str:
        """Of everything that is asked."""
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Answered:
    """An answer. ids: its tokens; cached: prompt tokens found in the prefix cache; steps,
    accepted: verify steps and accepted drafts, 0 without speculation."""

    ids: tuple[int, ...]
    finish: str
    prompt_tokens: int
    cached: int
    steps: int
    accepted: int

    @classmethod
    def of(cls, done: Completion) -> Answered:
        """From what `/generate` says."""
        spec = done.spec
        return cls(
            ids=done.ids,
            finish=done.finish_reason,
            prompt_tokens=done.prompt_tokens,
            cached=int(done.meta.get("cached_tokens") or 0),
            steps=spec.steps if spec else 0,
            accepted=spec.accepted if spec else 0,
        )


@dataclass(frozen=True)
class WaveAnswers:
    """answers: in the order of the wave's tasks; retracted: requests that the server's own counter
    says were retracted meanwhile."""

    answers: tuple[Answered, ...]
    retracted: int


class Journal:
    """A server's answers, a JSON line a wave (`journal.py`)."""

    def __init__(self, path: Path, head: Head) -> None:
        """Read what is there, or begin. Raises DSparkError for a journal with another head."""
        self.path = path
        self.waves = open_journal(path, head, _wave_answers)

    def add(self, wave: WaveAnswers) -> None:
        """Keep a wave's answers."""
        self.waves.append(wave)
        keep_row(self.path, asdict(wave))


@dataclass(frozen=True)
class Difference:
    """The first token that differs. position: in the answer; plain, dspark: token ids, None where
    an answer has ended; gap: how much more likely, in nats, the plain server finds its own token;
    below: by how much the less likely of the two lies below the likeliest token."""

    wave: int
    index: int
    kind: str
    position: int
    plain: int | None
    dspark: int | None
    gap: float | None = None
    below: float | None = None
    explained: bool = False

    def __str__(self) -> str:
        gap = "no gap" if self.gap is None else f"logits {self.gap:.2e} apart"
        why = "near tie" if self.explained else "UNEXPLAINED"
        return (
            f"wave {self.wave}, request {self.index} ({self.kind}), token {self.position}: plain "
            f"{self.plain}, DSPARK {self.dspark}, {gap}: {why}"
        )


@dataclass(frozen=True)
class Coverage:
    """Count the features that one server's requests used. chunked: prompts prefilled in several
    chunks; cached: requests that found a prefix; retracted: by SGLang's counter; cold: waves
    that began with an empty cache; steps, accepted: verify steps and accepted drafts."""

    requests: int
    tokens: int
    chunked: int
    cached: int
    retracted: int
    cold: int
    steps: int
    accepted: int

    @classmethod
    def of(cls, plan: Plan, waves: Sequence[WaveAnswers], chunk: int) -> Coverage:
        """chunk: most prompt tokens that a server prefills in one pass."""
        answers = [answer for wave in waves for answer in wave.answers]
        return cls(
            requests=len(answers),
            tokens=sum(len(answer.ids) for answer in answers),
            chunked=sum(each.prompt_tokens - each.cached > chunk for each in answers),
            cached=sum(each.cached > 0 for each in answers),
            retracted=sum(wave.retracted for wave in waves),
            cold=sum(wave.cold for wave in plan.waves),
            steps=sum(each.steps for each in answers),
            accepted=sum(each.accepted for each in answers),
        )

    def missing(self) -> list[str]:
        """List the features that should have been screened and were not used."""
        wanted = {
            "no prompt was prefilled in chunks": self.chunked,
            "no request found its prefix in the cache": self.cached,
            "no request was retracted": self.retracted,
            "no wave began with a cold cache": self.cold,
            "no draft was accepted": self.accepted,
        }
        return [text for text, count in wanted.items() if not count]


async def answer(url: str, plan: Plan, journal: Journal, on_wave: Callable[[int], None]) -> None:
    """Have a running server answer the waves that the journal lacks.

    on_wave: called with the number of requests answered so far. Raises DSparkError when the server
    fails a request.
    """
    async with SGLangClient(url) as client:
        for number in range(len(journal.waves), len(plan.waves)):
            wave = plan.waves[number]
            if wave.cold:
                await client.flush_cache()
            before = await _retracted(url)
            answers = await _answers(client, wave, plan.seed + number)
            journal.add(WaveAnswers(answers, await _retracted(url) - before))
            on_wave(sum(len(done.answers) for done in journal.waves))


def compare(
    plan: Plan, plain: Sequence[WaveAnswers], dspark: Sequence[WaveAnswers]
) -> list[Difference]:
    """Every request whose answers differ, in tokens, length or why it ended."""
    found = []
    for number, (wave, ours, theirs) in enumerate(zip(plan.waves, dspark, plain, strict=True)):
        rows = zip(wave.tasks, ours.answers, theirs.answers, strict=True)
        for index, (task, own, other) in enumerate(rows):
            at = _first_difference(own, other)
            if at is not None:
                tokens = _at(other.ids, at), _at(own.ids, at)
                found.append(Difference(number, index, task.kind, at, *tokens))
    return found


async def explain(
    url: str,
    plan: Plan,
    plain: Sequence[WaveAnswers],
    differences: Iterable[Difference],
    near_tie: float,
) -> list[Difference]:
    """The differences with the plain server's gap between the two tokens, and whether that
    explains them. url: of the plain server."""
    async with SGLangClient(url) as client:
        return [await _explained(client, plan, plain, each, near_tie) for each in differences]


def as_metrics(
    differences: Sequence[Difference],
    plain: Coverage,
    dspark: Coverage,
    near_tie: float,
    plan: Plan,
) -> dict[str, Any]:
    """JSON-ready: counts, every difference, and what of the edges was met."""
    kinds = Counter(task.kind for wave in plan.waves for task in wave.tasks)
    return {
        "requests": dspark.requests,
        "tokens": dspark.tokens,
        "differences": len(differences),
        "near_ties": sum(each.explained for each in differences),
        "unexplained": sum(not each.explained for each in differences),
        "near_tie_nats": near_tie,
        "tau": 1 + dspark.accepted / dspark.steps if dspark.steps else None,
        "kinds": dict(sorted(kinds.items())),
        "dspark": asdict(dspark),
        "plain": asdict(plain),
        "not_met": dspark.missing(),
        "found": [asdict(each) for each in differences],
    }


async def _answers(client: SGLangClient, wave: Wave, seed: int) -> tuple[Answered, ...]:
    arrivals = np.cumsum(np.random.default_rng(seed).exponential(wave.gap_s, len(wave.tasks)))
    limit = asyncio.Semaphore(wave.users)

    async def one(task: Task, at: float) -> Answered:
        await asyncio.sleep(at)
        async with limit:
            return Answered.of(
                await client.generate(task.prompt, Sampling(task.tokens), stream=False)
            )

    try:
        async with asyncio.TaskGroup() as group:
            asked = [
                group.create_task(one(task, float(at)))
                for task, at in zip(wave.tasks, arrivals, strict=True)
            ]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None  # the first failure ended the others
    return tuple(each.result() for each in asked)


async def _retracted(url: str) -> int:
    """Requests retracted since the server's start, by SGLang's counter; all ranks together."""
    async with httpx.AsyncClient(trust_env=False, timeout=60.0) as http:
        try:
            page = await http.get(f"{url}/metrics")
        except httpx.TransportError as error:
            raise DSparkError(f"cannot read {url}/metrics ({error}); see its log") from error
    if page.status_code != 200:
        raise DSparkError(f"{url}/metrics answers {page.status_code}; use --enable-metrics")
    lines = [line for line in page.text.splitlines() if line.startswith(_RETRACTED)]
    return sum(int(float(line.rsplit(" ", 1)[1])) for line in lines)


async def _explained(
    client: SGLangClient,
    plan: Plan,
    plain: Sequence[WaveAnswers],
    difference: Difference,
    near_tie: float,
) -> Difference:
    if difference.plain is None or difference.dspark is None:
        return difference  # one ended where the other went on: no two tokens to compare
    task = plan.waves[difference.wave].tasks[difference.index]
    shared = plain[difference.wave].answers[difference.index].ids[: difference.position]
    prompt = await client.tokenize(task.prompt)
    done = await client.generate(
        [*prompt, *shared],
        Sampling(1),
        stream=False,
        return_logprob=True,
        token_ids_logprob=[difference.plain, difference.dspark],
        top_logprobs_num=1,
    )
    (row,), (top,) = (
        done.meta["output_token_ids_logprobs"],
        done.meta["output_top_logprobs"],
    )
    by_token = {token: logprob for logprob, token, *_ in row}
    theirs, ours = by_token[difference.plain], by_token[difference.dspark]
    below = top[0][0] - min(theirs, ours)
    return replace(difference, gap=theirs - ours, below=below, explained=below < near_tie)


def _wave_answers(row: dict[str, Any]) -> WaveAnswers:
    answers = [Answered(**{**each, "ids": tuple(each["ids"])}) for each in row["answers"]]
    return WaveAnswers(tuple(answers), row["retracted"])


def _first_difference(a: Answered, b: Answered) -> int | None:
    for at, (x, y) in enumerate(zip(a.ids, b.ids, strict=False)):
        if x != y:
            return at
    same = len(a.ids) == len(b.ids) and a.finish == b.finish
    return None if same else min(len(a.ids), len(b.ids))


def _at(ids: Sequence[int], position: int) -> int | None:
    return ids[position] if position < len(ids) else None


def kept_runs(path: Path) -> dict[str, Any]:
    """The runs of a result file that is there, by name; none where it is not.

    Raises DSparkError when the file is no result of a screen.
    """
    if not path.is_file():
        return {}
    with reading(path, "screen's result", "name another --json file"):
        runs = load_json(path)["metrics"]["runs"]
        return {str(name): dict(run) for name, run in runs.items()}

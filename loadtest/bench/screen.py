"""The corruption screen: compare a DSPARK server's greedy copies with the plain server's tokens.

Speculation corrupts answers in edge cases, not in the common case. The tasks (`copy_tasks`) are
therefore sent in waves: closed loops, bursts and single arrivals; cold and warm caches; prompts
longer than a prefill chunk; a KV pool too small for those at once, so that requests are retracted.
Each server answers all waves, one server after the other. A feature that `Coverage` lacks did not
occur, and was not screened.

Only a near tie *explains* a difference: floating-point sums depend on the number of rows of a
product, so two tokens closer than that noise may swap. The plain server returns its
log-probabilities after the prefix that both answers share. The tokens are a near tie if both are
less than `near_tie` below the most likely token. After a difference the two texts diverge.

Answers are saved in a journal for each server, so that an interrupted run can be resumed.
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
    if all arrive at once; cold: the prefix cache is emptied before."""

    tasks: tuple[Task, ...]
    users: int
    gap_s: float
    cold: bool


@dataclass(frozen=True)
class Plan:
    """The waves that both servers get. seed: of arrival times."""

    waves: tuple[Wave, ...]
    seed: int

    @classmethod
    def of(cls, tasks: Sequence[Task], users: int, seed: int) -> Plan:
        """Split the tasks into waves: in turn a closed loop of `users`, a burst, single arrivals.

        A quarter of the waves keeps the cache of the wave before.
        """
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
        """Count the requests of all waves."""
        return sum(len(wave.tasks) for wave in self.waves)

    def fingerprint(self) -> str:
        """Hash the waves and the seed."""
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
        """Convert an answer of `/generate`."""
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
    """answers: in the order of the wave's tasks; retracted: requests retracted meanwhile, by the
    server's own counter."""

    answers: tuple[Answered, ...]
    retracted: int


class Journal:
    """A server's answers, a JSON line a wave (`journal.py`)."""

    def __init__(self, path: Path, head: Head) -> None:
        """Read or create the journal. Raises DSparkError for a journal with another head."""
        self.path = path
        self.waves = open_journal(path, head, _wave_answers)

    def add(self, wave: WaveAnswers) -> None:
        """Save a wave's answers."""
        self.waves.append(wave)
        keep_row(self.path, asdict(wave))


@dataclass(frozen=True)
class Difference:
    """The first token that differs. position: in the answer; plain, dspark: token ids, None if the
    answer has ended; gap: how much more likely, in nats, the plain token is to the plain server;
    below: distance, in nats, of the less likely of the two from the most likely token."""

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
    """Counts of features that one server's requests used. chunked: prompts prefilled in several
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
        """Count the features. chunk: most prompt tokens that a server prefills in one pass."""
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
    """Send a running server the waves that the journal lacks, and save its answers.

    on_wave: called with the number of requests answered so far. Raises DSparkError if the server
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
    """List every request whose answers differ in tokens, length or finish reason."""
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
    """Add to each difference the plain server's gap, and whether a near tie explains it.

    url: of the plain server.
    """
    async with SGLangClient(url) as client:
        return [await _explained(client, plan, plain, each, near_tie) for each in differences]


def as_metrics(
    differences: Sequence[Difference],
    plain: Coverage,
    dspark: Coverage,
    near_tie: float,
    plan: Plan,
) -> dict[str, Any]:
    """Build the JSON-ready metrics: counts, every difference, and the missing edge cases."""
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
    """Count the requests retracted since the server's start, by SGLang's counter, of all ranks."""
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
        return difference  # one answer ended earlier: no two tokens to compare
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
    """Read the runs of a result file, by name; empty if the file is missing.

    Raises DSparkError if the file is not a screen's result.
    """
    if not path.is_file():
        return {}
    with reading(path, "screen's result", "name another --json file"):
        runs = load_json(path)["metrics"]["runs"]
        return {str(name): dict(run) for name, run in runs.items()}

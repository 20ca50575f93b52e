"""Measure DSPARK against plain decoding in pairs: `dspark bench serve`.

Both servers are up the whole time and exactly one may run: the other is frozen (SIGSTOP), because
an idle SGLang scheduler polls and would use CPU time that the measured one needs. A repeat
measures each of them once, next to each other, at every concurrency, in alternating order.
Before each round the prefix cache is emptied and one request is discarded. Throughput counts while
all users are busy; the time of a whole round, drain included, is reported next to it (`load`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_dspark.errors import DSparkError
from sglang_dspark.intervals import paired_ratio
from sglang_dspark.loadtest.client.client import Sampling, SGLangClient
from sglang_dspark.loadtest.client.load import Round, closed_loop
from sglang_dspark.loadtest.client.metrics import (
    Completion,
    SpecStats,
    median,
    per_user_speed,
    step_ms,
)
from sglang_dspark.loadtest.servers.server import ServerProcess

_WARM_UP = Sampling(max_new_tokens=8)
_GOLDEN = (5**0.5 - 1) / 2  # any number of its multiples, modulo 1, is spread evenly


@dataclass(frozen=True)
class Plan:
    """Describe the measurement: rendered prompts or token ids, concurrencies, repeats, length of
    an answer. spread: share of it by which lengths differ, up and down; 0: all are equal, and plain
    decoding ends all of a round's requests in the same step."""

    prompts: tuple[str | tuple[int, ...], ...]
    concurrency: tuple[int, ...]
    repeats: int
    max_new_tokens: int
    spread: float = 0.0

    def __post_init__(self) -> None:
        if not self.concurrency or min(self.concurrency) < 1:
            raise DSparkError("concurrency must be a list of positive numbers, such as 1,4,8")
        if self.repeats < 1:
            raise DSparkError(f"repeats must be at least 1, got {self.repeats}")

    def batch(self, users: int) -> list[str | tuple[int, ...]]:
        """Return the prompts of one round, from the top: a dozen, or three per user if more."""
        count = max(12, 3 * users)
        return [self.prompts[i % len(self.prompts)] for i in range(count)]

    def lengths(self, users: int) -> list[int]:
        """Return the tokens of each answer of `batch`: evenly spread, in a fixed mixed order."""
        places = [(i * _GOLDEN) % 1.0 for i in range(len(self.batch(users)))]
        return [round(self.max_new_tokens * (1 + self.spread * (2 * at - 1))) for at in places]

    @property
    def rounds(self) -> int:
        """Count the rounds of the run."""
        return 2 * self.repeats * len(self.concurrency)


@dataclass(frozen=True)
class PairedRound:
    """The same prompts at the same concurrency on both servers, one after the other."""

    plain: Round
    dspark: Round


async def measure(
    plain: ServerProcess,
    dspark: ServerProcess,
    plan: Plan,
    on_round: Callable[[str, Round], None],
) -> dict[int, list[PairedRound]]:
    """Measure all rounds, by concurrency; both servers must be ready and running.

    on_round: called after each round with the server's name. Raises DSparkError if a server
    fails a request.
    """
    servers = {"plain": plain, "dspark": dspark}
    for server in servers.values():
        server.pause()
    results: dict[int, list[PairedRound]] = {users: [] for users in plan.concurrency}
    for repeat in range(plan.repeats):
        for number, users in enumerate(plan.concurrency):
            order = list(servers) if (repeat + number) % 2 == 0 else list(servers)[::-1]
            rounds: dict[str, Round] = {}
            for name in order:
                rounds[name] = await _round(servers[name], plan, users)
                on_round(name, rounds[name])
            results[users].append(PairedRound(rounds["plain"], rounds["dspark"]))
    return results


async def _round(server: ServerProcess, plan: Plan, users: int) -> Round:
    server.resume()
    try:
        return await fresh_round(server.spec.url, plan, users)
    finally:
        server.pause()


async def fresh_round(
    url: str, plan: Plan, users: int, settings: Mapping[str, Any] | None = None
) -> Round:
    """Run one round on a running server, its prefix cache emptied and a request discarded before.

    settings: sampling settings of every request (`temperature`, `top_k`, ...); None: greedy.
    Raises DSparkError if the server fails a request.
    """
    async with SGLangClient(url) as client:
        await client.complete(plan.prompts[-1], _WARM_UP)
        await client.flush_cache()
        requests = [
            (prompt, Sampling(length, extra=settings or {}))
            for prompt, length in zip(plan.batch(users), plan.lengths(users), strict=True)
        ]
        return await closed_loop(client, requests, users)


def as_metrics(results: dict[int, list[PairedRound]], plan: Plan, gamma: int) -> dict[str, Any]:
    """Build JSON-ready metrics: medians over repeats, geometric mean ratios with intervals.

    Every repeat's own figures are included, so that the ratios can be recomputed (`republish`).
    """
    rows = [_row(users, pairs) for users, pairs in results.items()]
    metrics: dict[str, Any] = {
        "gamma": gamma,
        "by_concurrency": rows,
        "repeats": plan.repeats,
        "max_new_tokens": plan.max_new_tokens,
        "method": (
            "both servers up, the idle one frozen (SIGSTOP); rounds alternate; tokens/s while all "
            "users are busy, whole_round from the first request to the last answer"
        ),
    }
    if 1 in results:
        alone = next(row for row in rows if row["concurrency"] == 1)
        metrics = {
            "speedup_vs_plain_c1": alone["speedup"],
            "tau_demo": alone["tau"],
            "step": step_cost(
                [step_ms(pair.dspark.completions) for pair in results[1]],
                [step_ms(pair.plain.completions) for pair in results[1]],
            ),
            **metrics,
        }
    return metrics


def _row(users: int, pairs: Sequence[PairedRound]) -> dict[str, Any]:
    repeats = {
        "plain": [pair.plain.tokens_per_s for pair in pairs],
        "dspark": [pair.dspark.tokens_per_s for pair in pairs],
        "plain_whole": [pair.plain.whole_tokens_per_s for pair in pairs],
        "dspark_whole": [pair.dspark.whole_tokens_per_s for pair in pairs],
    }
    ours = [done for pair in pairs for done in pair.dspark.completions]
    theirs = [done for pair in pairs for done in pair.plain.completions]
    equal = sum(a.ids == b.ids for a, b in zip(ours, theirs, strict=True))
    return {
        "concurrency": users,
        "plain": median(repeats["plain"]),
        "dspark": median(repeats["dspark"]),
        **speedups(repeats),
        "plain_per_user": median([per_user_speed(p.plain.completions) for p in pairs]),
        "dspark_per_user": median([per_user_speed(p.dspark.completions) for p in pairs]),
        "plain_ttft_ms": 1e3 * median([done.ttft for done in theirs]),
        "dspark_ttft_ms": 1e3 * median([done.ttft for done in ours]),
        "tau": _tau(ours),
        "identical": [equal, len(ours)],
        "repeats": repeats,
    }


def speedups(repeats: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Compute the paired ratios of a row; intervals are null with fewer than three repeats.

    repeats: tokens/s of each server as in the row, while all users are busy and, in newer files,
    over whole rounds (`*_whole`).
    """
    found: dict[str, Any] = {}
    for name, suffix in (("speedup", ""), ("whole_round_speedup", "_whole")):
        if f"dspark{suffix}" in repeats:
            ratio = paired_ratio(repeats[f"dspark{suffix}"], repeats[f"plain{suffix}"])
            found |= {name: ratio.mid, f"{name}_ci95": ratio.bounds, "interval": ratio.method}
    return found


def step_cost(verify_ms: Sequence[float], plain_decode_ms: Sequence[float]) -> dict[str, Any]:
    """Compare ms of a verify and a plain step at one user, first token excluded, by repeat."""
    ratio = paired_ratio(verify_ms, plain_decode_ms)
    return {
        "verify_ms": median(verify_ms),
        "plain_decode_ms": median(plain_decode_ms),
        "ratio": ratio.mid,
        "ratio_ci95": ratio.bounds,
        "interval": ratio.method,
        "repeats": {"verify_ms": list(verify_ms), "plain_decode_ms": list(plain_decode_ms)},
    }


def _tau(completions: Sequence[Completion]) -> float:
    return SpecStats.total(done.spec for done in completions if done.spec is not None).tau

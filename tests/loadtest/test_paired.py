"""The paired measurement: closed-loop rounds on a real HTTP server, figures worked out by hand."""

from __future__ import annotations

import asyncio
import json
import math
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sglang_dspark.errors import DSparkError
from sglang_dspark.intervals import METHOD, paired_ratio
from sglang_dspark.loadtest.bench import paired
from sglang_dspark.loadtest.bench.paired import (
    PairedRound,
    Plan,
    as_metrics,
    measure,
    speedups,
    step_cost,
)
from sglang_dspark.loadtest.client.client import Sampling, SGLangClient
from sglang_dspark.loadtest.client.load import Answer, Round, closed_loop
from sglang_dspark.loadtest.client.metrics import Chunk, Completion, SpecStats
from sglang_dspark.loadtest.servers.server import ServerProcess, ServerSpec
from tests.loadtest.small_server import FIRST_S, STEP_S
from tests.ports import free_ports

MODULE = "tests.loadtest.small_server"
REQUEST_S = FIRST_S + 3 * STEP_S
SPEC = SpecStats(steps=2, accepted=2, histogram=(0, 2))


def started(name: str, run_dir: Path) -> ServerProcess:
    environment = {"PYTHONPATH": str(Path(__file__).parents[2])}
    spec = ServerSpec(name, Path("m"), free_ports(), environment=environment, module=MODULE)
    return ServerProcess(spec, run_dir).start()


def test_closed_loop_keeps_the_number_of_users(tmp_path: Path) -> None:
    async def run(url: str, users: int, *prompts: str) -> Round:
        async with SGLangClient(url) as client:
            return await closed_loop(client, [(each, Sampling()) for each in prompts], users)

    with started("small", tmp_path) as server:
        server.wait_ready(30)
        alone = asyncio.run(run(server.spec.url, 1, *"abcd"))
        # the quickest of three: another process may hold the machine up for a moment
        rounds = [asyncio.run(run(server.spec.url, 2, *"abcd")) for _ in range(3)]
        pairs = min(rounds, key=lambda r: r.seconds)
        with pytest.raises(DSparkError, match="refused /v1/completions"):
            asyncio.run(run(server.spec.url, 2, "a", "refuse me", "b"))
    assert len(alone.completions) == len(pairs.completions) == 4
    assert alone.seconds >= 4 * REQUEST_S
    assert 2 * REQUEST_S <= pairs.seconds < alone.seconds
    assert alone.whole_tokens_per_s == pytest.approx(28 / alone.seconds)
    assert alone.tokens_per_s == pytest.approx(alone.whole_tokens_per_s, rel=0.1)


def stops_soon(pid: int) -> bool:
    """Return whether the process stops within 5 s; a busy machine delivers the signal late."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T":
            return True
        time.sleep(0.01)
    return False


def test_rounds_alternate_and_one_server_runs_at_a_time(tmp_path: Path) -> None:
    order: list[str] = []
    with started("plain", tmp_path) as plain, started("dspark", tmp_path) as dspark:
        servers = {"plain": plain, "dspark": dspark}
        for server in servers.values():
            server.wait_ready(30)

        def on_round(name: str, _: Round) -> None:
            order.append(name)
            for server in servers.values():  # between rounds both are frozen
                assert stops_soon(server.pid)

        plan = Plan(("a", "b"), (12,), repeats=2, max_new_tokens=7)
        results = asyncio.run(measure(plain, dspark, plan, on_round))
    assert order == ["plain", "dspark", "dspark", "plain"]
    assert [len(pair.plain.completions) for pair in results[12]] == [36, 36]


def round_of(users: int, seconds: float, step_s: float, spec: SpecStats | None) -> Round:
    """One request: a token after 1 s, then two chunks of two tokens, `step_s` apart."""
    times = (1.0, 1.0 + step_s, 1.0 + 2 * step_s)
    sizes = (1, 2, 2)
    chunks = tuple(Chunk(t, "x", n, (7,) * n) for t, n in zip(times, sizes, strict=True))
    answer = Answer(0.0, seconds, Completion(chunks, 3, "length", spec))
    return Round.of(users, [answer], seconds)


def test_throughput_counts_while_all_are_busy() -> None:
    """Two users, four answers of four tokens. One user is through after 4 s, the other runs on
    alone until 8 s; by 4 s its last answer had a token and a third of the next."""

    def answer(sent: float, step_s: float) -> Answer:
        times = [step_s * (i + 1) for i in range(4)]
        chunks = tuple(Chunk(at, "x", 1, (7,)) for at in times)
        return Answer(sent, sent + times[-1], Completion(chunks, 3, "length"))

    answers = [answer(0.0, 0.5), answer(0.0, 0.5), answer(2.0, 0.5), answer(2.0, 1.5)]
    round_ = Round.of(2, answers, 8.0)
    assert round_.busy.window == (0.0, 4.0)
    assert round_.tokens_per_s == pytest.approx((12 + 4 / 3) / 4)
    assert round_.whole_tokens_per_s == pytest.approx(16 / 8)


def test_figures() -> None:
    pairs = [
        PairedRound(round_of(1, 10.0, 1.0, None), round_of(1, seconds, 1.5, SPEC))
        for seconds in (5.0, 8.0, 10.0)
    ]
    metrics = as_metrics({1: pairs, 4: pairs[:1]}, Plan(("a",), (1, 4), 3, 5), gamma=1)
    alone = metrics["by_concurrency"][0]
    # one user is busy until the last token: after 1 + 2 x 1.0 s plain, 1 + 2 x 1.5 s with drafts
    assert alone["plain"] == pytest.approx(5 / 3)
    assert alone["dspark"] == pytest.approx(5 / 4)
    assert metrics["speedup_vs_plain_c1"] == alone["speedup"] == pytest.approx(3 / 4)
    assert alone["speedup_ci95"] == pytest.approx([3 / 4, 3 / 4])
    assert pairs[0].plain.whole_tokens_per_s == pytest.approx(0.5)
    assert pairs[1].dspark.whole_tokens_per_s == pytest.approx(5 / 8)
    # whole rounds: 10 s plain against 5, 8 and 10 s
    whole = paired_ratio([2.0, 1.25, 1.0], [1.0, 1.0, 1.0])
    assert alone["whole_round_speedup"] == pytest.approx(2.5 ** (1 / 3))
    assert alone["whole_round_speedup_ci95"] == pytest.approx([whole.low, whole.high])
    assert alone["interval"] == METHOD
    assert metrics["tau_demo"] == pytest.approx(2.0)
    assert alone["identical"] == [3, 3]
    # DSPARK: 3 s for 2 steps; plain, without counts: 2 s for 4 tokens
    assert metrics["step"]["verify_ms"] == pytest.approx(1500.0)
    assert metrics["step"]["plain_decode_ms"] == pytest.approx(500.0)
    assert metrics["step"]["ratio"] == pytest.approx(3.0)
    assert "speedup_vs_plain_c1" not in as_metrics({4: pairs}, Plan(("a",), (4,), 3, 5), gamma=1)
    few = metrics["by_concurrency"][1]
    assert few["speedup_ci95"] is few["whole_round_speedup_ci95"] is None  # one repeat alone


def test_every_repeat_is_kept() -> None:
    pairs = [
        PairedRound(round_of(1, 10.0, 1.0, None), round_of(1, seconds, step_s, SPEC))
        for seconds, step_s in ((5.0, 1.5), (8.0, 2.0), (10.0, 3.0))
    ]
    metrics = json.loads(json.dumps(as_metrics({1: pairs}, Plan(("a",), (1,), 3, 5), gamma=1)))
    (row,) = metrics["by_concurrency"]
    assert row["repeats"]["dspark"] == pytest.approx([5 / 4, 5 / 5, 5 / 7])
    assert row["repeats"]["dspark_whole"] == pytest.approx([5 / 5, 5 / 8, 5 / 10])
    assert row["repeats"]["plain"] == pytest.approx([5 / 3] * 3)
    assert row["repeats"]["plain_whole"] == pytest.approx([5 / 10] * 3)
    assert metrics["step"]["repeats"]["verify_ms"] == pytest.approx([1500, 2000, 3000])
    assert metrics["step"]["repeats"]["plain_decode_ms"] == pytest.approx([500] * 3)
    assert speedups(row["repeats"]).items() <= row.items()  # the ratios follow from what is kept


def test_the_intervals_of_speedups_by_the_t_table() -> None:
    """Four repeats. Log ratios 0, 0, 0, 0.04 while all are busy, minus as much over whole rounds:
    t(97.5%, 3) = 3.182446 standard errors of 0.01."""
    more, half = math.exp(0.04), 3.182446 * 0.01
    plain = [50.0, 60.0, 55.0, 40.0]
    faster = [*plain[:3], 40.0 * more]
    found = speedups(
        {"dspark": faster, "plain": plain, "dspark_whole": plain, "plain_whole": faster}
    )
    assert math.log(found["speedup"]) == pytest.approx(0.01)
    busy, whole = found["speedup_ci95"], found["whole_round_speedup_ci95"]
    assert np.log(busy) == pytest.approx([0.01 - half, 0.01 + half], abs=1e-7)
    assert np.log(whole) == pytest.approx([-0.01 - half, -0.01 + half], abs=1e-7)
    cost = step_cost(faster, plain)
    assert np.log(cost["ratio_ci95"]) == pytest.approx([0.01 - half, 0.01 + half], abs=1e-7)
    assert cost["verify_ms"] == pytest.approx((50 + 55) / 2)  # the median of an even number


def test_repeats_and_concurrencies_alternate_who_goes_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also from one concurrency to the next: a drifting machine favours neither server."""
    order: list[str] = []

    async def round_at(url: str, plan: Plan, users: int) -> Round:
        order.append(f"{url} {users}")
        return round_of(users, 10.0, 1.0, None)

    monkeypatch.setattr(paired, "fresh_round", round_at)

    def server(name: str) -> Any:
        still = dict.fromkeys(("pause", "resume"), lambda: None)
        return SimpleNamespace(spec=SimpleNamespace(url=name), **still)

    plan = Plan(("a",), (1, 4), repeats=2, max_new_tokens=5)
    found = asyncio.run(measure(server("plain"), server("dspark"), plan, lambda *_: None))
    assert order == [
        "plain 1", "dspark 1", "dspark 4", "plain 4", "dspark 1", "plain 1", "plain 4", "dspark 4",
    ]  # fmt: skip
    assert [len(found[users]) for users in (1, 4)] == [2, 2]
    assert len(order) == plan.rounds


@pytest.mark.parametrize(("users", "repeats"), [((), 1), ((0,), 1), ((1,), 0)])
def test_senseless_plans_are_refused(users: tuple[int, ...], repeats: int) -> None:
    with pytest.raises(DSparkError):
        Plan(("a",), users, repeats, 8)


def test_a_round_has_enough_prompts() -> None:
    plan = Plan(("a", "b"), (1, 8), 1, 8)
    assert plan.batch(1) == ["a", "b"] * 6
    assert len(plan.batch(8)) == 24
    assert set(plan.batch(8)) == {"a", "b"}

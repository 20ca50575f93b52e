"""A sweep's folder with figures known beforehand: what the page's model makes of a machine.

Throughput of every arm is the model's times `SCALE`, off by a fixed percent or so from trial to
trial, so that the report must find SCALE, the acceptance and the ratios again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

from sglang_dspark.loadtest.report.page_model import MIX, Curve, LoadModel, Workload
from sglang_dspark.loadtest.report.page_reference import Choice, Outcome, outcome
from sglang_dspark.loadtest.sweep.config import Comparison, OpenLoop, SlaLimits, SweepConfig
from sglang_dspark.loadtest.sweep.run_dir import (
    CELLS,
    RUN_FILE,
    SUMMARY_FILE,
    ArmRecord,
    Cell,
    Cores,
    Counters,
    Domain,
    Loop,
    Percentiles,
    Pilot,
    RunInfo,
    Table,
    write,
)
from sglang_dspark.loadtest.sweep.summary import summarise
from sglang_dspark.schedule.cost_table import FORMAT, CostTable, ProfileKey

GAMMA = 3
SCALE = 0.9
USERS = (1, 2, 4, 8)
RATES = (0.5, 1.5)
TRIALS = 3
SURVIVAL = {"chat": (0.4, 0.15, 0.05), "code": (0.7, 0.45, 0.3), "math": (0.8, 0.6, 0.4)}
STEPS = 1000  # verify steps of a cell and domain
TABLE = CostTable(
    key=ProfileKey("target", "drafter", "float32", "a laptop", "tp1", "eager", "1", 3),
    knots=(1, 4, 8, 16, 32),
    seconds=(0.020, 0.024, 0.032, 0.046, 0.080),
    padded=False,
    per_request=0.0,
    per_context=4e-6,
    draft_requests=(1, 8, 16),
    draft_seconds=(
        (0.0, 0.003, 0.0035, 0.004),
        (0.0, 0.005, 0.007, 0.009),
        (0.0, 0.007, 0.01, 0.014),
    ),
)
# Arm: the page's policy and the verify length that stands for it. MTP-1 is fixed at 1, slower.
ARMS = {
    "plain": ("plain", 0, 0),
    "mtp1": ("fixed", 1, 1),
    "dspark-fixed-gamma": ("fixed", GAMMA, GAMMA),
    "dspark": ("dspark", GAMMA, GAMMA),
}
PROMPT, ANSWER = 50, 60
CONTEXT = PROMPT + ANSWER / 2


def true_model(spread: float = 1.2) -> LoadModel:
    """The machine and drafter that the run pretends to have measured."""
    curve = Curve.of(TABLE, 16, CONTEXT)
    workloads = {n: Workload(1 / len(SURVIVAL), a, STEPS) for n, a in sorted(SURVIVAL.items())}
    return LoadModel(
        GAMMA,
        16,
        curve.tokens,
        curve.per_request,
        curve.draft,
        workloads,
        "made",
        spread,
        "made",
        SCALE,
        SCALE,
    )


def make_run(
    folder: Path,
    *,
    tables: bool = True,
    arms: Sequence[str] = tuple(ARMS),
    trials: int = TRIALS,
    golden: str | None = None,
) -> Path:
    """Write a whole run. tables: keep the scheduled arm's step times, as a real one does."""
    config = SweepConfig(
        name="made",
        arms=list(arms),
        golden=golden,
        compare=Comparison(over=arms[-1], under=arms[1 if len(arms) > 2 else 0]),
        concurrency=list(USERS),
        open=OpenLoop(load=[0.5]),
        slas=[SlaLimits(speed_p50=30.0, speed_p10=20.0), SlaLimits(ttft_p95=0.5)],
    )
    model = true_model()
    cells: list[Cell] = []
    for trial in range(trials):
        for loop, loads in (("closed", USERS), ("open", RATES)):
            for level in loads:
                for arm in arms:
                    cells.append(_cell(model, arm, loop, level, trial, len(cells)))
    lost = cells[5].model_copy(update={"void": "the client was late by 9.0 ms at p99"})
    cells[5] = lost.model_copy(update={"failures": {"http": 2}, "errors": {"http": "503 <busy>"}})
    for cell in cells:
        write(folder / CELLS / f"{cell.name}.json", cell)
    write(folder / SUMMARY_FILE, summarise(config, cells, len(cells)))
    write(folder / RUN_FILE, _info(config, cells, tables))
    return folder


def _cell(model: LoadModel, arm: str, loop: Loop, level: float, trial: int, order: int) -> Cell:
    policy, length, gamma = ARMS[arm]
    users = round(level) if loop == "closed" else 4
    found = outcome(model, Choice(MIX, policy, users, length, 0.5, model.spread))
    wobble = 1 + 0.004 * ((7 * trial + 3 * order) % 5 - 2)
    slower = 0.9 if arm == "mtp1" else 1.0
    rate = found.tokens_per_s * wobble * slower
    speed = rate / users
    domains = {name: _domain(survival, gamma, speed, found) for name, survival in SURVIVAL.items()}
    requests = 40
    return Cell(
        arm=arm,
        loop=loop,
        level=level,
        trial=trial,
        order=order,
        attempt=0,
        mix="math,code,chat",
        fingerprint=f"{loop}{level}{trial}",
        started="2026-11-21T22:00:00+00:00",
        seconds=10.0,
        requests=requests,
        ok=requests,
        tokens=requests * ANSWER,
        tokens_per_s=rate,
        speed=_spread(speed, 0.8),
        speeds=[speed * (0.8 + 0.01 * i) for i in range(requests)],
        ttft=_spread(0.05 * users),
        itl=_spread(1 / speed),
        tpot=_spread(1 / speed),
        e2e=_spread(ANSWER / speed),
        tau=found.tau,
        steps=STEPS * len(SURVIVAL) if gamma else 0,
        accepted=0,
        histogram=_summed([domain.histogram for domain in domains.values()]),
        step_s=found.seconds,
        verify_length=found.drafts,
        domains=domains,
        failures={},
        errors={},
        lag_ms=0.8,
        void="",
        before=_counters(arm, found, users, 0, -1.0),
        after=_counters(arm, found, users, 10, 10.0),
        timeline=[_counters(arm, found, users, i, float(i)) for i in range(11)],
    )


def _domain(survival: tuple[float, ...], gamma: int, speed: float, found: Outcome) -> Domain:
    """Drafts are accepted where they are verified, which all kinds of prompts are alike."""
    shares = [a * verified for a, verified in zip(survival, found.admitted, strict=True)]
    at_least = [STEPS, *(round(STEPS * share) for share in shares[:gamma]), 0]
    histogram = [a - b for a, b in pairwise(at_least)]
    return Domain(ok=13, speed_p50=speed, tau=None, histogram=histogram if gamma else [])


def _counters(arm: str, found: Outcome, users: int, seconds: int, at: float) -> Counters:
    """Of a server that took `seconds` seconds of load."""
    steps = seconds * STEPS * len(SURVIVAL) / 10 / users
    common = {"at": at, "requests": 4.0 * seconds, "generated": 240.0 * seconds,
              "prompt": 4.0 * PROMPT * seconds, "running": float(users), "queued": 0.0}  # fmt: skip
    if arm != "dspark":
        return Counters(**common)
    requests = steps * users
    return Counters(
        **common,
        steps={"speculate": steps * (1 - found.skipped), "plain": steps * found.skipped},
        skips={"drafting does not pay": steps * found.skipped},
        admitted=[requests * each for each in found.admitted],
        accepted=[requests * each for each in found.accepted],
        budget_sum=requests * found.drafts,
        budget_count=steps,
        step_sum=found.seconds * steps,
        step_count=steps,
    )


def _spread(middle: float, low: float = 0.9) -> Percentiles:
    return Percentiles(
        mean=middle, p10=low * middle, p50=middle, p90=1.1 * middle, p95=1.2 * middle,
        p99=1.5 * middle,
    )  # fmt: skip


def _summed(rows: list[list[int]]) -> list[int]:
    width = max(map(len, rows))
    return [sum(row[n] for row in rows if n < len(row)) for n in range(width)]


def _info(config: SweepConfig, cells: list[Cell], tables: bool) -> RunInfo:
    arms = [
        ArmRecord(
            name=name,
            about=f"the arm {name}",
            gamma=gamma,
            command=f"python -m sglang.launch_server --speculative-algorithm={algorithm}",
            config={"schedule": {"mode": "static"}} if name == "dspark-fixed-gamma" else {},
            environment={},
            drafter="drafters/made" if gamma else None,
            drafter_sha256="ab" * 32 if gamma else None,
            tables={"costs": _table()} if name == "dspark" and tables else {},
        )
        for name in config.arms
        for gamma in [ARMS[name][2]]
        for algorithm in ["EAGLE" if name == "mtp1" else "DSPARK" if gamma else "none"]
    ]
    return RunInfo(
        name="made",
        config=config.model_dump(mode="json"),
        argv=["dspark", "sweep", "--config", "configs/sweep/made.yaml"],
        commit="0" * 40,
        versions={"sglang": "0.5.23"},
        device="a laptop",
        hardware={"processor": "two cores"},
        arms=arms,
        cores=Cores(server=[0], client=[1], nice=0, why="one each"),
        pilot=Pilot(arm="plain", tokens_per_s={1: 40.0}, answer_tokens={1: 60.0}),
        plan=[cell.name for cell in cells],
        started="2026-11-21T22:00:00+00:00",
        ended="2026-11-21T22:30:00+00:00",
    )


def _table() -> Table:
    return Table(path="costs/0.json", sha256="cd" * 32, content={"format": FORMAT, **asdict(TABLE)})

"""Measure the scheduler against plain decoding and every fixed gamma: `dspark bench adaptive`.

All servers are up the whole time and exactly one may run; the others are frozen (SIGSTOP), because
an idle SGLang scheduler polls. A trial measures every arm once at every concurrency, next to each
other and in changing order (`verdict.arm_order`), on the same requests; other trials use other
prompts. Answers vary in length, as in real traffic: answers of one length end together, and
plain decoding alone would prefill in waves. Throughput is counted while all users are busy
(`measure.measure_cell`).

Finished rounds are saved in a journal, so that an interrupted run can be resumed.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from sglang_dspark.common.atomic_write import replace_text
from sglang_dspark.drafter.config import read_config
from sglang_dspark.errors import DSparkError
from sglang_dspark.loadtest.bench.journal import Head, keep_row, open_journal
from sglang_dspark.loadtest.client.client import Sampling, SGLangClient
from sglang_dspark.loadtest.client.load import closed_loop
from sglang_dspark.loadtest.client.measure import Measurement
from sglang_dspark.loadtest.servers.arms import Arm
from sglang_dspark.loadtest.servers.server import ServerProcess
from sglang_dspark.loadtest.sweep.verdict import arm_order

PLAIN, SCHEDULED, FIXED = "plain", "scheduled", "fixed-"
LEAST_REQUESTS, ROUNDS_OF_USERS = 6, 2
CONTEXT = 384  # KV cache tokens per request slot: prompts of this set, answers and windows
_WARM_UP = Sampling(max_new_tokens=8)


@dataclass(frozen=True)
class Plan:
    """Describe the measurement.

    prompts: rendered; mean_tokens: mean length of an answer; least: minimum number of requests in a
    round, which otherwise has two for each user. Rounds are short and follow each other closely, so
    that a slow minute of the machine affects all arms alike.

    Raises DSparkError on invalid numbers.
    """

    prompts: tuple[str, ...]
    concurrency: tuple[int, ...]
    arms: tuple[str, ...]
    trials: int
    mean_tokens: int
    least: int = LEAST_REQUESTS

    def __post_init__(self) -> None:
        if not self.concurrency or min(self.concurrency) < 1:
            raise DSparkError("concurrency must be a list of positive numbers, such as 1,4,8")
        if min(self.trials, self.least) < 1 or self.mean_tokens < 4 or not self.prompts:
            raise DSparkError(
                "a run needs a trial, a request, answers of 4 tokens or more, and prompts"
            )
        if PLAIN not in self.arms or SCHEDULED not in self.arms:
            raise DSparkError(f"the arms must hold {PLAIN} and {SCHEDULED}: {self.arms}")

    def requests(self, users: int, trial: int) -> list[tuple[str, Sampling]]:
        """Return the prompts and lengths of a round, the same for every arm of the trial."""
        count = max(self.least, ROUNDS_OF_USERS * users)
        lengths = np.random.default_rng([users, trial]).integers(
            self.mean_tokens // 2, self.mean_tokens + self.mean_tokens // 2 + 1, size=count
        )
        first = trial * count
        return [
            (self.prompts[(first + i) % len(self.prompts)], Sampling(int(length)))
            for i, length in enumerate(lengths)
        ]

    def rounds(self) -> list[tuple[int, int, str]]:
        """List (trial, users, arm) in the order of measurement."""
        return [
            (trial, users, arm)
            for trial in range(self.trials)
            for number, users in enumerate(self.concurrency)
            for arm in arm_order(self.arms, trial + number)
        ]

    def fingerprint(self) -> str:
        """Hash all fields of the plan."""
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Figure:
    """One round's outcome. tokens_per_s while all users were busy.

    lag_ms: p99 by which the client was late. The client shares the cores with the servers' other
    processes. The lag shifts arrival times, not the token count of a round, so no round is voided.
    """

    trial: int
    users: int
    arm: str
    tokens_per_s: float
    tau: float | None
    ttft_ms: float
    lag_ms: float


class Journal:
    """Figures of a run, a JSON line each (`journal.py`)."""

    def __init__(self, path: Path, head: Head) -> None:
        """Read or create the journal. Raises DSparkError for a journal with another head."""
        self.path = path
        self.figures = open_journal(path, head, lambda row: Figure(**row))

    def has(self, trial: int, users: int, arm: str) -> bool:
        """Return whether this round is measured."""
        return any((f.trial, f.users, f.arm) == (trial, users, arm) for f in self.figures)

    def add(self, figure: Figure) -> None:
        """Save a round's figure."""
        self.figures.append(figure)
        keep_row(self.path, asdict(figure))


def arms_of(gammas: Sequence[int], slots: int) -> list[Arm]:
    """List plain, each fixed gamma, and the scheduler's defaults. slots: of running requests."""
    speculation = "--speculative-algorithm=DSPARK"
    pools = [f"--max-running-requests={slots}", f"--max-total-tokens={CONTEXT * max(slots, 8)}"]
    fixed = [
        Arm(
            name=f"{FIXED}{gamma}",
            about=f"{gamma} drafts for every request in every step, all verified",
            drafter=f"{FIXED}{gamma}",
            arguments=[speculation, *pools],
            config={"schedule": {"mode": "static"}},
        )
        for gamma in gammas
    ]
    return [
        Arm(name=PLAIN, about="no speculation", arguments=pools),
        *fixed,
        Arm(
            name=SCHEDULED,
            about="what the package does without any setting",
            drafter="dspark",
            arguments=[speculation, *pools],
        ),
    ]


def shortened(drafter: Path, gamma: int, folder: Path) -> Path:
    """Create a copy of the drafter whose config has this `gamma`; weights are linked.

    SGLang reads gamma from the drafter alone and refuses another one. Raises DSparkError if
    `folder` cannot be written or the drafter has no config.
    """
    place = folder.absolute() / f"drafter-{gamma}"
    try:
        place.mkdir(parents=True, exist_ok=True)
        for file in drafter.absolute().glob("*.safetensors*"):
            if not (link := place / file.name).is_symlink():
                link.symlink_to(file)
        config = read_config(drafter)
        text = json.dumps({**config, "block_size": gamma}) + "\n"
        replace_text(place / "config.json", text, "the drafter's config")
    except OSError as error:
        raise DSparkError(f"cannot make a drafter of gamma {gamma} in {place}: {error}") from None
    return place


def measure(
    servers: Mapping[str, ServerProcess],
    plan: Plan,
    journal: Journal,
    on_round: Callable[[Figure], None],
) -> None:
    """Measure every round that the journal lacks. Servers are ready, frozen before and after.

    Raises DSparkError if a server fails a request.
    """
    warm: set[str] = set()
    for trial, users, arm in plan.rounds():
        if journal.has(trial, users, arm):
            continue
        requests = plan.requests(users, trial)
        server = servers[arm]
        server.resume()
        try:
            if arm not in warm:  # work that only a server's first requests cause
                asyncio.run(_round(server.spec.url, plan.requests(2, plan.trials), 2))
                warm.add(arm)
            cell = asyncio.run(_round(server.spec.url, requests, users))
        finally:
            server.pause()
        tau = None if arm == PLAIN else cell.tau
        figure = Figure(trial, users, arm, cell.tokens_per_s, tau, 1e3 * cell.ttft.p50, cell.lag_ms)
        journal.add(figure)
        on_round(figure)


async def _round(url: str, requests: Sequence[tuple[str, Sampling]], users: int) -> Measurement:
    """Run a closed loop, after discarding one request and emptying the prefix cache."""
    async with SGLangClient(url) as client:
        await client.complete(requests[-1][0], _WARM_UP)
        await client.flush_cache()
        return (await closed_loop(client, requests, users)).busy

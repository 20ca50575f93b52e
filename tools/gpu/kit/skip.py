"""Drafts that do not pay: a drafter that is nearly always wrong, served beside plain decoding.

Both servers stand on one device, the idle one frozen, rounds in turn as in `dspark bench serve`.
A row for each round: tokens/s, how many tokens are right (a wrong one fails the stage), and of the
scheduled server how many steps had no draft and why. At the end ratios to plain: to leave drafts
out must cost nothing.
Without a GPU a tiny target is served on the CPU and nothing is said to be measured.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from sglang_dspark.errors import DSparkError
from sglang_dspark.loadtest.bench.paired import PairedRound, Plan, as_metrics, fresh_round
from sglang_dspark.loadtest.client.load import Round
from sglang_dspark.loadtest.servers.server import ServerProcess
from sglang_dspark.loadtest.sweep.run_dir import Counters
from tools.gpu.kit.device import device_name, say
from tools.gpu.kit.models import QWEN3_4B, TINY, ready
from tools.gpu.kit.servers import (
    COUNTERS_S,
    Load,
    counters,
    figures,
    prompts,
    right,
    serve,
    server_of,
    wrong_tokens,
)
from tools.gpu.packing.arrival import kit_home

ARMS = ("plain", "dspark")
LOADS = {
    "cuda": (QWEN3_4B, Load((1, 8, 32, 128), 3, 128, 128)),
    "cpu": (TINY, Load((2,), 1, 16, 32)),
}
_MEMORY = ("--mem-fraction-static=0.4",)  # of what is free, as there are two servers


def main() -> int:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape, load = LOADS[device]
    say(device=device_name(), measured=device == "cuda")
    home = kit_home()
    models, logs = ready(home, shape, device), home / "logs"
    drafters = {"dspark": models / "poor"}
    specs = [server_of(arm, models / "target", drafters, device, load.users, logs) for arm in ARMS]
    if device == "cuda":
        specs = [replace(spec, arguments=(*spec.arguments, *_MEMORY)) for spec in specs]
    follows = np.load(models / "follows.npy")
    plan = Plan(prompts(load, shape), load.users, load.repeats, load.answer_tokens)

    def compare(servers: list[ServerProcess]) -> None:
        for server in servers:
            server.pause()
        results = {users: [] for users in load.users}  # type: dict[int, list[PairedRound]]
        whole = True
        for repeat in range(load.repeats):
            for number, users in enumerate(load.users):
                order = servers if (repeat + number) % 2 == 0 else servers[::-1]
                found = {each.spec.name: one_round(each, plan, users, follows) for each in order}
                (plain, fine), (dspark, also) = found["plain"], found["dspark"]
                whole &= fine and also
                results[users].append(PairedRound(plain, dspark))
        say(**as_metrics(results, plan, shape.gamma))
        if not whole:
            raise DSparkError("answers with wrong tokens")

    return serve(specs, logs, compare)


def one_round(server: ServerProcess, plan: Plan, users: int, follows: Any) -> tuple[Round, bool]:
    """One round on a server that is frozen before and after, and whether its answers are right;
    prints its row."""
    server.resume()
    try:
        before = counters(server)
        round_ = asyncio.run(fresh_round(server.spec.url, plan, users))
        time.sleep(COUNTERS_S)
        after = counters(server)
    finally:
        server.pause()
    drafts = sum(after.admitted) - sum(before.admitted)
    row = {**figures(round_, drafts), **skipped(before, after), **right(round_, plan, follows)}
    say(row={"server": server.spec.name, **row})
    line = wrong_tokens(server.spec.name, row)
    if line is not None:
        print(f"skip: {line}", file=sys.stderr, flush=True)
    return round_, line is None


def skipped(before: Counters, after: Counters) -> dict[str, Any]:
    """Steps of a round, those without a draft as a share, and why they had none; nulls of a server
    that does not schedule."""
    steps = sum(after.steps.values()) - sum(before.steps.values())
    without = grown(before.skips, after.skips)
    return {
        "steps": steps or None,
        "skipped": sum(without.values()) / steps if steps else None,
        "reasons": without,
    }


def grown(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """By how much each count has grown, those alone that have."""
    more = {name: count - before.get(name, 0.0) for name, count in after.items()}
    return {name: count for name, count in more.items() if count}


if __name__ == "__main__":
    sys.exit(main())

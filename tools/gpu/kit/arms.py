"""Every way to serve one target of a real model's shape, side by side on one device.

All servers are up and all but one are frozen, rounds in turn as in `dspark bench serve`; so each
comparison is of the same minute on the same card. The scheduled server starts last and alone: it
measures its step times then. What the target says follows from a table (`models.py`), so each
answer is checked: `right` counts the tokens that it names, and one that it does not name fails the
stage. At the end sampled requests go to plain
decoding and to the scheduled server (`sampled.py`).
A server that fails is named with the end of its log, and the others go on; without the scheduled
one there is nothing to compare.
Without a GPU a tiny target is served on the CPU, and nothing is said to be measured.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch

from sglang_dspark.errors import DSparkError
from sglang_dspark.intervals import paired_ratio
from sglang_dspark.loadtest.bench.paired import Plan, fresh_round
from sglang_dspark.loadtest.servers.server import ServerProcess, ServerSpec
from tools.gpu.kit.device import device_name, say
from tools.gpu.kit.models import QWEN3_4B, TINY, ready
from tools.gpu.kit.runs import seconds_left
from tools.gpu.kit.sampled import sampled
from tools.gpu.kit.servers import (
    COUNTERS_S,
    READY_S,
    Load,
    admitted,
    figures,
    prompts,
    right,
    server_of,
    wrong_tokens,
)
from tools.gpu.packing.arrival import kit_home

Left = Callable[[], float]
SCHEDULED = "dspark"
# Most telling first: as many as the device's memory holds.
ARMS = {
    "cuda": (SCHEDULED, "plain", "upstream-dspark-static", "mtp1", "dspark-fixed-gamma"),
    "cpu": (SCHEDULED, "plain", "mtp1"),
}
SERVED = {
    "cuda": (QWEN3_4B, Load((1, 8, 32, 128), 3, 128, 96)),
    "cpu": (TINY, Load((1, 2), 1, 16, 24)),
}
ROOM_GIB = 19  # of a server: weights, caches, graphs
_MEMORY = ("--mem-fraction-static=0.9", "--max-total-tokens=40960")
_SPARE_S = 45.0  # left when the last round ends, for sampled requests


def main() -> int:
    left = seconds_left()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape, load = SERVED[device]
    say(device=device_name(), measured=device == "cuda", shape=asdict(shape), load=asdict(load))
    home = kit_home()
    models, logs = ready(home, shape, device), home / "logs"
    drafters = {"dspark": models / "dspark", "mtp": models / "mtp"}
    specs = [
        shared(server_of(arm, models / "target", drafters, device, load.users, logs), device)
        for arm in arms_that_fit(device)
    ]
    servers = {spec.name: ServerProcess(spec, logs) for spec in specs}
    follows = np.load(models / "follows.npy")
    plan = Plan(prompts(load, shape), load.users, load.repeats, load.answer_tokens)
    try:
        up = started(servers)
        whole = len(up) == len(servers)
        if SCHEDULED in up:
            whole &= compared(up, plan, follows, left)
    finally:
        for server in servers.values():
            server.stop()
    return 0 if whole else 1


def arms_that_fit(device: str) -> tuple[str, ...]:
    """As many as the device's memory holds, and no fewer than two."""
    if device == "cpu":
        return ARMS[device]
    whole = torch.cuda.get_device_properties(0).total_memory / 2**30
    return ARMS[device][: max(2, int(whole / ROOM_GIB))]


def shared(spec: ServerSpec, device: str) -> ServerSpec:
    """The server for a device that it does not have alone."""
    return replace(spec, arguments=(*spec.arguments, *_MEMORY)) if device == "cuda" else spec


def started(servers: Mapping[str, ServerProcess]) -> dict[str, ServerProcess]:
    """The servers that are ready, each frozen: first the others at once, then the scheduled one."""
    up: dict[str, ServerProcess] = {}
    others = [name for name in servers if name != SCHEDULED]
    for names in (others, [SCHEDULED]):
        for name in names:
            servers[name].start()
        for name in names:
            if is_ready(servers[name]):
                up[name] = servers[name]
        for name in names:
            if name in up:
                up[name].pause()
    return up


def is_ready(server: ServerProcess) -> bool:
    """Whether a server came up; else its reason is a row and the end of its log is on stderr."""
    try:
        say(row={"server": server.spec.name, "ready_s": round(server.wait_ready(READY_S), 1)})
    except DSparkError as error:
        lost(server, error)
        return False
    return True


def lost(server: ServerProcess, error: DSparkError) -> None:
    """Say that a server failed."""
    say(row={"server": server.spec.name, "failed": str(error)})
    print(f"--- {server.spec.name}: {error}\n{server.log_tail(80)}", file=sys.stderr, flush=True)


def compared(up: dict[str, ServerProcess], plan: Plan, follows: Any, left: Left) -> bool:
    """Rounds until the time is over; whether all was answered, and rightly. left: seconds."""
    speeds: dict[str, dict[int, list[float]]] = {}
    began, whole = time.monotonic(), True
    for repeat in range(plan.repeats):
        for number, users in enumerate(plan.concurrency):
            turn = (repeat + number) % len(up)
            for name in [*list(up)[turn:], *list(up)[:turn]]:
                try:
                    row = one_round(up[name], plan, users, follows)
                except DSparkError as error:
                    lost(up.pop(name), error)
                    whole = False
                    continue
                say(row={"repeat": repeat, "server": name, **row})
                if (line := wrong_tokens(name, row)) is not None:
                    print(f"arms: {line}", file=sys.stderr, flush=True)
                    whole = False
                speeds.setdefault(name, {}).setdefault(users, []).append(row["tokens_per_s"])
        took = (time.monotonic() - began) / (repeat + 1)
        if SCHEDULED not in up or left() < took + _SPARE_S:
            break
    say(ratios=ratios({name: speeds[name] for name in up if name in speeds}))
    if {"plain", SCHEDULED} <= set(up):
        whole &= sampled(up["plain"], up[SCHEDULED], plan, follows)
    return whole


def one_round(server: ServerProcess, plan: Plan, users: int, follows: Any) -> dict[str, Any]:
    """One round on a server that is frozen before and after."""
    server.resume()
    try:
        before = admitted(server)
        round_ = asyncio.run(fresh_round(server.spec.url, plan, users))
        if server.spec.name == SCHEDULED:
            time.sleep(COUNTERS_S)
        drafts = admitted(server) - before
    finally:
        server.pause()
    return {**figures(round_, drafts), **right(round_, plan, follows)}


def ratios(speeds: Mapping[str, Mapping[int, Sequence[float]]]) -> list[dict[str, Any]]:
    """Of the scheduled server's tokens/s over each other one's, by users."""
    if SCHEDULED not in speeds:
        return []
    found = []
    for users, ours in speeds[SCHEDULED].items():
        for name, of_users in speeds.items():
            if name != SCHEDULED:
                ratio = paired_ratio(ours, of_users[users])
                about = {"users": users, "over": name, "ratio": ratio.mid, "interval": ratio.bounds}
                found.append({**about, "trials": ratio.trials})
    return found


if __name__ == "__main__":
    sys.exit(main())

"""The steps of a scheduled server: predicted and measured times, host time, gaps, the head's share.

A server of the made-up target (`models.py`) decodes for 1 to 128 users at a time. Its step log says
what each step took and what was predicted; the table of its start is asked the same once more. So
there is a row for each tier: predicted by the start-up table, by the table as corrected since, and
measured. Then a profiler's trace of some steps at 64 and 128 users (`trace.py`): how long the host
needs, by stage, and how long the device waits. Targets: 150 us of the host in our code at 64, and
the sequential head within 1% of a round at 128. Without a GPU it all runs on a tiny target and
nothing is said to be measured.
"""

from __future__ import annotations

import json
import os
import sys
import time
from bisect import bisect_left
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import numpy as np
import torch

from sglang_dspark.common.files import load_json, load_yaml
from sglang_dspark.errors import DSparkError
from sglang_dspark.loadtest.servers.server import ServerProcess, ServerSpec
from sglang_dspark.models.simulated import SPECIALS, Shape
from sglang_dspark.paths import cache_root
from sglang_dspark.schedule.cost_model import CostModel, Step
from sglang_dspark.schedule.cost_table import CostTable, from_document
from tools.gpu.kit.device import device_name, say
from tools.gpu.kit.models import QWEN3_4B, TINY, ready
from tools.gpu.kit.servers import counters, serve, server_of
from tools.gpu.kit.trace import read_trace, summary
from tools.gpu.packing.arrival import kit_home

CONFIG = "SGLANG_DSPARK_CONFIG"
_WAIT_S = 60.0  # for a load to decode, and for an answer of a server that writes a trace


@dataclass(frozen=True)
class Load:
    """users: at once, whose steps are logged; traced: at once, under the profiler. prompt, answer,
    traced_answer: tokens; steps: of a trace."""

    users: tuple[int, ...]
    traced: tuple[int, ...]
    prompt: int
    answer: int
    traced_answer: int
    steps: int


LOADS = {
    "cuda": (QWEN3_4B, Load((1, 8, 32, 64, 128), (64, 128), 32, 256, 1024, 40)),
    "cpu": (TINY, Load((1, 2), (2,), 16, 64, 4000, 8)),
}


def main() -> int:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape, load = LOADS[device]
    say(device=device_name(), measured=device == "cuda")
    home = kit_home()
    models, logs = ready(home, shape, device), home / "logs"
    users = (*load.users, *load.traced)
    spec = server_of(
        "dspark", models / "target", {"dspark": models / "dspark"}, device, users, logs
    )
    log = logs / "steps.jsonl"
    log.unlink(missing_ok=True)

    def use(servers: list[ServerProcess]) -> None:
        for count in load.users:
            decode(servers[0], requests(shape, count, load.prompt, load.answer))
        table = table_of(models / "dspark")
        for row in by_tier(read_log(log), table):
            say(row=row)
        for count in load.traced:
            path = profiled(servers[0], shape, load, count, logs / "traces", device)
            say(**{f"traced_{count}": {"users": count, **summary(read_trace(path))}})

    return serve([logging_to(spec, log, logs)], logs, use)


def logging_to(spec: ServerSpec, log: Path, folder: Path) -> ServerSpec:
    """The server with a step log beside whatever our configuration says here."""
    named = os.environ.get(CONFIG)
    config = dict(load_yaml(Path(named))) if named else {}
    config["schedule"] = {**config.get("schedule", {}), "step_log": str(log)}
    path = folder.absolute() / "steps-dspark.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(config))
    return replace(spec, environment={**spec.environment, CONFIG: str(path)})


def requests(shape: Shape, users: int, prompt: int, answer: int) -> dict[str, Any]:
    """What /generate takes: random prompts, all of one length, answered to the same length."""
    draws = np.random.default_rng(users)
    ids = draws.integers(len(SPECIALS), shape.vocab, (users, prompt)).tolist()
    return {
        "input_ids": ids,
        "sampling_params": {"temperature": 0, "max_new_tokens": answer, "ignore_eos": True},
    }


def decode(server: ServerProcess, body: dict[str, Any]) -> None:
    """Answer all requests at once. Raises DSparkError when the server does not."""
    post(server, "/generate", body)


def post(server: ServerProcess, path: str, body: dict[str, Any]) -> httpx.Response:
    """POST to the server. Raises DSparkError when there is no answer or not a good one."""
    with httpx.Client(trust_env=False, timeout=300.0) as client:
        try:
            answer = client.post(f"{server.spec.url}{path}", json=body)
        except httpx.TransportError as error:
            raise DSparkError(f"{path} has no answer ({error})") from None
    if answer.status_code != 200:
        raise DSparkError(f"{path} answers {answer.status_code}: {answer.text[:200]}")
    return answer


def profiled(
    server: ServerProcess, shape: Shape, load: Load, users: int, folder: Path, device: str
) -> Path:
    """A trace of decode steps of so many users, taken while all of them decode."""
    before, name = steps_of(server), f"users-{users}"
    body = requests(shape, users, load.prompt, load.traced_answer)
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(decode, server, body)
        deadline = time.monotonic() + _WAIT_S
        while steps_of(server) <= before and not answers.done():
            if time.monotonic() > deadline:
                raise DSparkError(f"no step of {users} users within {_WAIT_S:.0f} s")
            time.sleep(0.05)
        asked = {
            "output_dir": str(folder),
            "num_steps": load.steps,
            "activities": ["CPU", "GPU"] if device == "cuda" else ["CPU"],
            "with_stack": False,
            "profile_id": name,
        }
        post(server, "/start_profile", asked)
        answers.result()
    traces = sorted(folder.glob(f"{name}-*.trace.json.gz"))
    if not traces:
        raise DSparkError(f"answers of {users} users ended before {load.steps} steps were traced")
    return traces[-1]


def steps_of(server: ServerProcess) -> float:
    """Decode steps since the server's start, as /metrics has them."""
    return sum(counters(server).steps.values())


def table_of(drafter: Path) -> CostTable:
    """The table of step times that the server of this drafter measured when it started."""
    folder = cache_root() / "sglang-dspark" / "costs"
    for path in sorted(folder.glob("*.json"), key=lambda path: -path.stat().st_mtime):
        table = from_document(load_json(path))
        if table.key.drafter.startswith(f"{drafter} "):
            return table
    raise DSparkError(f"no table of step times of {drafter} in {folder}")


def read_log(path: Path) -> list[dict[str, Any]]:
    """The lines of a step log whose step has a time."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in lines if line["measured_s"] is not None]


def by_tier(lines: Sequence[dict[str, Any]], table: CostTable) -> list[dict[str, Any]]:
    """A row for each tier that passes are padded to (where they are not, for each power of two):
    medians of milliseconds, and of how far the start-up table is off, a share."""
    model = CostModel(table, max(line["requests"] for line in lines))
    tiers: dict[int, list[dict[str, Any]]] = {}
    for line in lines:
        tiers.setdefault(tier_of(line["tokens"], table), []).append(line)
    rows = []
    for tier, found in sorted(tiers.items()):
        startup = [
            model.predict(Step(each["requests"], each["tokens"], each["context"], each["depth"]))
            for each in found
        ]
        taken = [each["measured_s"] for each in found]
        off = [predicted / true - 1 for predicted, true in zip(startup, taken, strict=True)]
        rows.append(
            {
                "tier": tier,
                "steps": len(found),
                "drafted": sum(each["depth"] > 0 for each in found),
                "startup_ms": 1e3 * median(startup),
                "corrected_ms": 1e3 * median(each["predicted_s"] for each in found),
                "measured_ms": 1e3 * median(taken),
                "startup_off": median(off),
            }
        )
    return rows


def tier_of(tokens: int, table: CostTable) -> int:
    """What a pass of so many tokens is padded to, or the next power of two."""
    if table.padded and tokens <= table.knots[-1]:
        return table.knots[bisect_left(table.knots, tokens)]
    return 1 << (tokens - 1).bit_length()


if __name__ == "__main__":
    sys.exit(main())

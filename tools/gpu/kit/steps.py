"""Read the steps of a scheduled server: times predicted and measured by tier, and traces.

The step log says what each step took and what was predicted; the table of its start is asked the
same once more. A profiler's trace of some steps (`trace.py`) says how long the host needs, by
stage, and how long the device waits.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import numpy as np

from sglang_dspark.common.files import load_json
from sglang_dspark.errors import DSparkError
from sglang_dspark.loadtest.servers.server import ServerProcess
from sglang_dspark.models.simulated import SPECIALS, Shape
from sglang_dspark.paths import cache_root
from sglang_dspark.schedule.cost_model import CostModel, Step
from sglang_dspark.schedule.cost_table import CostTable, from_document
from tools.gpu.kit.trace import read_trace, summary

ANSWER_S = 60.0


@dataclass(frozen=True)
class Traced:
    """A trace: lengths of prompts and answers in tokens, and how many steps are recorded."""

    prompt: int
    answer: int
    steps: int


def requests(
    shape: Shape, users: int, prompt: int, answer: int, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the body of a /generate request: prompts and answers of one length each, greedy unless
    `settings` say otherwise."""
    draws = np.random.default_rng(users)
    ids = draws.integers(len(SPECIALS), shape.vocab, (users, prompt)).tolist()
    return {
        "input_ids": ids,
        "sampling_params": {
            "temperature": 0,
            "max_new_tokens": answer,
            "ignore_eos": True,
            **settings,
        },
    }


def post(server: ServerProcess, path: str, body: dict[str, Any]) -> httpx.Response:
    """POST to the server. Raises DSparkError when there is no answer or not a good one."""
    with httpx.Client(trust_env=False, timeout=ANSWER_S) as client:
        try:
            answer = client.post(f"{server.spec.url}{path}", json=body)
        except httpx.TransportError as error:
            raise DSparkError(f"{path} has no answer ({error})") from None
    if answer.status_code != 200:
        raise DSparkError(f"{path} answers {answer.status_code}: {answer.text[:200]}")
    return answer


def traced(
    server: ServerProcess,
    shape: Shape,
    how: Traced,
    users: int,
    settings: Mapping[str, Any],
    folder: Path,
    device: str,
) -> dict[str, Any]:
    """Trace decode steps of so many users with these sampling settings and return the figures.

    Raises DSparkError when the answers end too early or the trace cannot be read.
    """
    body = requests(shape, users, how.prompt, how.answer, settings)
    path = _recorded(server, how, body, folder, device)
    return {"users": users, **summary(read_trace(path))}


def _recorded(
    server: ServerProcess, how: Traced, body: Mapping[str, Any], folder: Path, device: str
) -> Path:
    """Start the profiler, then the load: the server records its next `how.steps` passes."""
    users = len(body["input_ids"])
    greedy = body["sampling_params"]["temperature"] == 0
    name = f"users-{users}" + ("" if greedy else "-sampled")
    asked = {
        "output_dir": str(folder),
        "num_steps": how.steps,
        "activities": ["CPU", "GPU"] if device == "cuda" else ["CPU"],
        "with_stack": False,
        "profile_id": name,
    }
    post(server, "/start_profile", asked)
    post(server, "/generate", dict(body))
    traces = sorted(folder.glob(f"{name}-*.trace.json.gz"))
    if not traces:
        raise DSparkError(f"answers of {users} users ended before {how.steps} passes were traced")
    return traces[-1]


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


def step_rows(log: Path, table: CostTable) -> list[dict[str, Any]]:
    """Return a row for each tier of a step log. Raises DSparkError for one without steps."""
    lines = read_log(log)
    if not lines:
        raise DSparkError(f"{log} has no step with a time")
    return by_tier(lines, table)


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
    """Return the size a pass of so many tokens is padded to, or the next power of two."""
    if table.padded and tokens <= table.knots[-1]:
        return table.knots[bisect_left(table.knots, tokens)]
    return 1 << (tokens - 1).bit_length()

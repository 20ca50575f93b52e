"""Read the steps of a scheduled server: predicted and measured times by tier, and traces.

The step log has the measured and the predicted time of each step; the start-up table predicts each
again. A profiler's trace of some steps (`trace.py`) has the host's time by stage and the device's
waits.
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
    """A trace: lengths of prompts and answers in tokens, and the number of recorded steps."""

    prompt: int
    answer: int
    steps: int


def requests(
    shape: Shape, users: int, prompt: int, answer: int, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the body of a /generate request with prompts and answers of one length each.

    It is greedy unless `settings` has a temperature."""
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
    """Send a POST to the server. Raises DSparkError without an answer of status 200."""
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
    """Trace decode steps of `users` users with these sampling settings and return the figures.

    Raises DSparkError if the answers end too early or the trace cannot be read.
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
    """Find the newest table of step times that a server of this drafter measured at its start.

    Raises DSparkError if there is none."""
    folder = cache_root() / "sglang-dspark" / "costs"
    for path in sorted(folder.glob("*.json"), key=lambda path: -path.stat().st_mtime):
        table = from_document(load_json(path))
        if table.key.drafter.startswith(f"{drafter} "):
            return table
    raise DSparkError(f"no table of step times of {drafter} in {folder}")


def read_log(path: Path) -> list[dict[str, Any]]:
    """Read the lines of a step log whose step has a time."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in lines if line["measured_s"] is not None]


def step_rows(log: Path, table: CostTable) -> list[dict[str, Any]]:
    """Return a row for each tier of a step log. Raises DSparkError if no step has a time."""
    lines = read_log(log)
    if not lines:
        raise DSparkError(f"{log} has no step with a time")
    return by_tier(lines, table)


def by_tier(lines: Sequence[dict[str, Any]], table: CostTable) -> list[dict[str, Any]]:
    """Return a row for each tier to which passes are padded, or for each power of two if unpadded.

    It has medians of times in ms, and of the start-up table's relative error."""
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
    """Return the size to which a pass of `tokens` is padded, or the next power of two."""
    if table.padded and tokens <= table.knots[-1]:
        return table.knots[bisect_left(table.knots, tokens)]
    return 1 << (tokens - 1).bit_length()

"""Servers of the kit's targets: their flags, their prompts, and the figures of a round.

An arm is one of `configs/serve`. A made-up target's answers follow from a table (`models.py`), so
they can be checked: `right` counts the table's tokens.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from sglang_dspark.loadtest.bench.paired import Plan
from sglang_dspark.loadtest.client.load import Round
from sglang_dspark.loadtest.client.metrics import SpecStats, median, per_user_speed, step_ms
from sglang_dspark.loadtest.servers.arms import find_arms
from sglang_dspark.loadtest.servers.server import ServerProcess, ServerSpec
from sglang_dspark.loadtest.sweep.counters import read_counters
from sglang_dspark.loadtest.sweep.run_dir import Counters
from sglang_dspark.models.simulated import SPECIALS, Shape
from sglang_dspark.ports import free_port
from sglang_dspark.shipped import shipped

_GRAPHS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
_PREFILL_GRAPHS = ("128", "256", "512", "1024")  # tokens; a deployment captures some forty sizes
COUNTERS_S = 1.5  # the scheduler's counters are up to a second late


@dataclass(frozen=True)
class Load:
    """The load: users at once, rounds of each, prompt and answer lengths in tokens, and the share
    by which answers are longer and shorter."""

    users: tuple[int, ...]
    repeats: int
    prompt_tokens: int
    answer_tokens: int
    spread: float = 0.5


def server_of(
    arm: str,
    target: Path,
    drafters: dict[str, Path],
    device: str,
    users: Sequence[int],
    logs: Path,
) -> ServerSpec:
    """Build the arm's server on a free port, for the largest number of `users`."""
    [found] = find_arms([arm], shipped("configs") / "serve")
    flags = [f"--max-running-requests={max(users)}"]
    if device == "cpu":
        flags += ["--max-total-tokens=16384"]
    else:
        sizes = [str(size) for size in _GRAPHS if size < max(users)]
        flags += ["--dtype=bfloat16", "--attention-backend=triton"]
        flags += ["--cuda-graph-bs-prefill", *_PREFILL_GRAPHS]
        flags += ["--cuda-graph-bs-decode", *sizes, str(max(users))]
        if found.drafter is not None:
            flags += ["--speculative-draft-attention-backend=triton"]
    return found.server(target, drafters, free_port("127.0.0.1"), device, logs, flags)


def prompts(load: Load, shape: Shape) -> tuple[tuple[int, ...], ...]:
    """Draw as many random prompts as the largest round sends, equal in each call."""
    draws = np.random.default_rng(0)
    size = max(12, 3 * max(load.users)), load.prompt_tokens
    rows = draws.integers(len(SPECIALS), shape.vocab, size).tolist()
    return tuple(tuple(row) for row in rows)


def figures(round_: Round, admitted_drafts: float) -> dict[str, Any]:
    """Return a round's row.

    verified: drafts in a verify step of one request, by our scheduler's counters; null in an arm
    without them."""
    spec = SpecStats.total(done.spec for done in round_.completions if done.spec is not None)
    return {
        "users": round_.users,
        "tokens_per_s": round_.tokens_per_s,
        "whole_tokens_per_s": round_.whole_tokens_per_s,
        "tokens_per_s_user": per_user_speed(round_.completions),
        "ttft_ms": 1e3 * median([done.ttft for done in round_.completions]),
        "step_ms": step_ms(round_.completions),
        "tau": spec.tau if spec.steps else None,
        "verified": admitted_drafts / spec.steps if spec.steps and admitted_drafts else None,
        "void": round_.busy.void,
    }


def right(round_: Round, plan: Plan, follows: np.ndarray[Any, Any]) -> dict[str, list[int]]:
    """Count the answers' tokens that the table has after the one before, and the requested tokens.

    A missing token is wrong."""
    prompts = plan.batch(round_.users)
    agreed = [
        named(follows, int(prompt[-1]), done.ids)
        for prompt, done in zip(prompts, round_.completions, strict=True)
    ]
    return {"right": [sum(agreed), sum(plan.lengths(round_.users))]}


def named(follows: np.ndarray[Any, Any], last: int, ids: Sequence[int]) -> int:
    """Count an answer's tokens that the table has after the one before; `last` precedes all."""
    if not ids:
        return 0
    tokens = np.array([last, *ids])
    known = (tokens >= 0) & (tokens < len(follows))
    before, after = tokens[:-1], tokens[1:]
    return int((known[:-1] & (follows[np.where(known[:-1], before, 0)] == after)).sum())


def admitted(server: ServerProcess) -> float:
    """Return the drafts that our scheduler admitted since the start; 0 if it does not run."""
    return sum(counters(server).admitted)


def counters(server: ServerProcess) -> Counters:
    """Read the counters of the server's /metrics."""
    now = time.monotonic()
    with httpx.Client(trust_env=False, timeout=30.0) as client:
        return read_counters(client, server.spec.url, now, now)
